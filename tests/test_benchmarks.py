"""The benchmarks: their commands run, and what they derive from their rows is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gradsync, hosts, processes, pruning, search
from benchmarks.problems import MODELS, cluster_yaml, mixed_cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.search.pruning import NAMES

ROOT = Path(__file__).resolve().parents[1]


def row(**changes: Any) -> search.Row:
    """A row that meets its targets."""
    given: dict[str, Any] = {
        "size": "16x1",
        "num_devices": 16,
        "num_types": 1,
        "model": search.GROWTH_MODEL,
        "inter_node_gbps": 100.0,
        "samples_per_device": 32,
        "status": "ok",
        "wall_s": 0.3,
        "memory_bytes": 2**27,
        "gap": 0.01,
    }
    return search.Row(**(given | changes))


def holds(rows: list[search.Row]) -> dict[str, bool]:
    """Whether each target holds."""
    return {target["target"]: target["holds"] for target in search.targets(rows)}


def test_quick_runs_and_its_json_has_the_figures(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "benchmarks" / "search.py", "--quick"),
            *("--model", "gpt-neo-2.7b", "--json", "-"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["start_up_s"] > 0
    assert {"growth_exponent", "median_gap", "worst_gap", "targets"} <= results.keys()
    (found,) = results["rows"]
    assert (found["size"], found["status"]) == ("16x2", "ok")
    assert found["wall_s"] > results["start_up_s"] / 2
    assert 2**24 < found["memory_bytes"] < search.MAX_MEMORY_BYTES
    assert found["step_time_s"] >= found["bound_s"] > 0
    assert found["gap"] == pytest.approx(found["step_time_s"] / found["bound_s"] - 1)
    assert set(found["speedup"]) == {"uneven-layers", "even"}
    # Baselines are plans of the searched space, so none of them is faster.
    assert all(ratio is None or ratio >= 1 - 1e-9 for ratio in found["speedup"].values())
    assert found["micro_batches_per_device"] >= search.MIN_PER_DEVICE
    assert found["num_templates"] >= 1
    assert all(isinstance(count, int) for count in found["pruned"].values())
    assert "16x2 wall time" in done.stderr


def test_a_run_over_its_time_is_a_row_and_no_crash() -> None:
    found = search.measure(
        search.problem("16x2", "opt-350m"), samples_per_device=32, timeout_s=0.01
    )
    assert found.status == "timeout"
    assert found.step_time_s is None
    assert not holds([found])["16x2 wall time [s]"]


def test_a_run_that_fails_is_told_with_its_code_and_its_words() -> None:
    done = processes.run(["plan", "--cluster", "nowhere.yaml"], timeout_s=60)
    assert done.status == "failed (2)"
    assert done.message


def test_the_written_cluster_is_the_problem(tmp_path: Path) -> None:
    asked = mixed_cluster(28, 3, inter_node_gbps=25)
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(asked), encoding="utf-8")
    read = read_cluster(path)
    assert read.nodes == asked.nodes
    assert read.device_types == asked.device_types
    link, expected = read.network.inter_node, asked.network.inter_node
    assert link is not None
    assert expected is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(expected.bandwidth_bytes_per_s)
    assert link.latency_s == pytest.approx(expected.latency_s)


def test_growth_is_the_slope_without_start_up() -> None:
    rows = [row(num_devices=n, wall_s=0.2 + 1e-4 * n**1.5) for n in (8, 64, 512)]
    rows += [row(num_devices=512, wall_s=99.0, num_types=2), row(wall_s=99.0, status="timeout")]
    assert search.growth_exponent(rows, start_up_s=0.2) == pytest.approx(1.5)
    assert search.growth_exponent(rows[:1], start_up_s=0.2) is None


def test_targets_are_missed_by_the_worst_row_and_by_rows_without_a_plan() -> None:
    good = [row(size="16x2", num_types=2), row()]
    assert all(holds(good).values())
    slow = holds([*good, row(size="16x2", num_types=2, wall_s=0.51)])
    assert [name for name, held in slow.items() if not held] == ["16x2 wall time [s]"]
    assert not holds([*good, row(gap=0.11)])["worst gap"]
    assert holds([*good, row(gap=0.09)])["median gap"]
    assert not holds([*good, row(memory_bytes=2**30 + 1)])["peak memory [MiB]"]
    assert not holds([*good, row(status="timeout", gap=None)])["median gap"]


@pytest.mark.parametrize("size", ["16", "x2", "16x6", "16x0", "1x2", "-4x1"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match=size.split("x")[0] or "DEVICES"):
        search.problem(size, "opt-350m")


def test_the_full_table_has_the_key_sizes_of_each_model_and_growth_rows_on_one_network() -> None:
    rows = search.table_problems()
    for model in MODELS:
        assert {r.size for r in rows if r.model == model} >= set(search.KEY_SIZES)
    growth = [r for r in rows if r.model == search.GROWTH_MODEL and r.num_types == 1]
    assert len({r.num_devices for r in growth}) >= 5
    assert len({r.inter_node_gbps for r in growth}) == 1
    assert {r.inter_node_gbps for r in rows} == {25, 100, 200}


def test_rules_are_measured_one_by_one_and_change_no_plan() -> None:
    (seed, *_) = pruning.ORACLE_SEEDS
    found = pruning.outcomes(pruning.oracle_problem(seed), runs=1)
    assert list(found) == [pruning.ALL, *NAMES]
    usual_s = found[pruning.ALL].report.step_time_s
    assert all(o.report.step_time_s == pytest.approx(usual_s, rel=1e-9) for o in found.values())
    counts, times = pruning.table_of_counts({"it": found}), pruning.table_of_times({"it": found})
    assert counts[-1].startswith(f"| it | {found[pruning.ALL].report.pruned['bound']:,} |")
    assert times[-1].count(" s, ") == len(found)


def test_the_sync_table_compares_the_modes_of_a_setting() -> None:
    def sync(mode: str, exposed_s: float) -> gradsync.Row:
        return gradsync.Row(
            bandwidth_mbps=80,
            pattern="far",
            mode=mode,
            exposed_s=exposed_s,
            step_s=4.5,
            predicted_exposed_s=0.19,
            predicted_step_s=4.4,
        )

    lines = gradsync.table([sync("block", 0.2), sync("layer", 0.3), sync("whole", 0.8)])
    assert lines.splitlines()[2:] == [
        "| 80 Mbit/s | far | 200 ms | 300 ms | 800 ms | 0.25 | 190 ms | -5% | 4.500 s | 4.400 s |"
    ]


@pytest.mark.distributed
@pytest.mark.skipif(hosts.lacking() is not None, reason=f"no hosts: {hosts.lacking()}")
def test_the_sync_benchmark_trains_over_shaped_links() -> None:
    rows = gradsync.measure([200], ["far"], ["block", "whole"], steps=2)
    block, whole = rows
    assert (block.mode, whole.mode) == ("block", "whole")
    assert block.exposed_s < whole.exposed_s
