"""`eth plan`: cluster + profile -> plan.json."""

from __future__ import annotations

import time
from pathlib import Path

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.commands import arguments
from eth_cli.commands.inputs import naming_file
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import Profile, read_profile
from eth_cli.render.console import print_json, print_note, print_result
from eth_cli.search.planner import SearchOptions, SearchReport, search, self_contained
from eth_cli.search.planner import compare as compare_strategies
from eth_cli.stdout import is_stdout

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
) -> None:
    """Search for a plan, write it and show it.

    Raises:
        ConfigError: an input is wrong.
        InfeasibleError: no plan of the strategy exists.
    """
    if output is not None:
        arguments.output_file("--output", output, inputs=(cluster_path, profile_path))
    cluster = read_cluster(cluster_path)
    if profile_path is not None:
        _refuse_with_profile({"--model": model_source, "--seq-len": seq_len, "--dtype": dtype})
        profile = read_profile(profile_path)
    else:
        profile = _estimate(
            cluster,
            cluster_path,
            model_source=model_source,
            seq_len=seq_len,
            dtype=dtype,
            sizes=_sizes(global_batch_size, micro_batch_size),
        )
    options = SearchOptions(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, strategy=strategy
    )
    with naming_file("profile", profile_path or f"--model {model_source}"):
        answers = (
            compare_strategies(profile, cluster, options, clock=time.monotonic)
            if compare
            else {strategy: _search(profile, cluster, options)}
        )
    plans = {
        name: self_contained(answer.plan, cluster, profile, profile.model.spec)
        for name, answer in answers.items()
        if isinstance(answer, SearchReport)
    }
    if profile_path is None:
        plans = {name: _without_profile_digest(plan) for name, plan in plans.items()}
    if output is not None and strategy in plans:
        write_plan(output, plans[strategy])
    is_shown = output is None or not is_stdout(output)
    if is_shown:
        _show(answers, plans, cluster, strategy=strategy, as_json=as_json, compare=compare)
    chosen = answers[strategy]
    if isinstance(chosen, InfeasibleError):
        raise chosen
    if output is not None and is_shown and not as_json:
        print_note(f"wrote {output}")


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
    *,
    strategy: str,
    as_json: bool,
    compare: bool,
) -> None:
    from eth_cli.render.plan import comparison_table, plan_view, search_view

    if as_json:
        data = {name: serde.to_data(plans[name]) if name in plans else None for name in answers}
        if compare or strategy in plans:
            print_json(serde.dump_json(data if compare else data[strategy]))
        return
    if compare:
        print_result(comparison_table({name: answers[name] for name in COMPARED}))
    answer = answers[strategy]
    if isinstance(answer, SearchReport):
        title = f"{answer.plan.model} on {cluster.name}, strategy {strategy}"
        print_result(*plan_view(answer.plan, answer.simulation, cluster, title=title))
        print_result(*search_view(answer))
