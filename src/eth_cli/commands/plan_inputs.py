"""What `eth plan` plans for: the cluster, the profile or an estimate of one, the batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.commands.controls import Controls
from eth_cli.commands.inputs import naming_file
from eth_cli.errors import ConfigError
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile, read_profile

if TYPE_CHECKING:
    from eth_cli.commands.replanning import OldPlan

ESTIMATED_MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that a profile is estimated for when none is given."""


def the_cluster(path: Path | None, old: OldPlan | None) -> Cluster:
    """The cluster of the file, or that of the plan to start from. Raises ConfigError."""
    if path is not None:
        return read_cluster(path)
    if old is None:
        raise ConfigError.single("--cluster", "", "is missing; give the cluster file")
    if old.plan.cluster is None:
        raise ConfigError.single(
            "--cluster", "", f"is missing, and {old.path} has no cluster of its own; give the file"
        )
    return old.plan.cluster


def the_batch(asked: int | None, old: OldPlan | None) -> int:
    """Samples in a step. Raises ConfigError."""
    if asked is not None:
        return asked
    if old is None:
        raise ConfigError.single(
            "--global-batch-size", "", "is missing; give the samples in one optimizer step"
        )
    return old.plan.global_batch_size


def the_profile(
    path: Path | None,
    *,
    cluster: Cluster,
    cluster_path: Path | None,
    model_source: str | None,
    seq_len: int | None,
    dtype: str | None,
    sizes: tuple[int, ...],
    old: OldPlan | None,
) -> Profile:
    """The profile of the file; or an estimate, of a model or of that of the plan to start from.

    Raises:
        ConfigError: there is neither, or both.
    """
    if path is not None:
        _refuse_with_profile({"--model": model_source, "--seq-len": seq_len, "--dtype": dtype})
        return read_profile(path)
    if model_source is None and old is not None:
        spec, seq_len, dtype = _estimated_for(old)
    else:
        from eth_cli.model_sources import load_model

        if model_source is None:
            raise ConfigError.single(
                "--profile",
                "",
                "is missing; give a profile, or --model and --seq-len to estimate one",
            )
        if seq_len is None:
            raise ConfigError.single("--seq-len", "", "is missing; --model needs it")
        spec = load_model(model_source)
    return _estimate(spec, cluster, cluster_path, seq_len=seq_len, dtype=dtype, sizes=sizes)


def _estimated_for(old: OldPlan) -> tuple[ModelSpec, int, str]:
    """Model, sequence length and dtype of a plan that was itself made from an estimate."""
    plan = old.plan
    if plan.provenance is not None and "profile" in plan.provenance.digests:
        raise ConfigError.single(
            "--profile", "", f"is missing; {old.path} was made from a profile, so give that one"
        )
    if plan.model_spec is None:
        raise ConfigError.single(
            "--profile", "", f"is missing, and {old.path} does not hold its model; give a profile"
        )
    return plan.model_spec, plan.seq_len, plan.dtype


def _estimate(
    spec: ModelSpec,
    cluster: Cluster,
    cluster_path: Path | None,
    *,
    seq_len: int,
    dtype: str | None,
    sizes: tuple[int, ...],
) -> Profile:
    """The analytic profile of a model, for planning without measurements."""
    from eth_cli.profile.analytic import analytic_profile
    from eth_cli.render.progress import progress

    name = f"cluster {cluster.name}"
    with naming_file(name, cluster_path or name), progress(f"estimating {spec.name}") as report:
        return analytic_profile(
            spec,
            cluster,
            seq_len=seq_len,
            dtype=dtype or "fp32",
            micro_batch_sizes=sizes,
            progress=report,
        )


def estimated_sizes(global_batch_size: int, micro_batch_size: int | None) -> tuple[int, ...]:
    """Micro-batch sizes to estimate a profile for."""
    if micro_batch_size is not None:
        return (micro_batch_size,)
    return tuple(size for size in ESTIMATED_MICRO_BATCH_SIZES if size <= global_batch_size)


def _refuse_with_profile(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError.single(
                option, "", "is for planning without a profile; leave it or --profile out"
            )


def check_widths(controls: Controls, profile: Profile) -> None:
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


def without_profile_digest(plan: Plan) -> Plan:
    """The plan, for use with any profile of its model: nobody has a file of the estimate."""
    if plan.provenance is None:
        return plan
    digests = {k: v for k, v in plan.provenance.digests.items() if k != "profile"}
    return plan.model_copy(
        update={"provenance": plan.provenance.model_copy(update={"digests": digests})}
    )
