"""`eth run`: plan.json -> a run folder."""

from __future__ import annotations

from pathlib import Path

from eth_cli.cluster_file import read_cluster
from eth_cli.commands.inputs import check_fits, naming_file
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.launch.config import DataOptions, RunOptions
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan, read_plan
from eth_cli.profile.table import Profile, read_profile


def run_training(
    *,
    plan_path: Path,
    cluster_path: Path | None,
    profile_path: Path | None,
    model_source: str | None,
    out: Path,
    data: DataOptions,
    steps: int,
    seed: int,
    learning_rate: float,
    warmup_steps: int,
    clip: float,
    checkpoint_every: int,
    keep: int | None,
    grad_sync: str,
    bucket_bytes: int,
    reduce_dtype: str,
    shard_optimizer: bool,
    loss_chunk: int,
    resume: bool,
    rehearse: bool,
    backend: str,
    dry_run: bool,
) -> None:
    """Train by a plan, or (``dry_run``) show what would be started.

    Raises:
        ConfigError: an input is wrong, or asks for what is not implemented yet.
        InfeasibleError: a stage needs more memory than its device has.
        LaunchError: the run failed.
        RunStoppedError: a signal ended it before its last step.
    """
    from eth_cli.launch.interrupts import RunStoppedError
    from eth_cli.launch.run import dry_run as describe_run
    from eth_cli.launch.run import run_plan
    from eth_cli.render.console import print_json, print_note, print_result
    from eth_cli.render.training import run_summary, show_notice, training_progress

    if rehearse:
        raise ConfigError.single(
            "--rehearse",
            "",
            "is not implemented yet; mark the device types as emulated: true in the cluster file "
            "to run with paced CPU processes on this machine",
        )
    plan, profile = complete_plan(
        plan_path, cluster_path=cluster_path, profile_path=profile_path, model_source=model_source
    )
    if shard_optimizer:
        plan = plan.model_copy(update={"sharded_optimizer": True})
    options = RunOptions(
        data=data,
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        clip=clip,
        checkpoint_every=checkpoint_every,
        keep=keep,
        grad_sync=grad_sync,  # type: ignore[arg-type] # one of the choices
        bucket_bytes=bucket_bytes,
        reduce_dtype=reduce_dtype,  # type: ignore[arg-type] # one of the choices
        loss_chunk=loss_chunk,
        resume=resume,
    )
    # Preflight checks speak of the copy that a run folder gets; a person has another file in mind.
    with naming_file("plan.json", plan_path):
        if dry_run:
            print_json(describe_run(plan, options, out, backend=backend))
            return
        with training_progress(steps) as on_progress:
            result = run_plan(
                plan,
                options,
                out,
                backend=backend,
                on_progress=on_progress,
                on_notice=show_notice,
                profile=profile,
            )
    print_result(run_summary(plan, result))
    print_note(f"run folder: {out}; see `eth report {out}`")
    if result.stopped_by is not None:
        raise RunStoppedError(
            f"stopped after step {result.steps} of {steps}, with a checkpoint; go on with --resume",
            by=result.stopped_by,
        )


def complete_plan(
    plan_path: Path,
    *,
    cluster_path: Path | None,
    profile_path: Path | None,
    model_source: str | None,
) -> tuple[Plan, Profile | None]:
    """A plan with all that a run needs, from the files given where the plan itself lacks it.

    With a profile, its prediction is that of the plan as it is now, which may have been edited.

    Raises:
        ConfigError: a file is wrong, does not belong to the plan, or something is missing.
        InfeasibleError: by the profile given, a stage does not fit its device.
    """
    from eth_cli.model_sources import load_model
    from eth_cli.search.planner import self_contained
    from eth_cli.search.simulate import simulate

    plan = read_plan(plan_path)
    cluster = None if cluster_path is None else read_cluster(cluster_path)
    profile = None if profile_path is None else read_profile(profile_path)
    spec = None if model_source is None else load_model(model_source)
    check_fits(
        plan,
        plan_path,
        cluster=cluster,
        cluster_path=cluster_path,
        profile=profile,
        profile_path=profile_path,
    )
    cluster = cluster or plan.cluster
    if spec is not None:
        _check_same_model(spec, plan.model_spec, file=str(plan_path), field="model_spec")
        if profile is not None:
            _check_same_model(spec, profile.model.spec, file=str(profile_path), field="model.spec")
    spec = plan.model_spec or spec or (None if profile is None else profile.model.spec)
    if spec is not None:
        plan.check_num_blocks(spec.num_blocks, file=str(plan_path), source=f"the model {spec.name}")
        if plan.model_spec is None and plan.model != spec.name:
            # What is kept of a run names what was trained, whatever the plan was written for.
            plan = plan.model_copy(update={"model": spec.name})
            if profile is not None:
                renamed = profile.model.model_copy(update={"name": spec.name})
                profile = profile.model_copy(update={"model": renamed})
    if cluster is None:
        raise ConfigError.single(
            str(plan_path), "cluster", "is missing; give the cluster file with --cluster"
        )
    if profile is None:
        return plan.model_copy(update={"cluster": cluster, "model_spec": spec}), None
    with naming_file("plan", plan_path), naming_file("profile", str(profile_path)):
        simulation = simulate(plan, profile, cluster)
    if simulation.excesses:
        raise InfeasibleError(
            f"{plan_path}: {simulation.excesses[0]}",
            binding=str(simulation.excesses[0]),
            suggestion="give that stage fewer blocks or a smaller micro-batch, or plan again",
        )
    plan = plan.model_copy(update={"predicted": simulation.prediction()})
    return self_contained(plan, cluster, profile, spec), profile


def _check_same_model(given: ModelSpec, own: ModelSpec | None, *, file: str, field: str) -> None:
    """Refuse a --model that is not the one a file was made for, if it says so; names may differ."""
    if own is None or given.model_copy(update={"name": own.name}) == own:
        return
    names = f"{own.name}, but --model gives {given.name}"
    if given.name == own.name:
        names = f"another {own.name} than the one that --model gives"
    raise ConfigError.single(
        file, field, f"is {names}; leave --model out, or profile and plan for {given.name}"
    )
