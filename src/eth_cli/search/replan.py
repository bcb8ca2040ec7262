"""Planning again from an old plan: `replan`, and what has to move.

For devices that are lost, other limits, another batch, or parts of the plan that are pinned. What
`planner.search` finds from nothing is made here from what there is (`warm`), in a fraction of the
time; a fresh search is the last resort where nothing of the old plan helps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from eth_cli.cluster import Cluster
from eth_cli.errors import EthError, InfeasibleError, SearchStoppedError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.moves import Holdings, Moves
from eth_cli.search.pins import Pin, Pinned, resolve_pins
from eth_cli.search.placed import PlacedPipeline, from_plan
from eth_cli.search.planner import Search, SearchOptions, SearchReport
from eth_cli.search.ranked import Ranked
from eth_cli.search.spaces import all_families
from eth_cli.search.unused import unused_types
from eth_cli.search.warm import WarmStart

LOST = "lost"
"""Why a device that is gone is unused."""

_FAMILY_OPERATIONS = 2e6
"""Size of the family programme up to which its bound is worth its time when planning again."""
_NO_PLACE = (
    "has no place in the plans that were tried; a search without --from and --pin may find one"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanned:
    """A plan made from an old one, and what has to move for it."""

    report: SearchReport
    moves: Moves | None
    """None: there is no old plan."""
    is_fresh: bool
    """Whether nothing of the old plan helped, so that the plan is that of a search from nothing."""


def replan(
    profile: Profile,
    cluster: Cluster,
    options: SearchOptions,
    old: Plan | None,
    *,
    lost: Collection[str] = (),
    pins: Sequence[Pin] = (),
    clock: Callable[[], float] | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> Replanned:
    """The best plan that can be made from an old one in a short time.

    Args:
        old: a plan of this cluster and profile (`simulate.check_plan`); None: there is none, and
            pipelines for the devices that no pin names are searched for from nothing.
        lost: ids of devices whose memory is gone; no plan uses them, nor ``options.excluded``.
        pins: parts of the plan that it has to have.
        clock: seconds since any moment, as for `planner.search`.
        is_stopped: asked now and then; once it says yes, the search ends with what it has.

    Raises:
        ConfigError: as `planner.search` and `pins.resolve_pins`.
        InfeasibleError: no device is left, or no plan was found that fits.
        SearchStoppedError: as `planner.search`.
    """
    gone = frozenset(lost)
    asked = options.with_excluded(gone)
    if len(asked.excluded) == len(cluster.devices):
        raise _nothing_left(cluster, gone)
    search = Search(profile, cluster, asked, clock, is_stopped)
    if not search.problem.kinds:
        raise search.infeasible(is_proved=True)
    pipelines = () if old is None else from_plan(old, cluster)
    pinned = resolve_pins(pins, search.problem, None if old is None else pipelines)
    start = _without(search, pinned) if old is None else pipelines
    must = [pipelines[pin.index] for pin in pins] if old is not None else []
    holdings = Holdings(
        profile,
        pipelines,
        gone=gone,
        widths={o.tensor_parallel for o in search.problem.options},
    )
    report = _from_old(search, [p for p in start if p not in must], holdings, pinned)
    is_fresh = report is None
    if report is None:
        if pinned:
            raise _pins_do_not_fit(search)
        report = search.run()
    report = report.saying(dict.fromkeys(gone, LOST), {"lost": sorted(gone)} if gone else {})
    return Replanned(
        report=report,
        moves=None if old is None else holdings.moves(from_plan(report.plan, cluster)),
        is_fresh=is_fresh,
    )


def _without(search: Search, pinned: Sequence[Pinned]) -> tuple[PlacedPipeline, ...]:
    """Pipelines for the devices that no pin names, found from nothing; none where none fit."""
    named = {d.id for p in pinned for stage in p.pipeline.stages for d in stage.devices}
    limits = search.options.with_excluded(named)
    if len(limits.excluded) == len(search.cluster.devices):
        return ()
    others = Search(search.profile, search.cluster, limits, search.clock, is_stopped=search.is_over)
    try:
        return from_plan(others.run().plan, search.cluster)
    except (InfeasibleError, SearchStoppedError):
        return ()


def _from_old(
    search: Search,
    old: Sequence[PlacedPipeline],
    holdings: Holdings,
    pinned: Sequence[Pinned],
) -> SearchReport | None:
    """The best plan made from the old one; None: none fits."""
    problem, limits = search.problem, search.options
    best = Ranked(max_pipelines=limits.max_pipelines)
    bound_s = all_families(problem, max_operations=_FAMILY_OPERATIONS).bound_s
    WarmStart(
        problem,
        old,
        best,
        holdings=holdings,
        pinned=pinned,
        is_over=lambda: search.is_enough(best, bound_s),
    ).run()
    if best.pipelines is None:
        return None
    if not all(pin.is_in(best.pipelines) for pin in pinned):
        raise RuntimeError("the plan lacks a pipeline that is pinned")
    reasons = dict.fromkeys(unused_types(problem, best.pipelines), _NO_PLACE)
    return search.report(best, bound_s, reasons, ())


def _nothing_left(cluster: Cluster, gone: Collection[str]) -> InfeasibleError:
    number = len(cluster.devices)
    others = number - len(gone)
    binding = f"no device of cluster {cluster.name} is left: {len(gone)} of {number} are lost"
    if others:
        binding += f" and the other {others} are excluded"
    return InfeasibleError(
        f"no plan exists: {binding}", binding=binding, suggestion="give it devices that work"
    )


def _pins_do_not_fit(search: Search) -> EthError:
    if search.is_stopped():
        return SearchStoppedError("interrupted before any plan was found")
    binding = "with what is pinned no plan was found that fits in memory and does the whole batch"
    return InfeasibleError(binding, binding=binding, suggestion="pin less")
