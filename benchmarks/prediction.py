"""Measured against predicted step time on four paced clusters, two of them with shaped links.

    python -m benchmarks.prediction [--steps 15] [--json results.json]

Each cluster is profiled and planned for, its plan is trained for real and simulated. `laptop` and
`laptop-odd` run on this machine, their links as measured; the others on hosts of their own (network
namespaces with uplinks shaped to the cluster file's bandwidth; needs root and iproute2). Medians;
the first three steps are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import hosts
from eth_cli.cluster_file import read_cluster
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.plan import Plan, read_plan

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 3
SHAPED = {
    "two-hosts": """\
name: two-hosts
device_types:
  fast: {memory: 6MiB, peak: {fp32: 0.6GFLOPS}, emulated: true}
  slow: {memory: 6MiB, peak: {fp32: 0.2GFLOPS}, emulated: true}
nodes:
  - {name: new, devices: [{type: fast, count: 2}]}
  - {name: old, devices: [{type: slow, count: 4}]}
network:
  intra_node: {bandwidth: 1GB/s, latency: 150us}
  inter_node: {bandwidth: 100Mbps, latency: 200us}
""",
    "three-hosts": """\
name: three-hosts
device_types:
  fast: {memory: 6MiB, peak: {fp32: 0.5GFLOPS}, emulated: true}
  slow: {memory: 8MiB, peak: {fp32: 0.2GFLOPS}, emulated: true}
nodes:
  - {name: new, devices: [{type: fast, count: 3}]}
  - {name: mixed, devices: [{type: fast, count: 1}, {type: slow, count: 2}]}
  - {name: old, devices: [{type: slow, count: 2}]}
network:
  intra_node: {bandwidth: 1GB/s, latency: 150us}
  inter_node: {bandwidth: 40Mbps, latency: 200us}
""",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cluster."""

    cluster: str
    num_ranks: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def eth(*arguments: object) -> None:
    """Run one eth command; its messages go to stderr."""
    command = [sys.executable, "-m", "eth_cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def planned(cluster: Path, work: Path, *profile_options: str) -> Plan:
    """The plan for a cluster."""
    profile, plan = work / "profile.json", work / "plan.json"
    eth(
        *("profile", "--cluster", cluster, "--model", "gpt-tiny", "--seq-len", 64),
        *("--dtype", "fp32", "--micro-batch-sizes", "1,2", "-o", profile, *profile_options),
    )
    eth(
        *("plan", "--cluster", cluster, "--profile", profile),
        *("--global-batch-size", 32, "-o", plan),
    )
    return read_plan(plan)


def row(name: str, plan: Plan, folder: RunFolder) -> Row:
    """A cluster's row from its run."""
    lines = folder.metrics.read_text().splitlines()[WARM_UP_STEPS:]
    assert plan.predicted is not None  # eth plan has made it
    return Row(
        cluster=name,
        num_ranks=len(plan.ranks),
        predicted_s=plan.predicted.step_time_s,
        measured_s=statistics.median(json.loads(line)["step_time_s"] for line in lines),
    )


def on_this_machine(cluster: Path, *, steps: int) -> Row:
    """Profile, plan and train with processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        plan = planned(cluster, work)
        eth("run", work / "plan.json", "--steps", steps + WARM_UP_STEPS, "--out", work / "run")
        return row(cluster.stem, plan, RunFolder(work / "run"))


def on_hosts(name: str, *, steps: int) -> Row:
    """Plan with the cluster file's own links, and train on hosts that have them."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = work / f"{name}.yaml"
        path.write_text(SHAPED[name])
        cluster = read_cluster(path)
        plan = planned(path, work, "--analytic")
        bytes_per_s = cluster.network.inter_node.bandwidth_bytes_per_s
        with hosts.hosts(len(hosts.ranks_by_node(plan)), bytes_per_s=bytes_per_s) as on:
            run = hosts.train(plan, RunOptions(steps=steps + WARM_UP_STEPS), work / "run", on)
            return row(name, plan, run)


def table(rows: Sequence[Row]) -> str:
    """A line for each cluster."""
    lines = ["| cluster | ranks | predicted | measured | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.cluster} | {r.num_ranks} | {r.predicted_s:.3f} s | {r.measured_s:.3f} s "
        f"| {r.error:+.1%} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="steps that count (15)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    specs = ROOT / "cluster_specs"
    rows = [
        on_this_machine(specs / f"{name}.yaml", steps=arguments.steps)
        for name in ("laptop", "laptop-odd")
    ]
    reason = hosts.lacking()
    if reason is None:
        rows += [on_hosts(name, steps=arguments.steps) for name in SHAPED]
    else:
        print(f"hosts of their own are left out: {reason}", file=sys.stderr)
    print(table(rows))
    if arguments.json:
        data = [asdict(r) | {"error": r.error} for r in rows]
        arguments.json.write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
