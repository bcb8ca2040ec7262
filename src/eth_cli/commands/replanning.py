"""`eth plan --from`, `--lost` and `--pin`: a plan made from an old one, or around pinned parts.

Loaded only where one of them is given, so that a plain plan does not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eth_cli.cluster import Cluster
from eth_cli.commands.controls import Controls
from eth_cli.commands.inputs import check_fits
from eth_cli.errors import ConfigError
from eth_cli.plan import Plan, read_plan
from eth_cli.profile.table import Profile
from eth_cli.search.edits import devices_named
from eth_cli.search.pins import Pin, parse_pins
from eth_cli.search.planner import SearchOptions
from eth_cli.search.replan import LOST, Replanned, replan

_WHOLE, _WHOLE_LIST, _NAMES, _FLAG = "a number", "numbers", "device ids", "true or false"


@dataclass(frozen=True, kw_only=True, slots=True)
class OldPlan:
    """The plan that ``--from`` names."""

    plan: Plan
    path: Path

    def asked(self, name: str, sort: str) -> Any:
        """What the old plan was asked for under a name; None: nothing, or nobody says.

        Raises:
            ConfigError: it is of another sort than a planner writes.
        """
        provenance = self.plan.provenance
        value = None if provenance is None else provenance.options.get(name)
        if value is None or _is_sort(value, sort):
            return value
        raise ConfigError.single(
            str(self.path),
            f"provenance.options.{name}",
            f"{str(value)[:60]!r} is not {sort}; delete it to plan without",
        )

    @property
    def left_out(self) -> dict[str, str]:
        """Devices that the old plan was to leave out, and why: they are left out again."""
        lost: list[str] = self.asked("lost", _NAMES) or []
        excluded: list[str] = self.asked("excluded", _NAMES) or []
        reasons = {u.device: u.reason for u in self.plan.unused_devices}
        found = {device: reasons.get(device, "excluded") for device in excluded}
        return found | dict.fromkeys(lost, LOST)

    def inherited(self, options: SearchOptions) -> SearchOptions:
        """The options, with what the old plan was asked for where nothing else is given."""
        size = self.asked("micro_batch_size", _WHOLE)
        most = self.asked("max_pipelines", _WHOLE)
        widths = self.asked("tensor_parallel", _WHOLE_LIST)
        recompute = self.asked("recompute", _FLAG)
        return replace(
            options,
            micro_batch_size=options.micro_batch_size or size,
            max_pipelines=options.max_pipelines or most,
            tensor_parallel=options.tensor_parallel or (tuple(widths) if widths else None),
            recompute=options.recompute and recompute is not False,
        )


def _is_sort(value: object, sort: str) -> bool:
    def is_number(v: object) -> bool:
        return isinstance(v, int) and not isinstance(v, bool) and v >= 1

    if sort == _FLAG:
        return isinstance(value, bool)
    if sort == _WHOLE:
        return is_number(value)
    check: Callable[[object], bool] = (
        is_number if sort == _WHOLE_LIST else lambda v: isinstance(v, str)
    )
    return isinstance(value, list | tuple) and bool(value) and all(map(check, value))


def read_old(path: Path) -> OldPlan:
    """The plan to start from.

    Raises:
        ConfigError: the file is no legal plan, or one that cannot be planned again.
    """
    plan = read_plan(path)
    if plan.sharded_optimizer:
        raise ConfigError.single(
            str(path),
            "sharded_optimizer",
            "is true; plans are made again without it only: set it to false to do that",
        )
    return OldPlan(plan=plan, path=path)


def check_alone(controls: Controls, *, compare: bool, strategy: str) -> None:
    """Raise ConfigError for options that do not go with ``--from`` or ``--pin``."""
    option = "--from" if controls.old_plan is not None else "--pin" if controls.pins else ""
    if controls.lost and controls.old_plan is None:
        raise ConfigError.single(
            "--lost", "", "needs --from: the plan that the devices are lost to"
        )
    if not option:
        return
    others = {
        "--strategy": strategy != "hpp",
        "--compare": compare,
        "--objective": controls.by_cost,
        "--frontier": controls.frontier,
        "--frontier-svg": controls.frontier_svg is not None,
        "--what-if": bool(controls.what_if),
        "--explain": controls.explain and bool(controls.pins),
    }
    for other, is_given in others.items():
        if is_given:
            why = "is answered by searches from nothing, which know of no"
            culprit = "--pin" if other == "--explain" else option
            raise ConfigError.single(other, "", f"{why} {culprit}; leave one of them out")


def lost_devices(cluster: Cluster, names: Collection[str]) -> tuple[str, ...]:
    """Ids of the devices that nodes and device ids stand for.

    Raises:
        ConfigError: the cluster has nothing of this name, or it is a type.
    """
    found: list[str] = []
    for name in names:
        devices = devices_named(cluster, name, option="--lost")
        if name not in cluster.devices and name not in cluster.nodes_by_name:
            raise ConfigError.single(
                "--lost",
                "",
                f"{name!r} is a type of device; nodes and devices are lost, such as {devices[0]}",
            )
        found += devices
    return tuple(dict.fromkeys(found))


class Replanning:
    """What ``--from``, ``--lost`` and ``--pin`` ask. Made before any search."""

    def __init__(
        self,
        controls: Controls,
        old: OldPlan | None,
        cluster: Cluster,
        cluster_path: Path | None,
    ) -> None:
        """
        Raises:
            ConfigError: a pin or a lost device is wrong, or the plan is of another cluster.
        """
        self.old = old
        self.cluster = cluster
        self.pins: tuple[Pin, ...] = parse_pins(controls.pins)
        self.lost = lost_devices(cluster, controls.lost)
        if old is not None:
            known = old.left_out
            self.lost += tuple(d for d, why in known.items() if why == LOST and d not in self.lost)
            check_fits(old.plan, old.path, cluster=cluster, cluster_path=cluster_path)

    def excluded(self, named: dict[str, str]) -> dict[str, str]:
        """Devices that are left out though they work, and why, those of the old plan included."""
        before = {} if self.old is None else self.old.left_out
        both = before | named
        return {d: why for d, why in both.items() if d not in self.lost}

    def search(
        self,
        profile: Profile,
        profile_path: Path | None,
        options: SearchOptions,
        *,
        is_stopped: Callable[[], bool],
    ) -> Replanned:
        """Make the plan.

        Raises:
            ConfigError: the old plan is of another profile, or as `replan`.
            InfeasibleError: as `replan`.
        """
        if self.old is not None:
            plan, path = self.old.plan, self.old.path
            if profile_path is not None:
                check_fits(plan, path, profile=profile, profile_path=profile_path)
            else:
                profile.check_plan(plan, file=str(path), source="the estimated profile")
        return replan(
            profile,
            self.cluster,
            options,
            None if self.old is None else self.old.plan,
            lost=self.lost,
            pins=self.pins,
            clock=time.monotonic,
            is_stopped=is_stopped,
        )
