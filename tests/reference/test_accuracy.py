"""Predictions against measured runs of real clusters, where the measurements are at hand."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference.accuracy import ROOT, mean_errors, predict, table
from benchmarks.reference.cases import BYTES_PER_PARAMETER, imported, transfer_s
from benchmarks.reference.tables import DEFAULT_PATH, Reference
from eth_cli import serde
from eth_cli.plan import read_plan, write_plan
from eth_cli.profile.table import read_profile, write_profile
from eth_cli.search.simulate import simulate

needs_reference = pytest.mark.skipif(
    not DEFAULT_PATH.is_dir(), reason=f"no measurements at {DEFAULT_PATH}"
)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(DEFAULT_PATH)


def _case(reference: Reference, name: str) -> Any:
    return next(c for c in reference.measured["cases"] if c["id"] == name)


@needs_reference
def test_mean_errors_are_within_what_is_claimed(reference: Reference) -> None:
    rows, _ = predict(reference)
    errors = mean_errors(rows)
    assert errors["step time, GH200"] <= 0.06
    assert errors["step time, mixed RTX"] <= 0.12
    assert errors["peak memory"] <= 0.06


@needs_reference
def test_the_document_shows_what_is_predicted_now(reference: Reference) -> None:
    assert table(*predict(reference)) in (ROOT / "docs" / "accuracy.md").read_text()


@needs_reference
@pytest.mark.parametrize("name", ["clariden__OPT-350__N8__N8_D2", "mit__N6__N6_D2"])
def test_an_imported_run_survives_its_files(
    reference: Reference, tmp_path: Path, name: str
) -> None:
    case = _case(reference, name)
    ours = imported(reference, case)
    write_plan(tmp_path / "plan.json", ours.plan)
    write_profile(tmp_path / "profile.json", ours.profile)
    plan, profile = read_plan(tmp_path / "plan.json"), read_profile(tmp_path / "profile.json")
    assert (plan, serde.to_data(profile)) == (ours.plan, serde.to_data(ours.profile))
    assert len(plan.ranks) == case["num_gpus"]
    assert [list(s.blocks) for s in plan.pipelines[0].stages] == [
        [s["layers"][0], s["layers"][1] + 1] for s in case["stages"]
    ]
    gpus = dict.fromkeys(case["gpus"], 0)
    for place in plan.ranks:
        gpus[ours.cluster.devices[place.device].type] += 1
    assert gpus == case["gpus"]
    again = simulate(plan, profile, ours.cluster, overlap=False)
    first = simulate(ours.plan, ours.profile, ours.cluster, overlap=False)
    assert again.step_time_s == first.step_time_s


@needs_reference
def test_a_run_without_pipeline_by_hand(reference: Reference) -> None:
    case = _case(reference, "mit__N2__N2_D2")
    ours = imported(reference, case)
    simulation = simulate(ours.plan, ours.profile, ours.cluster, overlap=False)
    # Titan RTX is the slower replica; its 64 micro-batches set the pace.
    slow = reference.times("OPT-350", "Titan-RTX", 2, 2)
    parameters = sum(reference.memory("OPT-350", 2)["params_floats"])
    adding = (64 - 1) * parameters * 4 * 3 / 672e9
    compute = 64 * (sum(slow["fwd_s"]) + sum(slow["bwd_s"])) + adding
    # Two rings of two owners share the RTX 3090 node's 1 Gb/s: each sends half, twice.
    sync = 2 * 2 * (parameters * 4 / 2) / 0.1152e9
    assert simulation.step_time_s == pytest.approx(compute + sync, rel=0.01)
    memory = simulation.stages[0].memory
    assert memory.parameters_bytes == pytest.approx(parameters * BYTES_PER_PARAMETER, rel=1e-3)
    assert memory.workspace_bytes == max(
        2 * 2 * 8 * 2048 * 2048 * 4,
        2 * reference.memory("OPT-350", 2)["act_output_bytes"][-1],
    )


@needs_reference
def test_a_transfer_between_groups_sends_parts_and_gathers(reference: Reference) -> None:
    whole = 2.0**26
    across = transfer_s(reference, "GH-96", "GH-96", whole, 4, across=True)
    part = whole / 4
    sent = reference.link("inter", "GH-96", "GH-96", 4).transfer_s(part)
    gathered = 3 * reference.link("intra", "GH-96", "GH-96", 4).transfer_s(part)
    assert across == pytest.approx(sent + gathered)
    # The fit itself at this size: 80.9 GB/s by 4 flows, 177.3 GB/s inside a node.
    assert sent == pytest.approx(part * 4 / 80.917e9, rel=0.01)
    assert gathered == pytest.approx(3 * part * 4 / 177.301e9, rel=0.01)


@needs_reference
def test_no_link_is_faster_for_less_or_shared_traffic(reference: Reference) -> None:
    for gpu in ("GH-96", "RTX-3090", "RTX-2080", "Titan-RTX", "A100-40", "V100-16"):
        for k in reference.flows("inter", gpu):
            rows = reference.rows("inter", gpu, k)
            times = [time_s for _, time_s in rows]
            assert times == sorted(times)
            assert all(math.isfinite(t) and t > 0 for t in times)
    slow = reference.link("inter", "RTX-3090", "Titan-RTX", 8).transfer_s(1e8)
    assert slow == pytest.approx(8e8 / 0.1138e9, rel=0.02)


def test_an_absent_folder_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.reference.accuracy", "--reference", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "measured_runs.json" in done.stderr
    assert "--reference" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
