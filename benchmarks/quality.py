"""How good plans are on random clusters, over two baselines, and which freedom makes them so.

    python -m benchmarks.quality [--clusters N] [--first SEED] [--quick] [--json FILE] [--write]

Each cluster of `benchmarks/clusters.py` is planned in ever larger spaces: a ladder. A step of it is
the step time before over the step time after, so the steps multiply to the whole. Beside it, each
freedom is taken from the whole space alone. A larger space that gives a slower plan is a defect of
the search: such clusters are counted, and listed by seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clusters import random_problem
from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.request import EVEN, HPP, UNEVEN_LAYERS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "quality.md"
BEGIN, END = "<!-- tables begin -->\n", "<!-- tables end -->\n"

FIRST_SEED = 10_000
MAX_DEVICES, QUICK_MAX_DEVICES = 64, 8
CLUSTERS, QUICK_CLUSTERS = 300, 6
BUDGET = 2_000
"""Candidates of the exhaustive search (at most nine devices): plans matter here, not proofs."""
SAME = 1e-9
"""Relative difference of two step times that is rounding."""


class Rung(NamedTuple):
    """A space of plans; each holds those before it."""

    name: str
    adds: str
    """What it has that the one before has not."""


LADDER = (
    Rung("even", "even"),
    Rung("uneven-layers", "cuts"),
    Rung("uneven-layers, unequal shares", "shares"),
    Rung("hpp, width 1, no recomputation", "grouping"),
    Rung("hpp, no recomputation", "tensor-parallel widths"),
    Rung("hpp", "recomputation"),
)
RUNGS = tuple(rung.name for rung in LADDER)
EVEN_RUNG, UNEVEN_RUNG, LEVELLED, GROUPED, WIDE, WHOLE = RUNGS
WITHOUT_WIDTHS = "hpp, width 1"
LEFT_OUT = {"tensor-parallel widths": WITHOUT_WIDTHS, "recomputation": WIDE}
"""By freedom: the space that lacks this one alone."""
SPACES: dict[str, dict[str, Any]] = {
    EVEN_RUNG: {"strategy": EVEN},
    UNEVEN_RUNG: {"strategy": UNEVEN_LAYERS},
    LEVELLED: {"strategy": UNEVEN_LAYERS, "level_shares": True},
    GROUPED: {"strategy": HPP, "tensor_parallel": (1,), "recompute": False},
    WIDE: {"strategy": HPP, "recompute": False},
    WHOLE: {"strategy": HPP},
    WITHOUT_WIDTHS: {"strategy": HPP, "tensor_parallel": (1,)},
}
"""By space: options of the search."""
NESTED = (*itertools.pairwise(RUNGS), (WITHOUT_WIDTHS, WHOLE), (GROUPED, WITHOUT_WIDTHS))
"""Pairs of a space and one that holds all its plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cluster's step times."""

    seed: int
    num_devices: int
    num_types: int
    global_batch_size: int
    step_time_s: dict[str, float | None]
    """By space; None: it has no plan [s]."""
    num_pipelines: int | None
    """Of the plan of the whole space."""

    def ratio(self, before: str, after: str) -> float | None:
        """Step time of one space over that of another; None where either has no plan."""
        first, second = self.step_time_s[before], self.step_time_s[after]
        return None if first is None or second is None else first / second


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratios of step times over some clusters."""

    name: str
    clusters: int
    mean: float
    """Geometric, so that those of a ladder's steps multiply to the whole's."""
    median: float
    best: float
    worst: float
    num_worse: int
    """Clusters where the larger space gave the slower plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """A cluster where a space gave a slower plan than one within it, or none."""

    seed: int
    narrow: str
    wide: str
    slower: float | None
    """Step time of the wide over that of the narrow one, - 1; None: the wide one has no plan."""


# --- One cluster ----------------------------------------------------------------------------------


def plan_in(space: str, profile: Profile, cluster: Cluster, global_batch_size: int) -> Plan | None:
    """The plan that the search finds in a space; None: there is none."""
    options = SearchOptions(global_batch_size=global_batch_size, budget=BUDGET)
    try:
        return search(profile, cluster, replace(options, **SPACES[space])).plan
    except InfeasibleError:
        return None


def measure(seed: int, *, max_devices: int) -> Row:
    """Plan one cluster in all spaces."""
    cluster, profile, total = random_problem(seed, max_devices=max_devices)
    plans = {space: plan_in(space, profile, cluster, total) for space in SPACES}
    steps = {space: None if plan is None else _step_s(plan) for space, plan in plans.items()}
    whole = plans[WHOLE]
    return Row(
        seed=seed,
        num_devices=len(cluster.devices),
        num_types=len({d.type for d in cluster.devices.values()}),
        global_batch_size=total,
        step_time_s=steps,
        num_pipelines=None if whole is None else len(whole.pipelines),
    )


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


# --- What follows from all of them ----------------------------------------------------------------


def speedup(name: str, rows: Iterable[Row], before: str, after: str) -> Speedup | None:
    """Over the clusters where both spaces have a plan; None: there is no such cluster."""
    ratios = [ratio for row in rows if (ratio := row.ratio(before, after)) is not None]
    if not ratios:
        return None
    return Speedup(
        name=name,
        clusters=len(ratios),
        mean=statistics.geometric_mean(ratios),
        median=statistics.median(ratios),
        best=max(ratios),
        worst=min(ratios),
        num_worse=sum(ratio < 1 - SAME for ratio in ratios),
    )


def ladder(rows: Iterable[Row], start: str) -> list[Speedup]:
    """Every step from a rung up, and the whole, over the clusters where all of them have a plan."""
    rungs = LADDER[RUNGS.index(start) :]
    complete = [r for r in rows if all(r.step_time_s[rung.name] is not None for rung in rungs)]
    steps = [
        speedup(f"+ {after.adds}", complete, before.name, after.name)
        for before, after in itertools.pairwise(rungs)
    ]
    steps.append(speedup("all of it", complete, start, WHOLE))
    return [step for step in steps if step is not None]


def left_out(rows: Sequence[Row]) -> list[Speedup]:
    """The whole space over the same without one freedom."""
    found = [speedup(name, rows, space, WHOLE) for name, space in LEFT_OUT.items()]
    return [one for one in found if one is not None]


def defects(rows: Iterable[Row]) -> list[Defect]:
    """Every larger space that did worse than a smaller one; the worst first."""
    found = []
    for row in rows:
        for narrow, wide in NESTED:
            narrow_s, wide_s = row.step_time_s[narrow], row.step_time_s[wide]
            if narrow_s is None:
                continue
            slower = None if wide_s is None else wide_s / narrow_s - 1
            if slower is None or slower > SAME:
                found.append(Defect(seed=row.seed, narrow=narrow, wide=wide, slower=slower))
    return sorted(found, key=lambda d: -(math.inf if d.slower is None else d.slower))


def num_worse_than_baselines(rows: Iterable[Row]) -> int:
    """Clusters where the whole space gives a slower plan than a baseline, or none."""
    number = 0
    for row in rows:
        whole_s = row.step_time_s[WHOLE] or math.inf
        rivals = [row.step_time_s[name] for name in (EVEN_RUNG, UNEVEN_RUNG)]
        number += any(s is not None and whole_s > s * (1 + SAME) for s in rivals)
    return number


def results_of(rows: Sequence[Row]) -> dict[str, Any]:
    """The tables and what they are made from, as data."""
    return {
        "clusters": len(rows),
        "num_devices": [min(r.num_devices for r in rows), max(r.num_devices for r in rows)],
        "num_worse_than_baselines": num_worse_than_baselines(rows),
        "with_a_plan": {
            space: sum(row.step_time_s[space] is not None for row in rows)
            for space in (*RUNGS, WITHOUT_WIDTHS)
        },
        "ladders": {
            start: [asdict(step) for step in ladder(rows, start)]
            for start in (EVEN_RUNG, UNEVEN_RUNG)
        },
        "left_out": [asdict(one) for one in left_out(rows)],
        "defects": [asdict(defect) for defect in defects(rows)],
        "rows": [asdict(row) for row in rows],
    }


# --- For people -----------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> str:
    """All tables, in Markdown."""
    low, high = results["num_devices"]
    worse = results["num_worse_than_baselines"]
    parts = [
        f"{results['clusters']} clusters of {low} to {high} devices. `hpp` is worse than a "
        f"baseline on {worse} of them.",
        _plans_table(results["with_a_plan"], results["clusters"]),
    ]
    for start, steps in results["ladders"].items():
        parts.append(_speedups_table(f"from `{start}`", steps))
    parts.append(_speedups_table("the whole over all but", results["left_out"]))
    parts.append(_defects_table(results["defects"]))
    return "\n".join(parts)


def _plans_table(with_a_plan: dict[str, int], clusters: int) -> str:
    lines = ["| space | clusters with a plan | without |", "|---|---|---|"]
    lines += [f"| {space} | {n} | {clusters - n} |" for space, n in with_a_plan.items()]
    return "\n" + "\n".join(lines) + "\n"


def _speedups_table(title: str, speedups: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"| {title} | clusters | mean | median | best | worst | slower than before |",
        "|---|---|---|---|---|---|---|",
    ]
    for s in speedups:
        figures = " | ".join(f"{s[name]:.3f}x" for name in ("mean", "median", "best", "worst"))
        lines.append(f"| {s['name']} | {s['clusters']} | {figures} | {s['num_worse']} |")
    return "\n".join(lines) + "\n"


def _defects_table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| larger space | than | clusters where it does worse | on average | at most | the worst |",
        "|---|---|---|---|---|---|",
    ]
    for narrow, wide in NESTED:
        of_pair = [d for d in found if (d["narrow"], d["wide"]) == (narrow, wide)]
        slower = [d["slower"] for d in of_pair if d["slower"] is not None]
        lost = (
            f", {len(of_pair) - len(slower)} without a plan" if len(of_pair) > len(slower) else ""
        )
        figures = [f"{statistics.mean(slower):.1%}", f"{max(slower):.1%}"] if slower else ["-", "-"]
        seeds = ", ".join(str(d["seed"]) for d in of_pair[:5]) or "-"
        lines.append(
            f"| {wide} | {narrow} | {len(of_pair)}{lost} | {' | '.join(figures)} | {seeds} |"
        )
    return "\n".join(lines) + "\n"


def measure_all(
    seeds: Sequence[int], *, max_devices: int, tell: Callable[[str], None]
) -> Iterator[Row]:
    """All rows, told one by one."""
    for i, seed in enumerate(seeds, start=1):
        started_s = time.perf_counter()
        row = measure(seed, max_devices=max_devices)
        taken_s = time.perf_counter() - started_s
        steps = ", ".join(_step_words(row.step_time_s[name]) for name in RUNGS)
        tell(f"{i}/{len(seeds)} seed {seed}, {row.num_devices} devices, {taken_s:.1f} s: {steps}")
        yield row


def _step_words(step_s: float | None) -> str:
    return "no plan" if step_s is None else f"{step_s:.4g} s"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be 1 or more")
    return number


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality")
    parser.add_argument("--clusters", type=_positive, metavar="N", help=f"{CLUSTERS} if not given")
    parser.add_argument("--first", type=int, default=FIRST_SEED, metavar="SEED", help="first seed")
    parser.add_argument("--quick", action="store_true", help="a few clusters of few devices")
    parser.add_argument("--json", metavar="FILE", help="write the results; - is stdout")
    parser.add_argument("--write", action="store_true", help=f"also into {DOCUMENT.name}")
    options = parser.parse_args()
    number = options.clusters or (QUICK_CLUSTERS if options.quick else CLUSTERS)
    to_file = options.json is not None and options.json != "-"
    rows: list[Row] = []
    for row in measure_all(
        range(options.first, options.first + number),
        max_devices=QUICK_MAX_DEVICES if options.quick else MAX_DEVICES,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    ):
        rows.append(row)
        results = {"conditions": {"cores": os.cpu_count(), "budget": BUDGET}} | results_of(rows)
        if to_file:  # After every cluster: a run that is stopped leaves what it has.
            Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = tables(results)
    print(text, file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(json.dumps(results, indent=2))
    if options.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCUMENT.write_text(before + BEGIN + text + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
