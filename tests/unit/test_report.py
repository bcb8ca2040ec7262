"""The report of a run folder, written by hand from simulated spans: then both sides must agree."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_cluster, make_pipeline, make_plan, make_profile
from rich.console import Console
from run_folders import OVERHEAD_S, planned, write_run

from eth_cli.errors import ConfigError
from eth_cli.events import Scalar, Span, write_events
from eth_cli.launch.config import RunFolder
from eth_cli.render.report import report_view
from eth_cli.report import Report, TermReport, build_report, measure_step
from eth_cli.search.pacing import self_contained
from eth_cli.search.simulate import simulate


def by_name(report: Report) -> dict[str, tuple[float | None, float]]:
    return {term.name: (term.predicted_s, term.measured_s) for term in report.terms}


def test_a_run_that_went_as_predicted_is_reported_so(tmp_path: Path) -> None:
    plan = planned()
    folder = write_run(tmp_path / "run", plan)
    report = build_report(folder.root)
    simulation = simulate(plan, make_profile(), make_cluster())
    assert (report.num_steps, report.num_dropped, report.typical_step) == (3, 1, 2)
    assert report.source == "simulated with profile.json"
    assert report.measured_step_time_s == pytest.approx(simulation.step_time_s + OVERHEAD_S)
    assert report.error == pytest.approx(
        -OVERHEAD_S / (simulation.step_time_s + OVERHEAD_S), rel=1e-6
    )
    terms = by_name(report)
    predicted_other_s, measured_other_s = terms.pop("other_s")
    assert predicted_other_s == 0
    assert measured_other_s == pytest.approx(OVERHEAD_S, rel=1e-3)
    # Times since the epoch have a grain of 0.2 us.
    for name, (predicted_s, measured_s) in terms.items():
        assert measured_s == pytest.approx(predicted_s, abs=5e-6), name
    assert set(terms) == set(simulation.terms)
    assert report.measured_tokens_per_s == pytest.approx(
        8 * 128 / (simulation.step_time_s + OVERHEAD_S)
    )
    assert (report.first_loss, report.last_loss) == (4.75, 4.0)
    assert report.notes == ()


def test_the_terms_sum_to_the_measured_step_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", planned(), slowness=(3.0, 1.1, 1.7, 1.3, 1.0))
    report = build_report(folder.root)
    assert sum(term.measured_s for term in report.terms) == pytest.approx(
        report.measured_step_time_s
    )
    assert report.typical_step in (2, 4)
    assert report.measured_spread_s > 0


def test_stages_are_compared_one_by_one(tmp_path: Path) -> None:
    plan = planned()
    folder = write_run(tmp_path / "run", plan, slowness=(5.0, 2.0, 2.0))
    report = build_report(folder.root)
    assert [(s.pipeline, s.stage, s.devices, s.blocks) for s in report.stages] == [
        (0, 0, ("a:0",), (0, 6)),
        (0, 1, ("b:0",), (6, 8)),
        (1, 0, ("a:1",), (0, 5)),
        (1, 1, ("b:1",), (5, 8)),
    ]
    for stage in report.stages:
        assert stage.predicted_forward_s is not None
        assert stage.predicted_backward_s is not None
        assert stage.predicted_busy_share is not None
        assert stage.measured_forward_s == pytest.approx(2 * stage.predicted_forward_s, rel=1e-3)
        assert stage.measured_backward_s == pytest.approx(2 * stage.predicted_backward_s, rel=1e-3)
        # Twice the work in twice the time, but for the overhead.
        assert stage.measured_busy_share == pytest.approx(stage.predicted_busy_share, rel=0.05)
    # Stage 0 of pipeline 0, by hand: embedding and five layers on `fast`.
    assert report.stages[0].predicted_forward_s == pytest.approx(0.0004 + 5 * 0.0031)


def test_shares_of_the_step_are_measured_as_they_are_predicted(tmp_path: Path) -> None:
    plan = planned()
    folder = write_run(tmp_path / "run", plan, slowness=(5.0, 2.0, 2.0))
    report = build_report(folder.root)
    names = ("compute", "bubble", "sync", "optimizer", "other")
    overhead = OVERHEAD_S / report.measured_step_time_s
    for stage in report.stages:
        predicted, measured = stage.predicted_shares, stage.measured_shares
        assert predicted is not None
        assert sum(getattr(measured, name) for name in names) == pytest.approx(1)
        assert measured.compute == pytest.approx(stage.measured_busy_share, rel=1e-3)
        assert predicted.compute == pytest.approx(stage.predicted_busy_share)
        for name in names:
            assert getattr(measured, name) == pytest.approx(
                getattr(predicted, name), abs=1.01 * overhead
            ), name
    # By hand: stage 1 of pipeline 1 does nothing but its 3 x (F + B), until its last B ends.
    simulation = simulate(plan, make_profile(), make_cluster())
    figures = next(f for f in simulation.stages if (f.pipeline, f.stage) == (1, 1))
    own = next(s for s in report.stages if (s.pipeline, s.stage) == (1, 1)).predicted_shares
    assert own is not None
    idle_s = simulation.pipeline_end_s[1] - 3 * (figures.forward_s + figures.backward_s)
    assert own.bubble == pytest.approx(idle_s / simulation.step_time_s)


def test_the_slowest_stage_and_why(tmp_path: Path) -> None:
    plan = planned()
    report = build_report(write_run(tmp_path / "run", plan, slowness=(5.0, 2.0, 2.0)).root)
    most = max(report.stages, key=lambda stage: stage.measured_busy_share)
    slowest = report.slowest
    assert (slowest.pipeline, slowest.stage) == (most.pipeline, most.stage)
    assert slowest.cause == "compute"
    assert slowest.compute_over_predicted == pytest.approx(1, rel=1e-2)


def test_a_stage_that_waits_most_of_the_step_is_said_to_wait(tmp_path: Path) -> None:
    # With one micro-batch, stages work one after the other.
    long = make_pipeline(devices=("a:0", "a:1", "b:0", "b:1"), cuts=(3, 5, 6), micro_batches=1)
    plan = make_plan(pipelines=(long,)).model_copy(update={"cluster": make_cluster()})
    report = build_report(write_run(tmp_path / "run", plan).root)
    assert report.slowest.cause == "bubble"
    assert report.slowest.compute_over_predicted == pytest.approx(0, abs=0.01)


def test_exposed_sync_is_the_term_of_that_name(tmp_path: Path) -> None:
    plan = planned()
    report = build_report(write_run(tmp_path / "run", plan).root)
    expected = simulate(plan, make_profile(), make_cluster()).terms["gradsync_s"]
    assert expected > 0
    assert report.exposed_sync.predicted_s == pytest.approx(expected)
    assert report.exposed_sync.measured_s == pytest.approx(expected, abs=5e-6)


def test_memory_of_every_rank(tmp_path: Path) -> None:
    plan = planned()
    folder = write_run(tmp_path / "run", plan)
    for rank, value in ((0, 7e8), (0, 8e8), (0, 6e8), (2, 5e8)):
        write_events(
            folder.events_of(rank), [Scalar(rank=rank, name="peak_memory_bytes", value=value)]
        )
    report = build_report(folder.root)
    assert [m.device for m in report.memory] == [place.device for place in plan.ranks]
    assert [m.measured_bytes for m in report.memory] == [800_000_000, None, 500_000_000, None]
    simulation = simulate(plan, make_profile(), make_cluster())
    assert [m.predicted_bytes for m in report.memory] == [m.bytes for m in simulation.memory]
    capacities = [make_cluster().type_of(m.device).memory_bytes for m in report.memory]
    assert [m.capacity_bytes for m in report.memory] == capacities
    assert report.notes == ()  # No device is emulated.


def test_memory_of_processes_that_play_devices_is_said_to_be_theirs(tmp_path: Path) -> None:
    plan = self_contained(planned(), make_cluster(emulated=True), make_profile(), None)
    folder = write_run(tmp_path / "run", plan)
    write_events(folder.events_of(0), [Scalar(rank=0, name="peak_memory_bytes", value=1e9)])
    report = build_report(folder.root)
    assert report.memory[0].is_emulated
    assert any("memory of emulated devices" in note for note in report.notes)


def test_devices_that_share_a_stage_are_counted_once() -> None:
    def work(rank: int, name: str, start_s: float, stop_s: float) -> Span:
        return Span(rank=rank, name=name, start_s=start_s, stop_s=stop_s, pipeline=0, stage=0)

    spans = [
        work(rank, name, start_s + rank / 100, stop_s + rank / 100)
        for rank in (0, 1)
        for name, start_s, stop_s in (("F", 0, 1), ("B", 1, 3))
    ]
    assert measure_step(spans)["compute_s"] == pytest.approx(3.0)
    assert measure_step(spans)["bubble_s"] == pytest.approx(0.0)


def test_the_tables_show_memory_shares_and_the_slowest_stage(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", planned()).root)
    console = Console(width=110, record=True, file=io.StringIO())
    for part in report_view(report):
        console.print(part)
    text = console.export_text()
    for words in ("what stages do with the step", "slowest: stage", "peak memory", "bubble"):
        assert words in text
    data = report.as_data()
    assert {"memory", "exposed_sync", "slowest", "stages"} <= set(data)
    assert set(data["stages"][0]["measured_shares"]) == {
        "compute",
        "bubble",
        "sync",
        "optimizer",
        "other",
    }
    assert data["memory"][0]["predicted_bytes"] == report.memory[0].predicted_bytes
    json.dumps(data)


def test_both_timelines_start_at_zero(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", planned()).root)
    assert min(s.start_s for s in report.predicted_spans) == 0
    assert min(s.start_s for s in report.measured_spans if s.name == "F") == 0
    measured = [s for s in report.measured_spans if s.name != "STEP"]
    assert len(measured) == len(report.predicted_spans)
    assert {s.step for s in measured} == {report.typical_step}
    data = json.loads(json.dumps(report.as_data()))
    assert data["terms"][0]["name"] == "compute_s"
    assert data["stages"][3]["devices"] == ["b:1"]
    assert data["error"] == report.error
    assert "measured_spans" not in data


def test_without_a_profile_the_plan_s_own_prediction_is_used(tmp_path: Path) -> None:
    plan = planned()
    report = build_report(write_run(tmp_path / "run", plan, profile=False).root)
    assert plan.predicted is not None
    assert report.source == "plan.json"
    assert report.predicted_step_time_s == plan.predicted.step_time_s
    assert by_name(report)["compute_s"][0] == plan.predicted.terms["compute_s"]
    assert report.stages[0].predicted_busy_share is None
    assert report.predicted_spans == ()
    assert any("--profile" in note for note in report.notes)


def test_a_self_contained_plan_predicts_its_emulated_stages_without_a_profile(
    tmp_path: Path,
) -> None:
    plan = self_contained(planned(), make_cluster(emulated=True), make_profile(), None)
    with_profile = build_report(write_run(tmp_path / "one", plan).root)
    without = build_report(write_run(tmp_path / "two", plan, profile=False).root)
    assert without.source == "plan.json"
    assert without.notes == ()
    for found, expected in zip(without.stages, with_profile.stages, strict=True):
        for name in ("forward_s", "backward_s", "busy_share"):
            value = getattr(expected, f"predicted_{name}")
            assert getattr(found, f"predicted_{name}") == pytest.approx(value), name


def test_without_any_prediction_the_measured_side_stands_alone(tmp_path: Path) -> None:
    plan = planned(predicted=False, cluster=False)
    report = build_report(write_run(tmp_path / "run", plan).root)
    assert report.source is None
    assert report.error is None
    assert report.predicted_step_time_s is None
    assert all(term.predicted_s is None for term in report.terms)
    assert report.stages[0].predicted_forward_s is None
    assert report.measured_step_time_s > 0
    assert any("nothing is predicted" in note for note in report.notes)


def test_errors_are_shown_of_parts_that_matter(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", planned()).root)
    whole_s = report.measured_step_time_s
    terms = tuple(
        TermReport(name=name, predicted_s=part * whole_s, measured_s=0.048 * whole_s)
        for name, part in (("compute_s", 0.06), ("bubble_s", 0.047), ("other_s", 0.0))
    )
    console = Console(width=100, record=True, file=io.StringIO())
    for part in report_view(replace(report, terms=terms)):
        console.print(part)
    lines = console.export_text().splitlines()
    ends = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line.strip()}
    assert ends["compute"] == ["+25.0", "%"]
    assert ends["pipeline fill and drain"][-1] == "-"
    assert ends["everything else"][-1] == "-"
    assert any("shown for parts of at least 5 % of the step" in line for line in lines)


def test_skipped_steps_do_not_count(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", planned(), slowness=(9.0, 1.0, 5.0, 1.0, 5.0), skipped=(3, 5)
    )
    report = build_report(folder.root)
    assert report.num_steps == 2
    assert any("2 steps were skipped (not finite), the first is 3" in n for n in report.notes)
    assert report.error == pytest.approx(0, abs=0.05)


def test_missed_paces_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", planned())
    scalars = [
        Scalar(rank=2, name="missed_paces_count", value=7),
        Scalar(rank=2, name="worst_missed_pace_s", value=0.0123),
    ]
    write_events(folder.events_of(2), scalars)
    (note,) = build_report(folder.root).notes
    assert note.startswith("rank 2 could not keep its pace 7 times, at worst by 12.3 ms")


def test_missed_paces_of_many_ranks_are_one_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", planned())
    for rank, (count, worst_s) in {0: (7, 0.0123), 1: (0, 0.0), 2: (4, 0.0321)}.items():
        scalars = [
            Scalar(rank=rank, name="missed_paces_count", value=count),
            Scalar(rank=rank, name="worst_missed_pace_s", value=worst_s),
        ]
        write_events(folder.events_of(rank), scalars)
    (note,) = build_report(folder.root).notes
    assert note.startswith("2 ranks could not keep their pace, 11 times in all")
    assert "32.1 ms (rank 2)" in note


def test_a_single_step_is_reported_rather_than_dropped(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path / "run", planned(), slowness=(2.0,)).root)
    assert (report.num_steps, report.num_dropped) == (1, 0)


def test_a_step_that_was_under_way_when_the_run_was_killed_does_not_count(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", planned())
    path = folder.events_of(1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # cut within the last STEP
    report = build_report(folder.root)
    assert (report.num_steps, report.num_dropped) == (2, 1)


def test_the_critical_pipeline_is_the_one_that_ends_last() -> None:
    def work(pipeline: int, name: str, start_s: float, stop_s: float) -> Span:
        return Span(
            rank=pipeline, name=name, start_s=start_s, stop_s=stop_s, pipeline=pipeline, stage=0
        )

    spans = [
        work(0, "F", 10.0, 13.0),
        work(0, "B", 13.0, 18.0),
        work(1, "F", 10.5, 11.5),
        work(1, "B", 17.5, 19.0),  # waited for six seconds
        Span(rank=0, name="OPTIMIZER", start_s=19.5, stop_s=19.75),
        Span(rank=1, name="OPTIMIZER", start_s=19.5, stop_s=20.5),
    ]
    assert measure_step(spans) == pytest.approx(
        {"compute_s": 2.5, "bubble_s": 0, "p2p_s": 6.0, "gradsync_s": 0.5, "optimizer_s": 1.0}
    )


# --- Damaged folders ------------------------------------------------------------------------------


def spoil_plan(folder: RunFolder) -> None:
    folder.plan.write_text("{")


def spoil_profile(folder: RunFolder) -> None:
    folder.profile.write_text('{"schema_version": 2}')


def spoil_metrics(folder: RunFolder) -> None:
    folder.metrics.write_text("nonsense\n" + folder.metrics.read_text())


def spoil_events(folder: RunFolder) -> None:
    path = folder.events_of(2)
    path.write_text("nonsense\n" + path.read_text())


def swap_events(folder: RunFolder) -> None:
    folder.events_of(0).rename(folder.events_of(1))


def forget_steps(folder: RunFolder) -> None:
    folder.events_of(3).write_text("")


def skip_all(folder: RunFolder) -> None:
    line = '{"step": %d, "tokens": 1, "step_time_s": 0.5, "skipped": true}\n'
    folder.metrics.write_text("".join(line % step for step in (1, 2, 3)))


@pytest.mark.parametrize(
    ("spoil", "file", "message"),
    [
        (spoil_plan, "plan.json", "is not valid JSON"),
        (lambda f: f.plan.unlink(), "plan.json", "no such file"),
        (spoil_profile, "profile.json", "schema_version"),
        (spoil_metrics, "metrics.jsonl", "line 1"),
        (lambda f: f.metrics.unlink(), "metrics.jsonl", "no such file"),
        (lambda f: f.metrics.write_text(""), "metrics.jsonl", "is empty"),
        (spoil_events, "rank-2.jsonl", "line 1"),
        (lambda f: f.events_of(1).unlink(), "rank-1.jsonl", "cannot be read"),
        (swap_events, "rank-", "rank"),
        (forget_steps, "metrics.jsonl", "no step of which every rank"),
        (skip_all, "metrics.jsonl", "skipped steps only"),
    ],
)
def test_damaged_folders_name_the_file(
    tmp_path: Path, spoil: Callable[[RunFolder], object], file: str, message: str
) -> None:
    folder = write_run(tmp_path / "run", planned())
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        build_report(folder.root)
    assert file in caught.value.faults[0].file
    assert message in str(caught.value)


def test_no_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        build_report(tmp_path / "absent")


def test_one_stage_pipelines_are_reported(tmp_path: Path) -> None:
    plan = make_plan(
        pipelines=(
            make_pipeline(devices=("a:0",), micro_batches=5),
            make_pipeline(devices=("b:0",), micro_batches=1, micro_batch_size=2),
        )
    ).model_copy(update={"cluster": make_cluster()})
    terms = by_name(build_report(write_run(tmp_path / "run", plan).root))
    for name, (predicted_s, measured_s) in terms.items():
        if name != "other_s":
            assert measured_s == pytest.approx(predicted_s, abs=5e-6), name
