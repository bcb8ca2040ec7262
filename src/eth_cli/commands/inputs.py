"""Rules between several input files, which no single file's reader can check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, Fault
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile


def check_fits(
    plan: Plan,
    plan_path: Path,
    *,
    cluster: Cluster | None = None,
    cluster_path: Path | None = None,
    profile: Profile | None = None,
    profile_path: Path | None = None,
) -> None:
    """Check that a plan, the cluster and the profile given with it belong together.

    Raises:
        ConfigError: the plan was made for another version of one of the files, names a device that
            the cluster lacks, or covers other blocks or another kind of training than the profile.
    """
    if cluster is not None:
        _check_digest(plan, plan_path, "cluster", cluster.digest(), cluster_path)
        plan.check_cluster(cluster, file=str(plan_path))
    if profile is not None:
        _check_digest(plan, plan_path, "profile", profile.digest(), profile_path)
        profile.check_plan(plan, file=str(plan_path), source=f"the profile {profile_path}")


def _check_digest(plan: Plan, plan_path: Path, what: str, digest: str, path: Path | None) -> None:
    planned = None if plan.provenance is None else plan.provenance.digests.get(what)
    if planned is not None and planned != digest:
        raise ConfigError.single(
            str(plan_path),
            f"provenance.digests.{what}",
            f"the plan was made for {planned}, but {path} now is {digest}; "
            "plan again, or delete provenance from the plan if the change does not matter",
        )


@contextmanager
def naming_file(name: str, path: Path | str) -> Iterator[None]:
    """Give faults of the pure planner, which knows no files, the path of the file they are in."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            Fault(
                file=str(path) if fault.file == name else fault.file,
                field=fault.field,
                message=fault.message,
            )
            for fault in error.faults
        ) from None
