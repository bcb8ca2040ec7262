"""`eth plan`: cluster + profile -> plan.json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.commands import arguments
from eth_cli.commands.controls import Controls
from eth_cli.commands.inputs import naming_file
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import Profile, read_profile
from eth_cli.render.console import print_json, print_note, print_result
from eth_cli.search.planner import SearchOptions, SearchReport, search, self_contained
from eth_cli.search.planner import compare as compare_strategies
from eth_cli.stdout import is_stdout

if TYPE_CHECKING:
    from eth_cli.commands.plan_questions import Answered

COMPARED = ("even", "uneven-layers", "hpp")
"""Strategies in the order in which a comparison shows them: each can do all that the last can."""

ESTIMATED_MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that a profile is estimated for when none is given."""


def run_plan_command(
    *,
    cluster_path: Path,
    profile_path: Path | None,
    model_source: str | None,
    seq_len: int | None,
    dtype: str | None,
    global_batch_size: int,
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
    """
    for option, path in (("--output", output), ("--frontier-svg", controls.frontier_svg)):
        if path is not None:
            arguments.output_file(option, path, inputs=(cluster_path, profile_path))
    _check_controls(controls, compare=compare, output=output)
    cluster = read_cluster(cluster_path)
    excluded = _excluded(cluster, controls)
    if controls.asks:
        from eth_cli.commands.plan_questions import Questions

        questions = Questions(controls, cluster, cluster_path, excluded)
    if profile_path is not None:
        _refuse_with_profile({"--model": model_source, "--seq-len": seq_len, "--dtype": dtype})
        profile = read_profile(profile_path)
    else:
        profile = _estimate(
            questions.largest_cluster() if controls.what_if else cluster,
            cluster_path,
            model_source=model_source,
            seq_len=seq_len,
            dtype=dtype,
            sizes=_sizes(global_batch_size, micro_batch_size),
        )
    _check_widths(controls, profile)
    options = SearchOptions(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        strategy=strategy,
        max_pipelines=controls.max_pipelines,
        tensor_parallel=controls.tensor_parallel,
        recompute=controls.recompute,
        excluded=frozenset(excluded),
        max_gap=controls.max_gap,
        time_limit_s=controls.time_limit_s,
    )
    answered: Answered | None = None
    with naming_file("profile", profile_path or f"--model {model_source}"):
        if controls.what_if:
            questions.check_profiled(profile)
        answers = (
            compare_strategies(profile, cluster, options, clock=time.monotonic)
            if compare
            else {strategy: _search(profile, cluster, options)}
        )
        if excluded:
            answers = {name: _saying_why(answer, excluded) for name, answer in answers.items()}
        if controls.asks:
            answered = questions.answer(answers[strategy], profile, options)
            answers[strategy] = answered.chosen
    plans = {
        name: self_contained(answer.plan, cluster, profile, profile.model.spec)
        for name, answer in answers.items()
        if isinstance(answer, SearchReport)
    }
    if profile_path is None:
        plans = {name: _without_profile_digest(plan) for name, plan in plans.items()}
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
            strategy=strategy,
            as_json=as_json,
            compare=compare,
        )
    chosen = answers[strategy]
    if isinstance(chosen, InfeasibleError):
        raise chosen
    if output is not None and is_shown and not as_json:
        print_note(f"wrote {output}")


def _check_controls(controls: Controls, *, compare: bool, output: Path | None) -> None:
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
    svg = controls.frontier_svg
    if svg is not None and output is not None and svg.absolute() == output.absolute():
        raise ConfigError.single(
            "--frontier-svg", "", f"{svg} is where the plan goes too; give another file"
        )


def _excluded(cluster: Cluster, controls: Controls) -> dict[str, str]:
    """Devices that are left out, and why."""
    if not controls.exclude:
        return {}
    from eth_cli.search.edits import excluded_by

    named = excluded_by(cluster, controls.exclude)
    return {device: f"excluded by --exclude {name}" for device, name in named.items()}


def _check_widths(controls: Controls, profile: Profile) -> None:
    """Raise ConfigError for a tensor-parallel width that the profile has on no type."""
    known = sorted({width for t in profile.device_types for width in profile.widths(t)})
    for width in controls.tensor_parallel or ():
        if width not in known:
            raise ConfigError.single(
                "--tensor-parallel",
                "",
                f"{width} is not in the profile, which has widths {', '.join(map(str, known))}; "
                "use one of those or profile it",
            )


def _saying_why(
    answer: SearchReport | InfeasibleError, reasons: dict[str, str]
) -> SearchReport | InfeasibleError:
    from eth_cli.search.replan import saying_why

    return answer if isinstance(answer, InfeasibleError) else saying_why(answer, reasons)


def _search(
    profile: Profile, cluster: Cluster, options: SearchOptions
) -> SearchReport | InfeasibleError:
    try:
        return search(profile, cluster, options, clock=time.monotonic)
    except InfeasibleError as error:
        return error


def _refuse_with_profile(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError.single(
                option, "", "is for planning without a profile; leave it or --profile out"
            )


def _estimate(
    cluster: Cluster,
    cluster_path: Path,
    *,
    model_source: str | None,
    seq_len: int | None,
    dtype: str | None,
    sizes: tuple[int, ...],
) -> Profile:
    """The analytic profile of a model, for planning without measurements."""
    from eth_cli.model_sources import load_model
    from eth_cli.profile.analytic import analytic_profile
    from eth_cli.render.progress import progress

    if model_source is None:
        raise ConfigError.single(
            "--profile", "", "is missing; give a profile, or --model and --seq-len to estimate one"
        )
    if seq_len is None:
        raise ConfigError.single("--seq-len", "", "is missing; --model needs it")
    spec = load_model(model_source)
    with (
        naming_file(f"cluster {cluster.name}", cluster_path),
        progress(f"estimating {spec.name}") as report,
    ):
        return analytic_profile(
            spec,
            cluster,
            seq_len=seq_len,
            dtype=dtype or "fp32",
            micro_batch_sizes=sizes,
            progress=report,
        )


def _without_profile_digest(plan: Plan) -> Plan:
    """The plan, for use with any profile of its model: nobody has a file of the estimate."""
    if plan.provenance is None:
        return plan
    digests = {k: v for k, v in plan.provenance.digests.items() if k != "profile"}
    return plan.model_copy(
        update={"provenance": plan.provenance.model_copy(update={"digests": digests})}
    )


def _sizes(global_batch_size: int, micro_batch_size: int | None) -> tuple[int, ...]:
    if micro_batch_size is not None:
        return (micro_batch_size,)
    return tuple(size for size in ESTIMATED_MICRO_BATCH_SIZES if size <= global_batch_size)


def _show(
    answers: dict[str, SearchReport | InfeasibleError],
    plans: dict[str, Plan],
    cluster: Cluster,
    answered: Answered | None,
    *,
    strategy: str,
    as_json: bool,
    compare: bool,
) -> None:
    if as_json:
        _show_json(answers, plans, answered, strategy=strategy, compare=compare)
        return
    from eth_cli.render.plan import comparison_table, plan_view, search_view

    if compare:
        print_result(comparison_table({name: answers[name] for name in COMPARED}))
    answer = answers[strategy]
    if isinstance(answer, SearchReport):
        title = f"{answer.plan.model} on {cluster.name}, strategy {strategy}"
        print_result(*plan_view(answer.plan, answer.simulation, cluster, title=title))
        print_result(*search_view(answer))
    if answered is not None:
        print_result(*answered.views())


def _show_json(
    answers: dict[str, SearchReport | InfeasibleError],
    plans: dict[str, Plan],
    answered: Answered | None,
    *,
    strategy: str,
    compare: bool,
) -> None:
    """The plan, or all of a comparison, and under keys of their own what else was asked."""
    more = {} if answered is None else answered.data()
    found: dict[str, Any] = {
        name: serde.to_data(plans[name]) if name in plans else None for name in answers
    }
    data = found if compare else (found[strategy] or {})
    if data or more:
        print_json(serde.dump_json(data | more))
