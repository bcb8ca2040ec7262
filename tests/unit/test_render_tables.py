"""Tables as text at a fixed width."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_cluster, make_pipeline, make_plan, make_profile
from rich.console import Console, RenderableType

from eth_cli.errors import Fault, InfeasibleError
from eth_cli.launch.progress import Progress
from eth_cli.launch.run import RunResult
from eth_cli.launch.utilisation import Utilisation
from eth_cli.plan import UnusedDevice
from eth_cli.render.console import print_error, print_faults
from eth_cli.render.plan import comparison_table, plan_view, search_view
from eth_cli.render.profile import profile_tables
from eth_cli.render.tables import join_devices, new_table, percent
from eth_cli.render.training import describe, run_summary
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.simulate import simulate
from eth_cli.units import format_seconds


def text_of(*parts: RenderableType, width: int = 120) -> str:
    """What a terminal of a width shows."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_devices_are_shortened() -> None:
    assert join_devices(["a:0", "a:1", "a:2", "b:5"]) == "a:0-2 b:5"
    assert join_devices(["a:0", "a:2", "b:3", "b:4"]) == "a:0 a:2 b:3-4"
    assert join_devices([f"n{i}:0" for i in range(9)], limit=2) == "n0:0 n1:0 and 7 more"
    assert percent(3, 4) == "75 %"
    assert percent(1, 0) == "-"


def test_a_profile_shows_each_cost_and_the_parameters() -> None:
    text = text_of(*profile_tables(make_profile(types=("fast",), micro_batch_sizes=(2,))))
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith(" fast")}
    assert list(rows) == ["embedding", "transformer", "head"]
    assert rows["transformer"][4:8] == ["6.20", "ms", "12.4", "ms"]
    assert "8 blocks, 22.50 M parameters, 128 tokens a sample, fp32" in text


def test_a_plan_shows_who_holds_what_and_what_limits() -> None:
    cluster, profile, plan = make_cluster(), make_profile(), make_plan()
    simulation = simulate(plan, profile, cluster)
    text = text_of(*plan_view(plan, simulation, cluster, title="toy on small"))
    lines = text.splitlines()
    assert lines[0] == "toy on small"
    row = next(line for line in lines if "b:0" in line and "slow" in line)
    assert "[6, 8)" in row
    assert sum("  limit" in line for line in lines) == 1
    assert f"step {format_seconds(simulation.step_time_s)}" in text
    assert "DOES NOT FIT" not in text


@pytest.mark.parametrize("width", [20, 30, 40, 60, 72, 80, 100, 120])
def test_no_word_is_cut_on_any_terminal(width: int) -> None:
    cluster, profile, plan = make_cluster(), make_profile(), make_plan()
    simulation = simulate(plan, profile, cluster)
    report = search(profile, cluster, SearchOptions(global_batch_size=8))
    views = [
        *plan_view(plan, simulation, cluster, title="t"),
        comparison_table({"even": report, "hpp": report}),
        *profile_tables(profile),
    ]
    for view in views:
        text = text_of(view, width=width)
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        assert max(map(len, text.splitlines())) <= width
    # All that says who does what is there; the note of the stage that limits, in one piece.
    words = text_of(*views[:1], width=width).split()
    for word in ("pipeline", "stage", "a:0", "b:1", "limit"):
        assert word in words


def test_columns_are_dropped_before_rows_become_lines() -> None:
    table = new_table(left=("name",), right=("size", "much"), last=("",), droppable=("much",))
    table.add_row("first", "12.5", "wide as can be", "a note " * 20)
    table.add_row("second", "7.0", "short", "")
    assert "much" in text_of(table, width=80)
    narrow = text_of(table, width=45)
    assert "much" not in narrow
    assert "12.5" in narrow
    lines = [line.rstrip() for line in text_of(table, width=24).splitlines()]
    assert lines[:2] == ["name first  size 12.5", "  much wide as can be"]
    assert "name second  size 7.0" in lines


def test_alike_pipelines_share_their_rows() -> None:
    cluster = make_cluster(nodes={"a": {"fast": 3}, "b": {"slow": 1}})
    plan = make_plan(
        pipelines=[make_pipeline(devices=(f"a:{i}",), micro_batches=5) for i in range(3)]
        + [make_pipeline(devices=("b:0",), micro_batches=2)]
    )
    text = text_of(*plan_view(plan, simulate(plan, make_profile(), cluster), cluster, title="t"))
    assert "0-2" in text
    assert "a:0-2" in text
    assert sum("[0, 8)" in line for line in text.splitlines()) == 2


def test_a_stage_that_does_not_fit_stands_out() -> None:
    cluster = make_cluster()
    small = cluster.model_copy(
        update={
            "device_types": {
                name: kind.model_copy(update={"memory_bytes": 60_000_000})
                for name, kind in cluster.device_types.items()
            }
        }
    )
    plan = make_plan()
    text = text_of(*plan_view(plan, simulate(plan, make_profile(), small), small, title="t"))
    assert text.count("DOES NOT FIT") == 4


def test_a_comparison_has_speed_ups_and_reasons() -> None:
    report = search(make_profile(), make_cluster(), SearchOptions(global_batch_size=8))
    none = InfeasibleError("no", binding="stage 0 lacks 5 bytes", suggestion="buy")
    text = text_of(comparison_table({"even": report, "uneven-layers": none, "hpp": report}))
    assert text.count("1.00 x") == 2
    assert "infeasible: stage 0 lacks 5 bytes" in text
    without = text_of(comparison_table({"even": none, "hpp": report}))
    assert " x " not in without.split("hpp")[1].split("x1")[0]


def test_a_search_tells_its_proof_and_what_is_unused() -> None:
    report = search(make_profile(), make_cluster(), SearchOptions(global_batch_size=8))
    unused = tuple(UnusedDevice(device=d, reason="too slow") for d in ("b:0", "b:1"))
    report = type(report)(
        **{name: getattr(report, name) for name in report.__slots__ if name != "plan"},
        plan=report.plan.model_copy(update={"unused_devices": unused}),
    )
    text = text_of(*search_view(report))
    assert "unused: b:0-1: too slow" in text
    assert "no plan takes less than" in text


def test_progress_and_end_of_a_run() -> None:
    now = Progress(step=3, steps=9, loss=4.25, tokens_per_s=1234.5, step_time_s=0.75, eta_s=4.4)
    assert describe(now) == "loss 4.2500  750 ms/step  1,234 tokens/s  4 s left"
    used = Utilisation(busy_share=0.834, memory_bytes=3 * 2**29, memory_share=0.754)
    assert describe(replace(now, utilisation=used, eta_s=7384.0)) == (
        "loss 4.2500  750 ms/step  1,234 tokens/s  busy 83 %  memory 1.5 GiB (75 %)  2 h 3 min left"
    )
    used = Utilisation(busy_share=0.834, mfu=0.4123, memory_bytes=3 * 2**29)
    assert describe(replace(now, utilisation=used, eta_s=119.7)) == (
        "loss 4.2500  750 ms/step  1,234 tokens/s  MFU 41.2 %  memory 1.5 GiB  2 min 0 s left"
    )
    skipped = Progress(step=3, steps=9, loss=None, tokens_per_s=1.0, step_time_s=0.75, eta_s=4.4)
    assert describe(skipped).startswith("skipped, not finite")
    result = RunResult(
        out=Path("r"),
        first_step=4,
        steps=9,
        loss=4.0,
        median_step_time_s=0.5,
        tokens_per_s=2000.0,
        wall_s=12.5,
        stopped=True,
    )
    assert str(run_summary(make_plan(), result)) == (
        "stopped after 5 steps in 12.5 s, loss 4.0000, 500 ms a step, 2,000 tokens/s"
    )


def test_an_error_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("a\nb\x1b[31m " + "long " * 100, hint="do c")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("error: a b\N{REPLACEMENT CHARACTER}[31m long")
    assert err.endswith("; do c\n")


def test_many_faults_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    print_faults(Fault(file="f", field=str(i), message="bad") for i in range(50))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21
    assert lines[-1] == "error: and 30 more"
