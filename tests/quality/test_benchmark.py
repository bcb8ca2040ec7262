"""The quality benchmark: its command runs, and what it derives from step times is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import quality
from benchmarks.quality import GROUPED, LEVELLED, RUNGS, UNEVEN_RUNG, WHOLE, WIDE, WITHOUT_WIDTHS

ROOT = Path(__file__).resolve().parents[2]


def row(seed: int, *times: float | None, without_widths: float | None = 1.0) -> quality.Row:
    """Step times by rung, from the baseline to the whole space."""
    return quality.Row(
        seed=seed,
        num_devices=seed,
        num_types=1,
        global_batch_size=8,
        step_time_s=dict(zip(RUNGS, times, strict=True)) | {WITHOUT_WIDTHS: without_widths},
        num_pipelines=1,
    )


ROWS = [
    row(1, 8.0, 8.0, 4.0, 2.0, 2.0, 1.0, without_widths=2.0),
    row(2, 8.0, 4.0, 4.0, 4.0, 2.0, 2.0, without_widths=4.0),
    row(3, None, 5.0, 5.0, 4.0, 4.0, 5.0, without_widths=4.0),
    row(4, None, None, None, None, None, 3.0, without_widths=None),
]


def test_a_few_clusters_run_and_the_json_has_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.quality", "--quick"),
            *("--first", "10005", "--clusters", "2", "--json", file),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert [r["seed"] for r in results["rows"]] == [10005, 10006]
    assert results["clusters"] == 2
    assert results["num_worse_than_baselines"] == 0
    for found in results["rows"]:
        assert set(found["step_time_s"]) == {*RUNGS, WITHOUT_WIDTHS}
    # The second has a plan in every space.
    steps = results["rows"][1]["step_time_s"]
    assert steps["even"] >= steps[UNEVEN_RUNG] >= steps[LEVELLED] > 0
    ladder = results["ladders"]["even"]
    assert [s["name"] for s in ladder] == [
        *(f"+ {r.adds}" for r in quality.LADDER[1:]),
        "all of it",
    ]
    assert ladder[-1]["mean"] == pytest.approx(steps["even"] / steps[WHOLE])
    assert "| + grouping | 1 |" in done.stdout


def test_steps_of_a_ladder_multiply_to_the_whole() -> None:
    steps = {s.name: s for s in quality.ladder(ROWS, "even")}
    assert {s.clusters for s in steps.values()} == {2}
    assert steps["+ cuts"].mean == pytest.approx(2**0.5)
    assert (steps["+ cuts"].best, steps["+ cuts"].worst) == (2.0, 1.0)
    assert steps["all of it"].mean == pytest.approx((8 * 4) ** 0.5)
    assert steps["all of it"].median == 6.0
    product = 1.0
    for name, step in steps.items():
        product *= step.mean if name != "all of it" else 1.0
    assert product == pytest.approx(steps["all of it"].mean)


def test_a_ladder_starts_where_it_is_asked_to_and_counts_what_got_slower() -> None:
    steps = {s.name: s for s in quality.ladder(ROWS, UNEVEN_RUNG)}
    assert "+ cuts" not in steps
    assert {s.clusters for s in steps.values()} == {3}
    assert steps["+ recomputation"].worst == pytest.approx(0.8)
    assert {name: s.num_worse for name, s in steps.items() if s.num_worse} == {"+ recomputation": 1}


def test_a_freedom_left_out_is_compared_where_both_have_a_plan() -> None:
    widths, recomputation = quality.left_out(ROWS)
    assert (widths.name, widths.clusters) == ("tensor-parallel widths", 3)
    assert widths.mean == pytest.approx((2 * 2 * 0.8) ** (1 / 3))
    assert recomputation.mean == pytest.approx((2 * 1 * 0.8) ** (1 / 3))


def test_defects_are_larger_spaces_that_do_worse_and_those_that_find_no_plan() -> None:
    rows = [*ROWS, row(5, 2.0, 2.0, 2.0, None, 2.0, 3.0, without_widths=3.0)]
    found = [(d.seed, d.narrow, d.wide, d.slower) for d in quality.defects(rows)]
    assert found[0] == (5, LEVELLED, GROUPED, None)
    assert found[1:] == [
        (5, WIDE, WHOLE, 0.5),
        (3, WIDE, WHOLE, 0.25),
        (3, WITHOUT_WIDTHS, WHOLE, 0.25),
    ]
    assert quality.num_worse_than_baselines(rows) == 1
    assert quality.num_worse_than_baselines(ROWS) == 0
    lost = row(6, 2.0, 2.0, 2.0, 2.0, 2.0, None)
    assert quality.num_worse_than_baselines([lost]) == 1


def test_spaces_hold_each_other() -> None:
    """Every plan of the first of a pair is one of the second: only freedoms are added."""
    for narrow, wide in quality.NESTED:
        first, second = quality.SPACES[narrow], quality.SPACES[wide]
        if second.get("strategy") == "hpp" == first.get("strategy"):
            assert second.items() <= first.items()
