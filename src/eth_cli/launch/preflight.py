"""Everything that can be known to go wrong before a worker is started, all of it at once.

What the runtime cannot execute yet is listed in `launch.limits`, faults of the data are found by
`launch.data`; here they come together with what only a run asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eth_cli import units
from eth_cli.errors import ConfigError, Fault
from eth_cli.launch import checkpoints, limits
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.data.opening import open_data
from eth_cli.launch.dataset import TokenSource
from eth_cli.launch.runtime.pacing import missing_paces
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan


def check_runnable(plan: Plan, *, file: str = "plan.json") -> ModelSpec:
    """The model of a plan that can be executed.

    Raises:
        ConfigError: with everything that stands against it.
    """
    faults = [
        *limits.unsupported(plan, file=file),
        *_model_faults(plan, file),
        *_pacing_faults(plan, file),
        *_memory_faults(plan, file),
    ]
    if faults or plan.model_spec is None:
        raise ConfigError(faults)
    return plan.model_spec


def _model_faults(plan: Plan, file: str) -> Iterator[Fault]:
    spec = plan.model_spec
    if spec is None:
        yield Fault(
            file=file,
            field="model_spec",
            message=f"is missing, so nobody knows what {plan.model!r} is made of; "
            "give the model with --model",
        )
    elif spec.family == "gpt" and plan.seq_len > spec.max_positions:
        yield Fault(
            file=file,
            field="seq_len",
            message=f"is {plan.seq_len}, but {spec.name} has learned positions for "
            f"{spec.max_positions} tokens only; profile and plan with a smaller --seq-len",
        )


def _pacing_faults(plan: Plan, file: str) -> Iterator[Fault]:
    cluster = plan.cluster
    if cluster is None:
        return
    emulated = sorted(
        {
            cluster.devices[place.device].type
            for place in plan.ranks
            if cluster.type_of(place.device).emulated
        }
    )
    if emulated and plan.pacing is None:
        yield Fault(
            file=file,
            field="pacing",
            message=f"is missing, but {', '.join(emulated)} is emulated and needs times to keep "
            "to; give --profile and --cluster",
        )
    if plan.pacing is None:
        return
    for pipeline, stage, missing in missing_paces(plan):
        yield Fault(
            file=file,
            field="pacing",
            message=f"pipelines[{pipeline}].stages[{stage}] has {missing}; "
            "give --profile and --cluster with it",
        )


def _memory_faults(plan: Plan, file: str) -> Iterator[Fault]:
    for i, memory in enumerate([] if plan.predicted is None else plan.predicted.memory):
        if memory.bytes > memory.capacity_bytes:
            yield Fault(
                file=file,
                field=f"predicted.memory[{i}]",
                message=f"{memory.device} needs {units.format_bytes(memory.bytes)}, but has "
                f"{units.format_bytes(memory.capacity_bytes)}; give it fewer blocks, a smaller "
                "micro-batch or recompute, or plan again",
            )


def check_data(options: RunOptions, plan: Plan, spec: ModelSpec) -> TokenSource:
    """The data to train on. Raises ConfigError where something is wrong with them."""
    return open_data(options.data, seq_len=plan.seq_len, vocab_size=spec.vocab_size).train


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run goes on from."""

    step: int = 0
    """0 for a new run."""
    warnings: tuple[str, ...] = ()
    """What a person should know of it, a line each."""


def check_folder(
    folder: RunFolder, plan: Plan, spec: ModelSpec, options: RunOptions, source: TokenSource
) -> Start:
    """Where to go on from in a run folder. Creates nothing.

    Raises:
        ConfigError: a new run would mix with what is there, or there is nothing to go on from.
    """
    root = folder.root
    if root.exists() and not root.is_dir():
        raise ConfigError.single(str(root), "", "is a file; give a folder for the run")
    if options.resume:
        return _resumed(folder, plan, spec, options, source)
    if root.exists() and any(root.iterdir()):
        has_checkpoint = any(folder.checkpoints.glob("step-*"))
        hint = "go on with the run in it by --resume, or " if has_checkpoint else ""
        raise ConfigError.single(str(root), "", f"is not empty; {hint}give another folder")
    return Start()


def _resumed(
    folder: RunFolder, plan: Plan, spec: ModelSpec, options: RunOptions, source: TokenSource
) -> Start:
    found = checkpoints.find_intact(folder)
    info = found.info
    if info is None:
        what = "complete checkpoint to resume from"
        if found.damaged:
            what = f"intact checkpoint to resume from: {'; '.join(map(str, found.damaged))}"
        raise ConfigError.single(
            str(folder.checkpoints), "", f"holds no {what}; run without --resume in a new folder"
        )
    checkpoints.check_resumable(
        info,
        plan=plan,
        spec=spec,
        options=options,
        data_digest=source.digest,
        folder=folder,
    )
    warnings = [
        f"{fault}; this checkpoint is damaged, so the run goes on from "
        f"{folder.checkpoint_of(info.step).name}"
        for fault in found.damaged
    ]
    if info.planned_steps != options.steps:
        warnings.append(
            f"{folder.checkpoint_of(info.step).name} was trained with learning rates for "
            f"{info.planned_steps} steps, and those from here on are for {options.steps} steps; "
            f"losses differ from those of one run of {options.steps} steps"
        )
    return Start(step=info.step, warnings=tuple(warnings))
