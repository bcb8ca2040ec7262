"""What each rule that leaves candidates out saves: searches with all rules, and without each.

    python -m benchmarks.pruning

Three problems of the tests' oracle and one of eight devices: `gpt-tiny` on the laptop cluster,
whose profile is estimated. Prints two Markdown tables. Times are the least of a few runs of the
search alone, start-up and estimate left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.model_sources import load_model
from eth_cli.profile.analytic import analytic_profile
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, SearchReport, search
from eth_cli.search.pruning import NAMES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from oracle.test_whole_space import instance  # noqa: E402

ORACLE_SEEDS = (12, 18, 26)
"""Small problems of which much is left out, by different rules."""
RUNS = 5
ALL = "all on"


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One question."""

    name: str
    cluster: Cluster
    profile: Profile
    global_batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One search, and the least time of some like it."""

    report: SearchReport
    wall_s: float


def oracle_problem(seed: int) -> Problem:
    """One of the oracle's, by seed."""
    cluster, profile, total = instance(seed)
    devices, types = len(cluster.devices), len(cluster.device_types)
    name = f"{devices} devices, {types} types, {profile.model.num_blocks} blocks"
    return Problem(
        name=name.replace("1 types", "1 type"),
        cluster=cluster,
        profile=profile,
        global_batch_size=total,
    )


def laptop() -> Problem:
    """The problem of `./demo`, by estimated times."""
    cluster = read_cluster(ROOT / "cluster_specs" / "laptop.yaml")
    profile = analytic_profile(
        load_model("gpt-tiny"), cluster, seq_len=64, dtype="fp32", micro_batch_sizes=(1, 2, 4, 8)
    )
    name = f"8 devices, 2 types, {profile.model.num_blocks} blocks"
    return Problem(name=name, cluster=cluster, profile=profile, global_batch_size=32)


def solved(problem: Problem, off: Collection[str], *, runs: int = RUNS) -> Outcome:
    """Search without some rules."""
    options = SearchOptions(global_batch_size=problem.global_batch_size, no_prune=frozenset(off))
    reports = [
        search(problem.profile, problem.cluster, options, clock=time.perf_counter)
        for _ in range(runs)
    ]
    return Outcome(report=reports[0], wall_s=min(report.wall_s for report in reports))


def outcomes(problem: Problem, *, runs: int = RUNS) -> dict[str, Outcome]:
    """By the rule that is off: the search. The first has all rules."""
    found = {ALL: solved(problem, (), runs=runs)}
    return found | {name: solved(problem, (name,), runs=runs) for name in NAMES}


def table_of_counts(found: dict[str, dict[str, Outcome]]) -> list[str]:
    """By problem, what each rule left out where all were on."""
    lines = [_row("left out by", *NAMES), _row("---", *["---"] * len(NAMES))]
    for name, by_rule in found.items():
        pruned = by_rule[ALL].report.pruned
        lines.append(_row(name, *(f"{pruned.get(rule, 0):,}" for rule in NAMES)))
    return lines


def table_of_times(found: dict[str, dict[str, Outcome]]) -> list[str]:
    """By problem, time and simulated plans of a search without each rule."""
    lines = [_row("without", "-", *NAMES), _row("---", *["---"] * (1 + len(NAMES)))]
    for name, by_rule in found.items():
        cells = []
        for outcome in by_rule.values():
            report = outcome.report
            proof = "" if report.status == "optimal" else f", gap {100 * report.gap:.1f} %"
            cells.append(f"{outcome.wall_s:.2f} s, {report.num_simulated:,}{proof}")
        lines.append(_row(name, *cells))
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print both tables."""
    problems = [*map(oracle_problem, ORACLE_SEEDS), laptop()]
    found = {problem.name: outcomes(problem) for problem in problems}
    print("\n".join([*table_of_counts(found), "", *table_of_times(found)]))


if __name__ == "__main__":
    main()
