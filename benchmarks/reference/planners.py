"""Other planners' plans and ours for the reference's planning problems, in one simulator.

python -m benchmarks.reference.planners [--reference FOLDER] [--only TEXT] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import run
from benchmarks.reference.accuracy import ROOT, replace_table
from benchmarks.reference.cases import BYTES_PER_PARAMETER, PROCESS_BYTES
from benchmarks.reference.tables import DEFAULT_PATH, Reference
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.errors import EthError
from eth_cli.plan import Pipeline, Plan, Stage, read_plan
from eth_cli.profile.table import (
    BlockGroup,
    ComputeEntry,
    DeviceEntry,
    MemoryModel,
    Profile,
    ProfiledModel,
    write_profile,
)
from eth_cli.search.simulate import Simulation, simulate

DOCUMENT = ROOT / "docs" / "comparison.md"
GPUS = ("A100-40", "V100-16")
WIDTHS = (1, 2, 4)
"""Tensor-parallel widths that a node of 4 has room for."""
TIMEOUT_S = 600.0
"""After which a search of ours is given up [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One planner's answer to one problem."""

    problem: str
    planner: str
    search_s: float
    """The whole process, start-up included [s]."""
    own_figure_s: float | None
    """Step time that the reference gives for the plan [s]."""
    step_s: float | None
    """Simulated here, gradient sync after the backward; None: no equal in our format [s]."""
    overlapped_s: float | None
    """Simulated here, gradient sync beside the backward [s]."""
    fits: bool | None
    """Whether the plan passes the reference's memory rule."""
    bound_s: float | None = None
    """Our lower bound [s]."""


# --- A problem in our formats -----------------------------------------------------------------


def problems(reference: Reference) -> list[Any]:
    """The first row of every problem; planner and answer aside they are alike."""
    found: dict[tuple[Any, ...], Any] = {}
    for row in reference.planners["rows"]:
        found.setdefault((row["model"], row["a100_40"], row["v100_16"]), row)
    return list(found.values())


def problem_name(row: Any) -> str:
    """Such as "OPT-350, 32 A100-40 + 96 V100-16"."""
    return f"{row['model']}, {row['a100_40']} A100-40 + {row['v100_16']} V100-16"


def cluster_text(reference: Reference, row: Any) -> str:
    """The cluster file of a problem; the links that matter are in the profile."""
    nodes = "\n".join(
        f"  - {{name: {name}, count: {row[key] // row['gpus_per_node']}, "
        f"devices: [{{type: {gpu}, count: {row['gpus_per_node']}}}]}}"
        for name, key, gpu in (("a", "a100_40", GPUS[0]), ("v", "v100_16", GPUS[1]))
    )
    rate = min(size / time_s for g in GPUS for size, time_s in reference.rows("inter", g, 1)[-1:])
    inside = min(size / time_s for g in GPUS for size, time_s in reference.rows("intra", g, 2)[-1:])
    return (
        f"name: reference\nnodes:\n{nodes}\nnetwork:\n"
        f"  intra_node: {{bandwidth: {inside / 1e9:.6f}GB/s, latency: 0us}}\n"
        f"  inter_node: {{bandwidth: {rate / 1e9:.6f}GB/s, latency: 0us}}\n"
    )


def profile_of(reference: Reference, model: str) -> Profile:
    """A model on both types: the planner's own times where they differ."""
    data = reference.profiles["models"][model]
    last = data["num_layers_incl_embedding_and_head"] - 1
    # Layer 1 was profiled by itself, layers 2 and on repeat one measurement.
    groups = [("embedding", 0, 1), ("first", 1, 1), ("transformer", 2, last - 2), ("head", last, 1)]
    compute: list[ComputeEntry] = []
    rates: dict[str, float] = {}
    for gpu in GPUS:
        for width in WIDTHS:
            for size in (1, 2, 4, 8):
                entry = reference.times(model, gpu, width, size, planner=True)
                if entry is None:
                    continue
                compute += [
                    reference.compute(model, layer, kind, gpu, width, size, entry).model_copy(
                        update={
                            # The reference's rule knows no workspace, but holds more of a process
                            # that is tensor-parallel.
                            "workspace_bytes": PROCESS_BYTES[width > 1] - PROCESS_BYTES[False]
                        }
                    )
                    for kind, layer, _ in groups
                ]
                rate = reference.optimizer_s_per_parameter(model, width, entry)
                rates[gpu] = max(rates.get(gpu, 0.0), rate)
    return Profile(
        schema_version=1,
        seq_len=data["sequence_length"],
        dtype="fp32",
        model=ProfiledModel(
            name=model,
            blocks=tuple(
                BlockGroup(
                    kind=kind,
                    count=count,
                    # Norms are held in full by all devices of a group: the widest need counts.
                    parameters=max(
                        reference.memory(model, t)["params_floats"][layer] * t for t in WIDTHS
                    ),
                )
                for kind, layer, count in groups
            ),
            boundary_bytes_per_sample=reference.memory(model, 1)["act_output_bytes"][1],
        ),
        memory=MemoryModel(
            bytes_per_parameter=BYTES_PER_PARAMETER, process_bytes=PROCESS_BYTES[False]
        ),
        compute=tuple(compute),
        devices=tuple(DeviceEntry(type=gpu, optimizer_s_per_parameter=rates[gpu]) for gpu in GPUS),
        links=reference.links(list(GPUS)),
    )


# --- Others' plans -----------------------------------------------------------------------------

_Shape = list[tuple[tuple[int, int], str, int]]
"""A pipeline's stages: blocks, type, width."""


def shapes(plan: Any) -> list[_Shape] | None:
    """A planner's pipelines; None where stages have unlike numbers of replicas."""
    found = []
    for group in plan["pipelines"]:
        stages = [
            [(r["gpu"], r["tp"]) for r in s["replicas"] for _ in range(r["count"])]
            for s in group["stages"]
        ]
        if len({len(s) for s in stages}) != 1:
            return None
        blocks = [(s["layers"][0], s["layers"][1] + 1) for s in group["stages"]]
        for replica in zip(*stages, strict=True):
            shape = [(b, gpu, tp) for b, (gpu, tp) in zip(blocks, replica, strict=True)]
            found += [shape] * group["count"]
    return found


def in_our_format(
    found: list[_Shape], row: Any, profile: Profile, cluster: Cluster, *, by_column: bool
) -> Plan:
    """A plan of such pipelines with equal shares, on devices taken in order.

    Args:
        by_column: place first stages of all pipelines, then second ones; else pipeline by pipeline.
    """
    size = row["plan"]["micro_batch_size"]
    total = row["global_batch_size"] // size
    free = {n.name: [n.devices[0].type, 0, n.num_devices] for n in cluster.nodes}
    order = [(i, s) for i, shape in enumerate(found) for s in range(len(shape))]
    if by_column:
        order.sort(key=lambda at: at[1])
    devices = {at: _take(free, *found[at[0]][at[1]][1:]) for at in order}
    return Plan(
        schema_version=1,
        model=profile.model.name,
        seq_len=profile.seq_len,
        dtype=profile.dtype,
        global_batch_size=row["global_batch_size"],
        pipelines=tuple(
            Pipeline(
                micro_batches=total // len(found) + (i < total % len(found)),
                micro_batch_size=size,
                stages=tuple(
                    Stage(blocks=blocks, devices=devices[i, s])
                    for s, (blocks, _, _) in enumerate(shape)
                ),
            )
            for i, shape in enumerate(found)
        ),
    )


def _take(free: dict[str, list[Any]], gpu: str, width: int) -> tuple[str, ...]:
    for name, state in free.items():
        if state[0] == gpu and state[2] - state[1] >= width:
            state[1] += width
            return tuple(f"{name}:{k}" for k in range(state[1] - width, state[1]))
    raise ValueError(f"no room for {width} {gpu}")


def fits_rule(reference: Reference, plan: Plan, cluster: Cluster) -> bool:
    """The reference's own rule, from its tables alone: every device of every stage.

    parameters x 24 + activations x micro-batch size x (stages - stage) + 2e9 (width 1) or 3e9.
    """
    capacities = reference.profiles["gpus"]["gpu_memory_bytes"]
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            sizes = reference.memory(plan.model, stage.tensor_parallel)
            held = slice(*stage.blocks)
            in_flight = (len(pipeline.stages) - s) * pipeline.micro_batch_size
            needed = (
                sum(sizes["params_floats"][held]) * BYTES_PER_PARAMETER
                + sum(sizes["act_mem_bytes"][held]) * in_flight
                + PROCESS_BYTES[stage.tensor_parallel > 1]
            )
            if needed > capacities[cluster.devices[stage.devices[0]].type]:
                return False
    return True


# --- The comparison ------------------------------------------------------------------------------


def theirs(reference: Reference, row: Any, profile: Profile, cluster: Cluster) -> Row:
    """Another planner's plan; of two ways to place it, that with the shorter step."""
    found = shapes(row["plan"]) if row["plan"] else None
    best: list[float | None] = [None, None]
    fits = None
    if found is not None:
        plans = [
            in_our_format(found, row, profile, cluster, by_column=by_column)
            for by_column in (False, True)
        ]
        best = [
            min(simulate(p, profile, cluster, overlap=o).step_time_s for p in plans)
            for o in (False, True)
        ]
        fits = fits_rule(reference, plans[0], cluster)
    return Row(
        problem=problem_name(row),
        planner=row["planner"],
        search_s=row["process_wall_s"],
        own_figure_s=row["step_time_s"],
        step_s=best[0],
        overlapped_s=best[1],
        fits=fits,
    )


def ours(reference: Reference, row: Any, profile: Profile, text: str) -> Row:
    """Our plan, by `eth plan` as a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("c.yaml", "profile.json", "plan.json")}
        paths["c.yaml"].write_text(text)
        write_profile(paths["profile.json"], profile)
        done = run(
            [
                *("plan", "--cluster", paths["c.yaml"], "--profile", paths["profile.json"]),
                *("--global-batch-size", row["global_batch_size"], "-o", paths["plan.json"]),
            ],
            timeout_s=TIMEOUT_S,
        )
        if done.status != "ok":
            raise RuntimeError(f"eth plan, {problem_name(row)}: {done.status}: {done.message}")
        plan, cluster = read_plan(paths["plan.json"]), read_cluster(paths["c.yaml"])
    runs: list[Simulation] = [simulate(plan, profile, cluster, overlap=o) for o in (False, True)]
    return Row(
        problem=problem_name(row),
        planner="eth",
        search_s=done.wall_s,
        own_figure_s=None,
        step_s=runs[0].step_time_s,
        overlapped_s=runs[1].step_time_s,
        fits=fits_rule(reference, plan, cluster) and not runs[0].excesses,
        bound_s=None if plan.solver is None else plan.solver.bound_s,
    )


def compare(reference: Reference, only: str = "") -> list[Row]:
    """Every problem's rows, ours last."""
    rows = []
    for problem in problems(reference):
        if only not in problem_name(problem):
            continue
        profile = profile_of(reference, problem["model"])
        text = cluster_text(reference, problem)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "c.yaml"
            path.write_text(text)
            cluster = read_cluster(path)
        rows += [
            theirs(reference, row, profile, cluster)
            for row in reference.planners["rows"]
            if problem_name(row) == problem_name(problem)
        ]
        rows.append(ours(reference, problem, profile, text))
    return rows


def table(rows: Iterable[Row]) -> str:
    """Markdown: every row, then ours over the best of theirs."""
    rows = list(rows)
    lines = [
        "| problem | planner | search, s | step time, its own figure | simulated here "
        "| sync overlapped | memory rule | ours / best of theirs | overlapped |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: list[tuple[float, float]] = []
    for row in rows:
        cells = [row.problem, row.planner, f"{row.search_s:.1f}"]
        cells += [_seconds(t) for t in (row.own_figure_s, row.step_s, row.overlapped_s)]
        cells.append({None: "-", True: "passes", False: "broken"}[row.fits])
        if row.planner == "eth":
            assert row.step_s is not None
            assert row.overlapped_s is not None
            rivals = [
                r.step_s
                for r in rows
                if r.problem == row.problem and r.planner != "eth" and r.step_s and r.fits
            ]
            ratios.append((row.step_s / min(rivals), row.overlapped_s / min(rivals)))
            cells += [f"{ratio:.2f}x" for ratio in ratios[-1]]
        else:
            cells += ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    if ratios:
        mean, overlapped = (statistics.fmean(column) for column in zip(*ratios, strict=True))
        lines += ["", f"On average {mean:.2f}x, with overlapped sync {overlapped:.2f}x."]
    return "\n".join(lines) + "\n"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def main() -> int:
    """Compare, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--only", default="", help="problems whose name holds this text")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--write", action="store_true", help="into docs/comparison.md")
    options = parser.parse_args()
    try:
        rows = compare(Reference(options.reference), options.only)
    except EthError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows), end="")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if options.write:
        replace_table(DOCUMENT, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
