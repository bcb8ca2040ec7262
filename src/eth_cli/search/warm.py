"""From an old plan's pipelines to a new plan: under a loss, other limits, or parts that are pinned.

Pipelines that lost nothing stay as they are; of the others the devices that are left are free.
Candidates are made in four ways, shared out anew and simulated:

1. the broken pipelines, cut anew over the devices that they have left, or left out;
2. the best mixes of templates for the free devices, beside the pipelines that stay;
3. the best mixes for all devices;
4. small changes to the best of these (`refine`).

Templates are those of `pool`; an integer programme mixes them (`master.rounded`), several times,
for what gradient sync will take is known only of whole plans. Of plans that take about the least
time, the one with the fewest bytes to move is taken.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eth_cli.cluster import Device
from eth_cli.search.bundles import Bundles
from eth_cli.search.heuristic import bundles_of, recut
from eth_cli.search.layouts import Bundle, Layouts
from eth_cli.search.master import Column, rounded, undominated
from eth_cli.search.moves import Holdings
from eth_cli.search.pins import Pinned
from eth_cli.search.place import Share, place
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.pool import Pool
from eth_cli.search.pricing import Resource
from eth_cli.search.ranked import SAME, Ranked
from eth_cli.search.refine import Pipelines, fits, refine
from eth_cli.search.settle import settle
from eth_cli.search.shares import Worker, level
from eth_cli.search.templates import Option, Problem, Template, TemplateStage
from eth_cli.search.timeline import Clock, PipelineTimes

_COLUMNS = 32
"""Columns that the integer programme chooses from."""
_SYNC_WEIGHTS = (0.0, 1.0)
"""How many times as long as on the best links alone gradient sync is taken to be, for a mix each:
from none at all to links that stages share. The higher, the fewer and the longer the pipelines."""
_SYNC_WEIGHTS_BESIDE = (0.0,)
"""The same beside pipelines that stay, which decide most of what sync takes."""
_ROUNDS = 2
"""Times that a mix is made for: the best plan's, and the one that the mix before would take."""
_ROUNDS_LAID_OUT = 2
"""The same by estimates of pipelines that are laid out together."""
_FEW_BROKEN = 3
"""Broken pipelines up to which every way to keep or leave out each of them is tried."""
_REFINED = 2
"""Plans that small changes start from."""
_REFINEMENT = 800
"""What each of them may spend (`refine`)."""
_MOST_SETTLED = 4
"""Plans of about the least time whose bytes to move are counted."""


class WarmStart:
    """The way from an old plan to a new one. `run` may be called once."""

    def __init__(
        self,
        problem: Problem,
        old: Sequence[PlacedPipeline],
        best: Ranked,
        *,
        holdings: Holdings,
        pinned: Sequence[Pinned] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            old: the old plan's pipelines, on devices of the cluster, but for pinned ones.
            pinned: pipelines that every plan has to have.
        """
        self.problem = problem
        self.best = best
        self.holdings = holdings
        self.pinned = tuple(pinned)
        self.is_over = is_over
        self.total = problem.global_batch_size
        self.kind_of = {kind.device_type: k for k, kind in enumerate(problem.kinds)}
        self.must = [p.pipeline for p in self.pinned]
        self.held = {d for p in self.must for s in p.stages for d in s.devices}
        self.kept: list[PlacedPipeline] = []
        """Pipelines of the old plan that can stay, but for their shares."""
        self.broken: list[PlacedPipeline] = []
        for pipeline in old:
            (self.kept if self._can_stay(pipeline) else self.broken).append(pipeline)
        self.pool = Pool(problem)
        self.speeds = [1 / problem.seconds_a_sample(k) for k in range(len(problem.kinds))]

    # --- The old pipelines ---------------------------------------------------------------------

    def _is_free(self, device: Device) -> bool:
        """Whether a device may be used, and is not part of a pinned pipeline."""
        is_usable = device.type in self.kind_of and device.id not in self.problem.excluded
        return is_usable and device not in self.held

    def _could_be(self, pipeline: PlacedPipeline) -> bool:
        """Whether a pipeline's like may be part of a plan, on some devices."""
        return (
            pipeline.micro_batch_size in self.problem.micro_batch_sizes
            and all(s.devices[0].type in self.kind_of for s in pipeline.stages)
            and all(o in self.problem.options for o in self._options(pipeline))
            and self.problem.max_micro_batches(self.template(pipeline)) > 0
        )

    def _can_stay(self, pipeline: PlacedPipeline) -> bool:
        """Whether a pipeline may be part of a plan as it is, with some number of micro-batches."""
        devices = [d for stage in pipeline.stages for d in stage.devices]
        return all(map(self._is_free, devices)) and self._could_be(pipeline)

    def _options(self, pipeline: PlacedPipeline) -> list[Option]:
        return [
            Option(self.kind_of[s.devices[0].type], len(s.devices), s.recompute)
            for s in pipeline.stages
        ]

    def template(self, pipeline: PlacedPipeline) -> Template:
        """A pipeline without its devices' identities."""
        return Template(
            pipeline.micro_batch_size,
            tuple(
                TemplateStage(o.kind, s.start, s.stop, *o[1:])
                for o, s in zip(self._options(pipeline), pipeline.stages, strict=True)
            ),
        )

    def _left(self, pipeline: PlacedPipeline) -> list[tuple[Option, tuple[Device, ...]]]:
        """What a broken pipeline has left: groups of usable devices, narrower where one is gone."""
        found = []
        for stage in pipeline.stages:
            devices = [d for d in stage.devices if self._is_free(d)]
            while devices:
                kind = self.kind_of[devices[0].type]
                widths = [
                    o for o in self.problem.options if o.kind == kind and o[1] <= len(devices)
                ]
                if not widths:
                    break
                # As wide as can be, and recomputing as it did where that is allowed.
                option = max(widths, key=lambda o: (o[1], o.recompute == stage.recompute))
                found.append((option, tuple(devices[: option.tensor_parallel])))
                del devices[: option.tensor_parallel]
        return found

    def _shortened(self, pipeline: PlacedPipeline) -> PlacedPipeline | None:
        """A broken pipeline cut anew over what it has left; None: nothing fits."""
        left = self._left(pipeline)[: self.problem.num_blocks]
        size = pipeline.micro_batch_size
        if not left or size not in self.problem.micro_batch_sizes:
            return None
        template = recut(self.problem, [option for option, _ in left], size)
        if template is None:
            return None
        return PlacedPipeline(
            size,
            1,
            tuple(
                PlacedStage(s.start, s.stop, devices, s.recompute)
                for s, (_, devices) in zip(template.stages, left, strict=True)
            ),
        )

    # --- Candidates ----------------------------------------------------------------------------

    def run(self) -> None:
        """Offer plans, and leave the one to take in ``best``."""
        shortened = [p for p in map(self._shortened, self.broken) if p is not None]
        if self.must:
            self._offer(self.must)
        twins = [self.template(p) for p in self.broken if self._could_be(p)]
        if twins and not self.is_over():
            # Where there are spare devices, the old plan goes on with them.
            self._place([*self.must, *self.kept], twins)
        for some in self._repairs(shortened):
            self._offer([*self.must, *self.kept, *some])
        if self.broken or self._has_free_devices() or self.best.pipelines is None:
            self._mix(shortened)
        for pipelines in self.best.fastest(_REFINED):
            if self.is_over():
                break
            refine(
                self.problem.model,
                pipelines,
                self.best,
                budget=_REFINEMENT,
                is_over=self.is_over,
                is_allowed=self._has_pinned,
            )
        self._take_least_moves()

    def _repairs(self, shortened: Sequence[PlacedPipeline]) -> Iterator[Sequence[PlacedPipeline]]:
        """Which of the shortened pipelines go on."""
        yield shortened
        if shortened:
            yield ()
        if len(shortened) <= _FEW_BROKEN:
            for number in range(1, len(shortened)):
                yield from itertools.combinations(shortened, number)

    def _mix(self, shortened: Sequence[PlacedPipeline]) -> None:
        """Offer mixes of templates: for what is free, then for all devices."""
        self.pool.fill(self._old_templates(shortened))
        for stay in dict.fromkeys((tuple(self.kept), ())):
            seen: set[tuple[Template, ...]] = set()
            for sync_weight in _SYNC_WEIGHTS_BESIDE if stay else _SYNC_WEIGHTS:
                self._offer_mixes(stay, sync_weight, seen)
            self._offer_laid_out([*self.must, *stay])

    def _offer_laid_out(self, beside: Sequence[PlacedPipeline]) -> None:
        """Offer the mix that does most by the estimates of `layouts`, laid out as they ask for."""
        available = self._available(beside)
        layouts = Layouts(self.problem)
        numbers = layouts.numbers_of_copies()
        found = [
            layouts.lay_out(Bundle(template, copies))
            for template, entry in self.pool.entries.items()
            if all(n <= available[r] for r, n in entry.uses)
            for copies in dict.fromkeys((numbers[0], numbers[-1]))
        ]
        bundles = Bundles()
        for laid_out in found:
            if laid_out is not None:
                bundles.add(laid_out)
        time_s = self._first_time_s()
        for _ in range(_ROUNDS_LAID_OUT):
            if self.is_over():
                return
            columns = bundles.columns(time_s)
            columns.sort(key=self._value, reverse=True)
            most = self.best.max_pipelines
            left = None if most is None else most - len(beside)
            chosen = rounded(columns[:_COLUMNS], available, 0, left)
            if not chosen:
                return
            chosen.sort(key=lambda p: p.bundle)
            self._place_as(beside, [p.bundle.template for p in chosen], bundles_of(chosen))
            does = sum(p.bundle.template.micro_batch_size * p.micro_batches(time_s) for p in chosen)
            does += sum(p.micro_batch_size * p.micro_batches for p in beside)
            if not does:
                return
            time_s *= self.total / does

    def _offer_mixes(
        self, stay: Pipelines, sync_weight: float, seen: set[tuple[Template, ...]]
    ) -> None:
        """Offer mixes beside some pipelines for the best time so far, then for what they take."""
        time_s = self._first_time_s()
        for _ in range(_ROUNDS):
            if self.is_over():
                return
            after_s = self._offer_mix(stay, time_s, seen, sync_weight)
            if after_s is None:
                return
            time_s = after_s

    def _first_time_s(self) -> float:
        """A time to make the first mix for: the best plan's, else one that all templates end in."""
        if math.isfinite(self.best.time_s):
            return self.best.time_s
        return max((e.slowest_s for e in self.pool.entries.values()), default=1.0)

    def _offer_mix(
        self,
        stay: Sequence[PlacedPipeline],
        time_s: float,
        seen: set[tuple[Template, ...]],
        sync_weight: float,
    ) -> float | None:
        """Offer the mix that does most beside some pipelines within a time.

        Returns:
            The time in which all of it would do the batch; None: there is nothing new.
        """
        beside = [*self.must, *stay]
        available = self._available(beside)
        columns = undominated(
            [
                e.column(time_s, sync_weight)
                for e in self.pool.entries.values()
                if all(n <= available[r] for r, n in e.uses)
            ]
        )
        columns.sort(key=self._value, reverse=True)
        most = self.best.max_pipelines
        left = None if most is None else most - len(beside)
        chosen = rounded(columns[:_COLUMNS], available, 0, left)
        if not chosen or tuple(sorted(chosen)) in seen:
            return None
        seen.add(tuple(sorted(chosen)))
        self._place(beside, chosen)
        templates = [*chosen, *map(self.template, beside)]
        does = sum(
            t.micro_batch_size * self.pool.entry(t).micro_batches(time_s, sync_weight)
            for t in templates
        )
        return time_s * self.total / does if does else None

    def _value(self, column: Column[Any]) -> float:
        """Samples for what a column takes, each device in proportion to its speed."""
        taken = sum(n * self.speeds[r[0]] for r, n in column.uses if r[1] == 1)
        return column.samples / taken

    def _has_free_devices(self) -> bool:
        """Whether the pipelines that stay leave a usable device."""
        used = {d for p in self.kept for s in p.stages for d in s.devices}
        devices = self.problem.model.cluster.devices.values()
        return any(self._is_free(d) and d not in used for d in devices)

    def _available(self, beside: Sequence[PlacedPipeline]) -> dict[Resource, int]:
        """Room for groups of each kind and width beside some pipelines."""
        left = [Counter(nodes) for nodes in self.problem.in_nodes]
        for pipeline in beside:
            for stage in pipeline.stages:
                for device in stage.devices:
                    left[self.kind_of[device.type]][device.node] -= 1
        return {
            (kind, width): sum(n // width for n in left[kind].values())
            for kind, width in self.problem.groups
        }

    def _place(self, beside: Sequence[PlacedPipeline], templates: Sequence[Template]) -> None:
        """Offer some pipelines and templates on the devices that are left, placed both ways."""
        for bundles in (None, [range(len(templates))]):
            self._place_as(beside, sorted(templates), bundles)

    def _place_as(
        self,
        beside: Sequence[PlacedPipeline],
        templates: Sequence[Template],
        bundles: Sequence[Sequence[int]] | None,
    ) -> None:
        """Offer some pipelines and templates on the devices that are left, in bundles."""
        held = {d.id for p in beside for s in p.stages for d in s.devices}
        placed = place(
            [Share(t, 1) for t in templates],
            self.problem.kinds,
            self.problem.model.cluster,
            bundles=bundles,
            excluded=self.problem.excluded | held,
        )
        if placed is not None:
            self._offer([*beside, *placed])

    def _offer(self, pipelines: Sequence[PlacedPipeline]) -> None:
        """Share the batch out over some pipelines and simulate."""
        shared = self._shared_out(pipelines)
        if shared is not None and fits(self.problem.model, shared):
            self.best.offer(shared, self.problem.model.evaluate(shared).step_time_s)

    def _shared_out(self, pipelines: Sequence[PlacedPipeline]) -> Pipelines | None:
        """The batch over pipelines with the shares that end soonest, pinned ones as they are."""
        fixed = {p.pipeline for p in self.pinned if p.share}
        total = self.total - sum(p[0] * p[1] for p in pipelines if p in fixed)
        rest = [p for p in pipelines if p not in fixed]
        clocks: dict[tuple[PipelineTimes, int, int], Worker] = {}
        workers = []
        for p in rest:
            most = self.problem.max_micro_batches(self.template(p))
            key = (self.problem.model.times(p), p.micro_batch_size, most)
            if key not in clocks:
                clocks[key] = Worker(p.micro_batch_size, most, Clock(key[0]))
            workers.append(clocks[key])
        if not rest:
            return tuple(pipelines) if pipelines and total == 0 else None
        split = level(workers, total)
        if split is None:
            return None
        found = iter(split)
        return tuple(p if p in fixed else p._replace(micro_batches=next(found)) for p in pipelines)

    def _has_pinned(self, pipelines: Sequence[PlacedPipeline]) -> bool:
        return all(pin.is_in(pipelines) for pin in self.pinned)

    def _old_templates(self, shortened: Sequence[PlacedPipeline]) -> Counter[Template]:
        """Templates of the old plan, broken pipelines and what is left of them included, as far as
        they may be part of a plan."""
        was = [p for p in self.broken if self._could_be(p)]
        return Counter(map(self.template, (*self.kept, *self.must, *was, *shortened)))

    # --- The one to take -----------------------------------------------------------------------

    def _take_least_moves(self) -> None:
        """Leave in ``best`` the plan, of those that take about as long, with the least to move."""
        found: list[tuple[int, float, Pipelines]] = []
        model = self.problem.model
        for pipelines in self.best.fastest(_MOST_SETTLED):
            fixed = [i for i, p in enumerate(pipelines) if self._is_pinned(p)]
            settled = settle(
                pipelines,
                model.cluster,
                self.holdings,
                excluded=self.problem.excluded,
                fixed=fixed,
            )
            time_s = model.evaluate(settled).step_time_s
            found.append((self.holdings.moved_bytes(settled), time_s, settled))
        fastest_s = min((time_s for _, time_s, _ in found), default=math.inf)
        near = [entry for entry in found if entry[1] <= fastest_s * SAME]
        if near:
            _, self.best.time_s, self.best.pipelines = min(near, key=lambda entry: entry[:2])

    def _is_pinned(self, pipeline: PlacedPipeline) -> bool:
        return any(pin.is_in([pipeline]) for pin in self.pinned)
