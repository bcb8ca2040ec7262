"""Gradient sync that training does not see: `--grad-sync block` against `layer` and `whole`.

    python -m benchmarks.gradsync [--steps 8] [--json results.json]

Two hosts (network namespaces, their uplinks shaped to a stated bandwidth; needs root and iproute2),
one pipeline of two emulated devices on each, with unequal cuts and shares. For each bandwidth and
cut pattern the same plan is trained with each mode, one after the other. Exposed sync is the time
from the end of the last backward to the last update, as in `eth report`; medians over steps, the
first two of which are left out. It is held against what `eth simulate` predicts for `block`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import hosts
from eth_cli import serde
from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, Network, Node
from eth_cli.events import Span, read_events
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.profile.analytic import analytic_profile
from eth_cli.profile.table import Profile
from eth_cli.report import measure_step
from eth_cli.search.pacing import self_contained
from eth_cli.search.simulate import simulate

MODES = ("block", "layer", "whole")
BANDWIDTHS_MBPS = (80, 120, 200)
SEQ_LEN = 64
NUM_LAYERS = 10
BUCKET_BYTES = 2**20
"""For each of two owners: a layer is a bucket, and the embedding goes with the first."""
PATTERNS = {"near": ((7,), (6,)), "far": ((7,), (9,))}
"""Where the two pipelines are cut: at nearly the same blocks, and far from each other."""
SHARES = (3, 2)
"""Micro-batches of one sample of the two pipelines."""
WARM_UP_STEPS = 2
LATENCY_S = 1.5e-4
"""Of a gloo message between two namespaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One mode of one setting."""

    bandwidth_mbps: int
    pattern: str
    mode: str
    exposed_s: float
    step_s: float
    predicted_exposed_s: float
    predicted_step_s: float


def model() -> ModelSpec:
    """A GPT whose layers have 1.8 MB of gradients each."""
    data: dict[str, Any] = {
        "name": "gpt-sync",
        "family": "gpt",
        "vocab_size": 256,
        "hidden_size": 192,
        "num_layers": NUM_LAYERS,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 48,
        "ffn_size": 768,
        "max_positions": SEQ_LEN,
        "activation": "gelu",
        "tied": False,
        "embedding_size": 192,
    }
    return ModelSpec.model_validate(data)


def cluster(bytes_per_s: float) -> Cluster:
    """Two nodes of two devices, paced to 180 and 270 ms a layer."""
    return Cluster(
        name="two-hosts",
        device_types={
            name: DeviceType(memory_bytes=2**30, peak_flops={"fp32": peak}, emulated=True)
            for name, peak in {"fast": 0.97e9, "slow": 0.645e9}.items()
        },
        nodes=tuple(
            Node(name=name, devices=(DeviceGroup(type=kind, count=2),))
            for name, kind in (("a", "fast"), ("b", "slow"))
        ),
        network=Network(
            intra_node=Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
            inter_node=Link(latency_s=LATENCY_S, bandwidth_bytes_per_s=bytes_per_s),
        ),
    )


def plan(where: Cluster, profile: Profile, cuts: Sequence[Sequence[int]]) -> Plan:
    """A pipeline on each node, cut as told."""
    data = {
        "schema_version": 1,
        "model": "gpt-sync",
        "seq_len": SEQ_LEN,
        "dtype": "fp32",
        "global_batch_size": sum(SHARES),
        "pipelines": [
            {
                "micro_batches": share,
                "micro_batch_size": 1,
                "stages": [
                    {"blocks": [start, stop], "devices": [f"{node}:{i}"], "recompute": False}
                    for i, (start, stop) in enumerate(
                        itertools.pairwise([0, *of_pipeline, NUM_LAYERS + 2])
                    )
                ],
            }
            for node, share, of_pipeline in zip("ab", SHARES, cuts, strict=True)
        ],
    }
    return self_contained(serde.validate(Plan, data, "plan"), where, profile, model())


def measured(folder: RunFolder) -> tuple[float, float]:
    """Exposed sync and step time, medians [s]."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for path in sorted(folder.events.glob("rank-*.jsonl")):
        for event in read_events(path):
            if isinstance(event, Span) and event.step is not None:
                by_step[event.step].append(event)
    steps = [spans for step, spans in sorted(by_step.items()) if step > WARM_UP_STEPS]
    exposed = statistics.median(measure_step(spans)["gradsync_s"] for spans in steps)
    lines = folder.metrics.read_text().splitlines()[WARM_UP_STEPS:]
    return exposed, statistics.median(json.loads(line)["step_time_s"] for line in lines)


def measure(
    bandwidths: Sequence[int], patterns: Sequence[str], modes: Sequence[str], *, steps: int
) -> list[Row]:
    """Rows of all settings; says on stderr what it does."""
    rows = []
    for mbps in bandwidths:
        bytes_per_s = mbps * 1e6 / 8
        where = cluster(bytes_per_s)
        profile = analytic_profile(
            model(), where, seq_len=SEQ_LEN, dtype="fp32", micro_batch_sizes=[1]
        )
        with hosts.hosts(2, bytes_per_s=bytes_per_s) as on, tempfile.TemporaryDirectory() as work:
            for pattern, mode in itertools.product(patterns, modes):
                made = plan(where, profile, PATTERNS[pattern])
                predicted = simulate(made, profile, where, bucket_bytes=BUCKET_BYTES)
                options = RunOptions(
                    steps=steps + WARM_UP_STEPS,
                    grad_sync=mode,  # type: ignore[arg-type] # one of the modes
                    bucket_bytes=BUCKET_BYTES,
                )
                print(f"{mbps} Mbit/s, {pattern}, {mode}", file=sys.stderr)
                folder = hosts.train(made, options, Path(work) / f"{pattern}-{mode}", on)
                exposed_s, step_s = measured(folder)
                rows.append(
                    Row(
                        bandwidth_mbps=mbps,
                        pattern=pattern,
                        mode=mode,
                        exposed_s=exposed_s,
                        step_s=step_s,
                        predicted_exposed_s=predicted.terms["gradsync_s"],
                        predicted_step_s=predicted.step_time_s,
                    )
                )
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line for each setting."""
    lines = [
        "| bandwidth | cuts | block | layer | whole | block / whole | predicted | error "
        "| step | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    settings = dict.fromkeys((row.bandwidth_mbps, row.pattern) for row in rows)
    for mbps, pattern in settings:
        by_mode = {r.mode: r for r in rows if (r.bandwidth_mbps, r.pattern) == (mbps, pattern)}
        block, whole = by_mode["block"], by_mode["whole"]
        exposed = " | ".join(f"{by_mode[mode].exposed_s * 1e3:.0f} ms" for mode in MODES)
        lines.append(
            f"| {mbps} Mbit/s | {pattern} | {exposed} | {block.exposed_s / whole.exposed_s:.2f} "
            f"| {block.predicted_exposed_s * 1e3:.0f} ms "
            f"| {block.predicted_exposed_s / block.exposed_s - 1:+.0%} "
            f"| {block.step_s:.3f} s | {block.predicted_step_s:.3f} s |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="steps that count (8)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reason = hosts.lacking()
    if reason is not None:
        print(f"cannot be measured here: {reason}", file=sys.stderr)
        return 2
    rows = measure(BANDWIDTHS_MBPS, list(PATTERNS), MODES, steps=arguments.steps)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
