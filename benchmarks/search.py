"""The planner at scale: wall time, memory and quality of `eth plan`, by size and mix of clusters.

    python benchmarks/search.py [--quick | --only 512x2] [--json FILE]

Each row runs the real command as a process of its own, start-up included, on a problem of
`benchmarks/problems.py`. The baselines it is compared with are runs of their own, which are not in
the wall time. Rows are DEVICESxTYPES; a row that fails or takes too long is shown as such.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eth_cli  # noqa: E402
from benchmarks.problems import (  # noqa: E402
    MODELS,
    TYPES,
    cluster_yaml,
    mixed_cluster,
    profile,
)
from benchmarks.processes import Run, run  # noqa: E402
from eth_cli.cluster import Cluster  # noqa: E402
from eth_cli.profile.table import write_profile  # noqa: E402

TIME_TARGETS_S = {"16x2": 0.5, "64x2": 1.0, "512x2": 3.0, "768x3": 6.0, "1024x5": 10.0}
"""Wall time of the whole command that each size may take, on any model [s]."""
MAX_MEMORY_BYTES = 2**30
MAX_MEDIAN_GAP, MAX_WORST_GAP = 0.03, 0.10

GBPS = {"opt-350m": 100.0, "gpt-neo-2.7b": 25.0, "llama3-8b": 200.0}
"""Inter-node bandwidth of the rows of a model where a row says nothing else [Gbit/s]."""
KEY_SIZES = ("16x2", "64x2", "512x2", "768x3", "1024x5", "1024x1")
GROWTH_MODEL = "opt-350m"
"""The model whose one-type rows give the growth with the number of devices."""
MIN_PER_DEVICE, DEFAULT_PER_DEVICE = 4, 32
BASELINE_STRATEGIES = ("uneven-layers", "even")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One row's question."""

    num_devices: int
    num_types: int
    model: str
    inter_node_gbps: float

    @property
    def size(self) -> str:
        """As people write it: ``512x2``."""
        return f"{self.num_devices}x{self.num_types}"


@dataclass(kw_only=True, slots=True)
class Row:
    """One row's answer; figures of the plan are absent where there is none."""

    size: str
    num_devices: int
    num_types: int
    model: str
    inter_node_gbps: float
    samples_per_device: int
    status: str
    wall_s: float
    memory_bytes: int
    message: str = ""
    step_time_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    solver_status: str | None = None
    micro_batches_per_device: float | None = None
    """Of the devices in the plan."""
    num_templates: int | None = None
    """Different pipelines of the plan: device types, cuts, widths, recomputation and micro-batch
    size."""
    num_pipelines: int | None = None
    num_unused: int | None = None
    pruned: dict[str, int] = field(default_factory=dict)
    """Candidates left out, by rule."""
    speedup: dict[str, float | None] = field(default_factory=dict)
    """Step time of each baseline over the plan's; none where the baseline has no plan."""
    baselines: dict[str, str] = field(default_factory=dict)
    """Status of each baseline's run."""


def table_problems() -> list[Problem]:
    """All rows of the full table."""
    sizes = {model: list(KEY_SIZES) for model in MODELS}
    sizes[GROWTH_MODEL] += ["8x1", "16x1", "64x1", "128x1", "256x1", "512x1", "768x1"]
    sizes["gpt-neo-2.7b"] += ["128x4"]
    sizes["llama3-8b"] += ["256x5"]
    return [problem(size, model) for model, names in sizes.items() for size in sorted_sizes(names)]


def quick_problems() -> list[Problem]:
    """A few small rows, for CI."""
    rows = [problem(size, GROWTH_MODEL) for size in ("8x1", "16x1", "16x2")]
    return [*rows, problem("16x2", "gpt-neo-2.7b")]


def problem(size: str, model: str) -> Problem:
    """The problem of a size. Raises ValueError where it is not DEVICESxTYPES."""
    devices, _, types = size.partition("x")
    if not (devices.isascii() and devices.isdigit() and types.isascii() and types.isdigit()):
        raise ValueError(f"{size!r} is not DEVICESxTYPES; write it like 512x2")
    num_devices, num_types = int(devices), int(types)
    if not 1 <= num_types <= len(TYPES):
        raise ValueError(f"{size}: there are 1 to {len(TYPES)} types, not {num_types}")
    if num_devices < num_types:
        raise ValueError(f"{size}: fewer devices than types")
    return Problem(
        num_devices=num_devices,
        num_types=num_types,
        model=model,
        inter_node_gbps=GBPS[model],
    )


def sorted_sizes(sizes: Iterable[str]) -> list[str]:
    """By number of devices, then of types."""
    return sorted(sizes, key=lambda size: tuple(map(int, size.split("x"))))


def measure(problem: Problem, *, samples_per_device: int, timeout_s: float) -> Row:
    """Plan one problem with hpp and with the baselines."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        cluster = mixed_cluster(
            problem.num_devices, problem.num_types, inter_node_gbps=problem.inter_node_gbps
        )
        (work / "cluster.yaml").write_text(cluster_yaml(cluster), encoding="utf-8")
        write_profile(work / "profile.json", profile(problem.model))

        def plan(strategy: str) -> tuple[Run, dict[str, Any]]:
            output = work / f"{strategy}.json"
            done = run(
                [
                    *("plan", "--cluster", work / "cluster.yaml"),
                    *("--profile", work / "profile.json"),
                    *("--global-batch-size", samples_per_device * problem.num_devices),
                    *("--strategy", strategy, "--json", "-o", output),
                ],
                timeout_s=timeout_s,
            )
            if done.status != "ok":
                return done, {}
            return done, json.loads(output.read_text(encoding="utf-8"))

        done, found = plan("hpp")
        row = Row(
            size=problem.size,
            num_devices=problem.num_devices,
            num_types=problem.num_types,
            model=problem.model,
            inter_node_gbps=problem.inter_node_gbps,
            samples_per_device=samples_per_device,
            status=done.status,
            wall_s=done.wall_s,
            memory_bytes=done.memory_bytes,
            message="" if done.status == "ok" else done.message,
        )
        if found:
            _fill(row, found, cluster)
            for strategy in BASELINE_STRATEGIES:
                rival, other = plan(strategy)
                row.baselines[strategy] = rival.status
                row.speedup[strategy] = (
                    other["predicted"]["step_time_s"] / found["predicted"]["step_time_s"]
                    if other
                    else None
                )
    return row


def _fill(row: Row, found: dict[str, Any], cluster: Cluster) -> None:
    solver, pipelines = found["solver"], found["pipelines"]
    row.step_time_s = found["predicted"]["step_time_s"]
    row.bound_s, row.gap = solver["bound_s"], solver["gap"]
    row.solver_status, row.pruned = solver["status"], solver.get("pruned", {})
    used = sum(len(stage["devices"]) for p in pipelines for stage in p["stages"])
    row.micro_batches_per_device = sum(p["micro_batches"] for p in pipelines) / used
    row.num_pipelines = len(pipelines)
    row.num_unused = len(cluster.devices) - used
    row.num_templates = len({_template(p, cluster) for p in pipelines})


def _template(pipeline: dict[str, Any], cluster: Cluster) -> tuple[object, ...]:
    stages = tuple(
        (
            cluster.devices[stage["devices"][0]].type,
            tuple(stage["blocks"]),
            len(stage["devices"]),
            stage.get("recompute", False),
        )
        for stage in pipeline["stages"]
    )
    return (pipeline["micro_batch_size"], stages)


def growth_exponent(rows: Iterable[Row], *, start_up_s: float) -> float | None:
    """Slope of log(wall time - start-up) over log(devices), by least squares.

    Only one-type rows of `GROWTH_MODEL` that found a plan count. None where fewer than two sizes
    are left, or one takes no longer than the start-up.
    """
    points = [
        (row.num_devices, row.wall_s - start_up_s)
        for row in rows
        if row.num_types == 1 and row.model == GROWTH_MODEL and row.status == "ok"
    ]
    if len({devices for devices, _ in points}) < 2 or any(t <= 0 for _, t in points):
        return None
    logs = [(math.log(devices), math.log(seconds)) for devices, seconds in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each target with what was measured; rows without a plan miss the target of their size."""
    found = []
    for size, limit in TIME_TARGETS_S.items():
        of_size = [row for row in rows if row.size == size]
        if of_size:
            worst = max(row.wall_s for row in of_size)
            complete = all(row.status == "ok" for row in of_size)
            found.append(_target(f"{size} wall time [s]", worst, limit, complete=complete))
    if rows:
        complete = all(row.status == "ok" for row in rows)
        memory = max(row.memory_bytes for row in rows) / 2**20
        found.append(
            _target("peak memory [MiB]", memory, MAX_MEMORY_BYTES / 2**20, complete=complete)
        )
        gaps = [row.gap for row in rows if row.gap is not None]
        if gaps:
            median, worst = statistics.median(gaps), max(gaps)
            found.append(_target("median gap", median, MAX_MEDIAN_GAP, complete=complete))
            found.append(_target("worst gap", worst, MAX_WORST_GAP, complete=complete))
    return found


def _target(name: str, measured: float, limit: float, *, complete: bool) -> dict[str, Any]:
    return {
        "target": name,
        "limit": limit,
        "measured": measured,
        "holds": complete and measured <= limit,
        "complete": complete,
    }


def rows_table(rows: Iterable[Row]) -> Table:
    """The rows for people."""
    table = Table(box=None, pad_edge=False)
    table.add_column("size")
    table.add_column("model", no_wrap=True)
    for name in (
        *("Gbps", "mb/GPU", "wall [s]", "MiB", "step [s]", "bound [s]", "gap"),
        *("/uneven", "/even", "pipes", "templ", "unused"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("left out, by rule", overflow="fold")
    for row in rows:
        slow = row.wall_s > TIME_TARGETS_S.get(row.size, math.inf)
        pruned = ", ".join(f"{rule} {n}" for rule, n in row.pruned.items())
        table.add_row(
            *(row.size, row.model, f"{row.inter_node_gbps:g}"),
            _or_dash(row.micro_batches_per_device, "{:.1f}"),
            f"{row.wall_s:.2f}{'!' if slow else ''}",
            f"{row.memory_bytes / 2**20:.0f}",
            _or_dash(row.step_time_s, "{:.3f}"),
            _or_dash(row.bound_s, "{:.3f}"),
            _or_dash(row.gap, "{:.2%}"),
            *(_or_dash(row.speedup.get(strategy), "{:.2f}x") for strategy in BASELINE_STRATEGIES),
            *(_or_dash(n, "{}") for n in (row.num_pipelines, row.num_templates, row.num_unused)),
            pruned if row.status == "ok" else f"{row.status}: {row.message}",
        )
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def chosen_problems(options: argparse.Namespace) -> list[Problem]:
    """The rows that the options ask for. Raises ValueError where there are none."""
    if options.only is not None:
        models = [options.model] if options.model else list(MODELS)
        rows = [problem(options.only, model) for model in models]
    else:
        rows = quick_problems() if options.quick else table_problems()
        rows = [row for row in rows if options.model in (None, row.model)]
    if not rows:
        raise ValueError(f"no row of model {options.model}")
    if options.gbps is not None:
        rows = [
            Problem(
                num_devices=row.num_devices,
                num_types=row.num_types,
                model=row.model,
                inter_node_gbps=options.gbps,
            )
            for row in rows
        ]
    return rows


def measure_all(
    problems: Sequence[Problem], options: argparse.Namespace, tell: Callable[[str], None]
) -> dict[str, Any]:
    """All rows and what follows from them, as data."""
    # As an installed program is; where Python is told to keep no bytecode, each run would compile.
    compileall.compile_dir(str(Path(eth_cli.__file__).parent), quiet=2)
    start_ups = [run(["--version"], timeout_s=options.timeout) for _ in range(3)]
    start_up_s = statistics.median(r.wall_s for r in start_ups)
    rows = []
    for i, one in enumerate(problems, start=1):
        row = measure(one, samples_per_device=options.samples_per_device, timeout_s=options.timeout)
        tell(f"{i}/{len(problems)} {one.size} {one.model}: {row.status}, {row.wall_s:.2f} s")
        rows.append(row)
    gaps = [row.gap for row in rows if row.gap is not None]
    return {
        "conditions": {
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "samples_per_device": options.samples_per_device,
            "timeout_s": options.timeout,
        },
        "start_up_s": start_up_s,
        "growth_exponent": growth_exponent(rows, start_up_s=start_up_s),
        "median_gap": statistics.median(gaps) if gaps else None,
        "worst_gap": max(gaps) if gaps else None,
        "targets": targets(rows),
        "rows": [asdict(row) for row in rows],
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Print the table and what follows from it."""
    console.print(rows_table(Row(**row) for row in results["rows"]))
    conditions = results["conditions"]
    console.print(
        f"\n{conditions['samples_per_device']} samples a GPU, {conditions['cores']} cores, "
        f"load {conditions['load_average']:.1f} at the end; "
        f"start-up (eth --version) {results['start_up_s']:.2f} s; ! over its target"
    )
    exponent = results["growth_exponent"]
    console.print(
        f"growth of wall time with devices of one type ({GROWTH_MODEL}, start-up out): "
        + ("too few rows" if exponent is None else f"exponent {exponent:.2f}")
    )
    for target in results["targets"]:
        console.print(
            f"{'holds ' if target['holds'] else 'MISSED'} {target['target']}: "
            f"{target['measured']:.3g}, at most {target['limit']:.3g}"
            + ("" if target["complete"] else " (rows without a plan)"),
            markup=False,
        )


def _whole(text: str) -> int:
    number = int(text)
    if number < MIN_PER_DEVICE:
        raise argparse.ArgumentTypeError(f"{number} must be {MIN_PER_DEVICE} or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="a few small rows")
    which.add_argument("--only", metavar="512x2", help="one size, on each model")
    parser.add_argument("--model", choices=tuple(MODELS), help="rows of this model only")
    parser.add_argument("--gbps", type=_positive, help="inter-node bandwidth of all rows")
    parser.add_argument("--samples-per-device", type=_whole, default=DEFAULT_PER_DEVICE)
    parser.add_argument("--timeout", type=_positive, default=120.0, help="of each run [s]")
    parser.add_argument("--json", metavar="FILE", help="write the results; - is stdout")
    options = parser.parse_args()
    try:
        problems = chosen_problems(options)
    except ValueError as error:
        parser.error(str(error))
    to_stderr = options.json == "-"
    results = measure_all(problems, options, lambda line: print(line, file=sys.stderr))
    # As wide as the table needs: a file or a CI log has no width of its own.
    show(results, Console(stderr=to_stderr, width=200, highlight=False))
    if options.json:
        text = json.dumps(results, indent=2) + "\n"
        if to_stderr:
            sys.stdout.write(text)
        else:
            Path(options.json).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
