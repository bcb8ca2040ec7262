"""Measured against predicted step time of even, uneven-layers and hpp on emulated mixed clusters.

    python benchmarks/emulated.py [--steps 25] [--json results.json] [CLUSTER.yaml ...]

For each cluster: profile, plan with each strategy, train each plan for real (gloo processes,
paced to the emulated speeds), and print the medians with their ratios, all from this one run.
The first three steps of each run are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from eth_cli.plan import read_plan

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("even", "uneven-layers", "hpp")
WARM_UP_STEPS = 3


def eth(*args: object) -> None:
    """Run one eth command; its messages go to stderr."""
    command = [sys.executable, "-m", "eth_cli", *map(str, args)]
    print("$ eth", *args, file=sys.stderr)
    subprocess.run(command, check=True, stdout=sys.stderr)


def measure(cluster: Path, options: argparse.Namespace, work: Path) -> list[dict[str, object]]:
    """Rows of one cluster, a strategy each."""
    profile = work / "profile.json"
    eth(
        *("profile", "--cluster", cluster, "--model", options.model),
        *("--seq-len", options.seq_len, "--dtype", "fp32", "-o", profile),
        *("--micro-batch-sizes", options.micro_batch_sizes),
    )
    rows: list[dict[str, object]] = []
    for strategy in STRATEGIES:
        plan, out = work / f"{strategy}.json", work / strategy
        eth(
            *("plan", "--cluster", cluster, "--profile", profile, "--strategy", strategy),
            *("--global-batch-size", options.global_batch_size, "-o", plan),
        )
        eth("run", plan, "--steps", options.steps, "--out", out)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        times = [m["step_time_s"] for m in metrics[WARM_UP_STEPS:]]
        prediction = read_plan(plan).predicted
        assert prediction is not None
        measured = statistics.median(times)
        rows.append(
            {
                "cluster": cluster.stem,
                "strategy": strategy,
                "predicted_s": prediction.step_time_s,
                "measured_s": measured,
                "error": prediction.step_time_s / measured - 1,
                "first_loss": metrics[0]["loss"],
                "last_loss": metrics[-1]["loss"],
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="*", type=Path)
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--seq-len", default="64")
    parser.add_argument("--micro-batch-sizes", default="1,2,4")
    parser.add_argument("--global-batch-size", default="32")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    specs = ROOT / "cluster_specs"
    clusters = options.clusters or [specs / "laptop.yaml", specs / "laptop-odd.yaml"]
    rows = []
    for cluster in clusters:
        with tempfile.TemporaryDirectory() as work:
            rows += measure(cluster, options, Path(work))
    print("| cluster | strategy | predicted | measured | error | against even | loss |")
    print("|---|---|---|---|---|---|---|")
    even = {r["cluster"]: r["measured_s"] for r in rows if r["strategy"] == "even"}
    for row in rows:
        ratio = float(even[row["cluster"]]) / float(row["measured_s"])  # type: ignore[arg-type] # JSON row
        print(
            f"| {row['cluster']} | {row['strategy']} | {row['predicted_s']:.3f} s "
            f"| {row['measured_s']:.3f} s | {row['error']:+.1%} | {ratio:.2f}x "
            f"| {row['first_loss']:.2f} -> {row['last_loss']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
