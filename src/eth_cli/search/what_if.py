"""What a step would take with more devices, or with fewer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.faults import some_of
from eth_cli.profile.table import Profile
from eth_cli.search.again import Progress, SearchAgain
from eth_cli.search.answer import SearchReport
from eth_cli.search.economics import Cost, cost_of
from eth_cli.search.edits import WHAT_IF, Change, Variant, apply_changes

Changes = tuple[Change, ...]
"""Changes that are made together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A changed cluster beside the one given."""

    changes: Changes
    num_devices: int
    """Devices that may be used after the changes."""
    report: SearchReport | None
    """The plan after the changes; None: there is none."""
    why_none: str
    """Why there is none, else empty."""
    now_s: float | None
    """Step time of the plan without the changes; None: there is none [s]."""
    then_s: float | None
    """Step time after them, the better of the new plan and, where nothing was lost, the old [s]."""
    cost_now: Cost | None
    cost_then: Cost | None
    """Costs; None: a device that the plan uses has no price, or there is no plan."""

    @property
    def speed_up(self) -> float | None:
        """Step time now / then; None: there is no plan now, or none then."""
        if self.now_s is None or self.then_s is None:
            return None
        return self.now_s / self.then_s


def variants(
    cluster: Cluster, asked: Sequence[Changes], excluded: Collection[str]
) -> tuple[Variant, ...]:
    """The cluster after each of the changes asked. Raises ConfigError as `edits` says."""
    return tuple(apply_changes(cluster, changes, excluded) for changes in asked)


def check_profiled(profile: Profile, made: Sequence[Variant]) -> None:
    """Raise ConfigError where a device that was added has no entry in the profile."""
    types = {d.type for v in made for d in v.cluster.devices.values() if d.id not in v.excluded}
    added = {t for v in made for t in v.cluster.device_types if t in types}
    missing = sorted(added - set(profile.device_types))
    if missing:
        raise ConfigError.single(
            WHAT_IF,
            "",
            f"the profile has no {some_of(missing)}, only {some_of(profile.device_types)}; profile "
            "the type, or plan with --model in place of --profile, which estimates it",
        )


def outcomes(
    now: SearchReport | None,
    replanner: SearchAgain,
    asked: Sequence[Changes],
    made: Sequence[Variant],
    *,
    progress: Progress | None = None,
) -> tuple[Outcome, ...]:
    """What each change does to the step time, by a search for each.

    Args:
        now: the plan without the changes; None: there is none.
    """
    found = []
    for done, (changes, variant) in enumerate(zip(asked, made, strict=True)):
        if progress is not None:
            progress(done, len(made), ",".join(map(str, changes)))
        found.append(_outcome(now, replanner, changes, variant))
    return tuple(found)


def _outcome(
    now: SearchReport | None, replanner: SearchAgain, changes: Changes, variant: Variant
) -> Outcome:
    answer = replanner.on(variant.cluster, excluded=variant.excluded)
    report = None if isinstance(answer, InfeasibleError) else answer
    if now is not None and _stays(now, variant, report):
        report = now
    return Outcome(
        changes=changes,
        num_devices=len(variant.cluster.devices) - len(variant.excluded),
        report=report,
        why_none=answer.binding if report is None and isinstance(answer, InfeasibleError) else "",
        now_s=None if now is None else now.step_time_s,
        then_s=None if report is None else report.step_time_s,
        cost_now=_cost(replanner.cluster, now),
        cost_then=_cost(variant.cluster, report),
    )


def _stays(now: SearchReport, variant: Variant, report: SearchReport | None) -> bool:
    """Whether the plan that there is can still be run, and is better than the new one."""
    used = {place.device for place in now.plan.ranks}
    if used & variant.excluded:
        return False
    return report is None or report.step_time_s > now.step_time_s


def _cost(cluster: Cluster, report: SearchReport | None) -> Cost | None:
    return None if report is None else cost_of(cluster, report.plan, report.step_time_s)
