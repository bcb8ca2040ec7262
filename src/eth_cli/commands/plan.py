"""`eth plan`: cluster + profile -> plan.json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.commands import arguments
from eth_cli.commands.controls import Controls
from eth_cli.commands.inputs import naming_file
from eth_cli.commands.interruption import InterruptedEarlyError, Interruption, watched
from eth_cli.commands.plan_inputs import (
    check_widths,
    estimated_sizes,
    the_batch,
    the_cluster,
    the_profile,
    without_profile_digest,
)
from eth_cli.errors import ConfigError, InfeasibleError, SearchStoppedError
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import Profile
from eth_cli.render.console import print_json, print_note, print_result
from eth_cli.search.planner import SearchOptions, SearchReport, search, self_contained
from eth_cli.search.planner import compare as compare_strategies
from eth_cli.stdout import is_stdout

if TYPE_CHECKING:
    from eth_cli.commands.plan_questions import Answered, Questions
    from eth_cli.commands.replanning import Replanning
    from eth_cli.search.replan import Replanned

COMPARED = ("even", "uneven-layers", "hpp")
"""Strategies in the order in which a comparison shows them: each can do all that the last can."""

Answers = dict[str, SearchReport | InfeasibleError]
"""By strategy its plan, or why it has none."""


def run_plan_command(
    *,
    cluster_path: Path | None,
    profile_path: Path | None,
    model_source: str | None,
    seq_len: int | None,
    dtype: str | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    strategy: str,
    compare: bool,
    as_json: bool,
    output: Path | None,
    controls: Controls,
) -> None:
    """Search for a plan, write it and show it, and answer what else is asked.

    Raises:
        ConfigError: an input is wrong.
        InfeasibleError: no plan of the strategy exists.
        InterruptedEarlyError: Ctrl-C ended the search; what it had found is written and shown.
        SearchStoppedError: Ctrl-C ended the search before it had found a plan.
    """
    inputs = (cluster_path, profile_path, controls.old_plan)
    for option, path in (("--output", output), ("--frontier-svg", controls.frontier_svg)):
        if path is not None:
            arguments.output_file(option, path, inputs=inputs)
    _check_controls(controls, compare=compare, strategy=strategy, output=output)
    replanning, questions, old = None, None, None
    if controls.old_plan is not None:
        from eth_cli.commands.replanning import read_old

        old = read_old(controls.old_plan)
    cluster = the_cluster(cluster_path, old)
    batch = the_batch(global_batch_size, old)
    excluded = _excluded(cluster, controls)
    if controls.replans:
        from eth_cli.commands.replanning import Replanning

        replanning = Replanning(controls, old, cluster, cluster_path)
        excluded = replanning.excluded(excluded)
    if controls.asks:
        from eth_cli.commands.plan_questions import Questions

        named = cluster_path or Path(f"cluster {cluster.name}")
        questions = Questions(controls, cluster, named, excluded)
    options = SearchOptions(
        global_batch_size=batch,
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        max_pipelines=controls.max_pipelines,
        tensor_parallel=controls.tensor_parallel,
        recompute=controls.recompute,
        excluded=frozenset(excluded),
        max_gap=controls.max_gap,
        time_limit_s=controls.time_limit_s,
        no_prune=frozenset(controls.no_prune),
    )
    if old is not None:
        options = old.inherited(options)
    profile = the_profile(
        profile_path,
        cluster=questions.largest_cluster() if questions and controls.what_if else cluster,
        cluster_path=cluster_path,
        model_source=model_source,
        seq_len=seq_len,
        dtype=dtype,
        sizes=estimated_sizes(batch, options.micro_batch_size),
        old=old,
    )
    check_widths(controls, profile)
    answered: Answered | None = None
    replanned: Replanned | None = None
    with (
        naming_file("profile", profile_path or f"--model {model_source or profile.model.name}"),
        watched() as interruption,
    ):
        if questions and controls.what_if:
            questions.check_profiled(profile)
        if replanning is not None:
            answers, replanned = _replanned(
                replanning, profile, profile_path, options, interruption
            )
        else:
            answers = _searched(profile, cluster, options, compare, interruption)
        if excluded:
            answers = {name: _saying_why(answer, excluded) for name, answer in answers.items()}
        if questions and not interruption.is_pressed:
            left = options.with_excluded(replanning.lost if replanning else ())
            answered = _answered(questions, answers[strategy], profile, left, interruption)
        if answered is not None:
            answers[strategy] = answered.chosen
    plans = {
        name: self_contained(answer.plan, cluster, profile, profile.model.spec)
        for name, answer in answers.items()
        if isinstance(answer, SearchReport)
    }
    if profile_path is None:
        plans = {name: without_profile_digest(plan) for name, plan in plans.items()}
    if output is not None and strategy in plans:
        write_plan(output, plans[strategy])
    if controls.frontier_svg is not None and answered is not None:
        answered.write_svg(controls.frontier_svg)
    is_shown = output is None or not is_stdout(output)
    if is_shown:
        _show(
            answers,
            plans,
            cluster,
            answered,
            None if replanned is None else (replanned, controls.old_plan),
            strategy=strategy,
            as_json=as_json,
            compare=compare,
        )
    chosen = answers[strategy]
    if isinstance(chosen, InfeasibleError):
        raise chosen
    if output is not None and is_shown and not as_json:
        print_note(f"wrote {output}")
    if interruption.is_pressed:
        raise InterruptedEarlyError(_what_was_left(chosen, questions, answered, compare, answers))


def _check_controls(
    controls: Controls, *, compare: bool, strategy: str, output: Path | None
) -> None:
    """Raise ConfigError for options that are wrong whatever the files say."""
    if controls.max_step_time_s is not None and not controls.by_cost:
        raise ConfigError.single(
            "--max-step-time",
            "",
            "is for --objective cost; without it the plan is the fastest one anyway",
        )
    if compare and controls.by_cost:
        raise ConfigError.single(
            "--compare", "", "shows the fastest plans; leave it or --objective cost out"
        )
    if controls.no_prune:
        from eth_cli.search.pruning import check_rules

        check_rules(controls.no_prune)
    svg = controls.frontier_svg
    if svg is not None and output is not None and svg.absolute() == output.absolute():
        raise ConfigError.single(
            "--frontier-svg", "", f"{svg} is where the plan goes too; give another file"
        )
    if controls.replans or controls.lost:
        from eth_cli.commands.replanning import check_alone

        check_alone(controls, compare=compare, strategy=strategy)


def _excluded(cluster: Cluster, controls: Controls) -> dict[str, str]:
    """Devices that are left out, and why."""
    if not controls.exclude:
        return {}
    from eth_cli.search.edits import excluded_by

    named = excluded_by(cluster, controls.exclude)
    return {device: f"excluded by --exclude {name}" for device, name in named.items()}


def _saying_why(
    answer: SearchReport | InfeasibleError, reasons: dict[str, str]
) -> SearchReport | InfeasibleError:
    return answer if isinstance(answer, InfeasibleError) else answer.saying(reasons)


# --- The search --------------------------------------------------------------------------------


def _searched(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    compare: bool,
    interruption: Interruption,
) -> Answers:
    """The plan of the strategy, or of all. Raises SearchStoppedError where there is none yet."""
    if compare:
        answers = compare_strategies(
            profile, cluster, options, clock=time.monotonic, is_stopped=interruption.is_stopped
        )
        if options.strategy not in answers:
            raise SearchStoppedError(f"interrupted before {options.strategy} had a plan")
        return answers
    try:
        report = search(
            profile, cluster, options, clock=time.monotonic, is_stopped=interruption.is_stopped
        )
    except InfeasibleError as error:
        return {options.strategy: error}
    return {options.strategy: report}


def _replanned(
    replanning: Replanning,
    profile: Profile,
    profile_path: Path | None,
    options: SearchOptions,
    interruption: Interruption,
) -> tuple[Answers, Replanned | None]:
    try:
        found = replanning.search(
            profile, profile_path, options, is_stopped=interruption.is_stopped
        )
    except InfeasibleError as error:
        return {options.strategy: error}, None
    return {options.strategy: found.report}, found


def _answered(
    questions: Questions,
    answer: SearchReport | InfeasibleError,
    profile: Profile,
    options: SearchOptions,
    interruption: Interruption,
) -> Answered | None:
    """Answers to what else is asked; None: Ctrl-C ended that."""
    interruption.is_patient = False
    try:
        return questions.answer(answer, profile, options)
    except KeyboardInterrupt:
        interruption.is_pressed = True
        return None


def _what_was_left(
    chosen: SearchReport,
    questions: Questions | None,
    answered: Answered | None,
    compare: bool,
    answers: Answers,
) -> str:
    """What Ctrl-C cut short, for people."""
    if questions is not None and answered is None and chosen.status == "optimal":
        return "interrupted: the plan is the best, what else was asked is not answered"
    text = f"interrupted: the plan is the best found so far ({chosen.status})"
    if compare and len(answers) < len(COMPARED):
        missing = [name for name in COMPARED if name not in answers]
        text += f"; not looked at: {', '.join(missing)}"
    return text


# --- What is shown -----------------------------------------------------------------------------


def _show(
    answers: Answers,
    plans: dict[str, Plan],
    cluster: Cluster,
    answered: Answered | None,
    replanned: tuple[Replanned, Path | None] | None,
    *,
    strategy: str,
    as_json: bool,
    compare: bool,
) -> None:
    if as_json:
        more = {} if answered is None else answered.data()
        if replanned is not None and replanned[0].moves is not None:
            from eth_cli.render.replan import moves_data

            more["moves"] = moves_data(replanned[0])
        _show_json(answers, plans, more, strategy=strategy, compare=compare)
        return
    from eth_cli.render.plan import comparison_table, plan_view, search_view

    if compare:
        print_result(comparison_table({n: answers[n] for n in COMPARED if n in answers}))
    answer = answers[strategy]
    if isinstance(answer, SearchReport):
        title = f"{answer.plan.model} on {cluster.name}, strategy {strategy}"
        print_result(*plan_view(answer.plan, answer.simulation, cluster, title=title))
        print_result(*search_view(answer))
    if replanned is not None and replanned[1] is not None:
        from eth_cli.render.replan import moves_view

        print_result(*moves_view(replanned[0], replanned[1]))
    if answered is not None:
        print_result(*answered.views())


def _show_json(
    answers: Answers,
    plans: dict[str, Plan],
    more: dict[str, Any],
    *,
    strategy: str,
    compare: bool,
) -> None:
    """The plan, or all of a comparison, and under keys of their own what else was asked."""
    found: dict[str, Any] = {
        name: serde.to_data(plans[name]) if name in plans else None for name in answers
    }
    data = found if compare else (found[strategy] or {})
    if data or more:
        print_json(serde.dump_json(data | more))
