"""Every plan that could beat the best one known, tried: exact at small scale, counted, bounded.

Three levels, each pruned by lower bounds that hold for all that lies below it:

1. templates, built from their last stage: `max_s (before_s + m w_s)` with the fewest micro-batches
   m that the other devices, at their best, leave to this pipeline;
2. sets of templates and splits of the batch: the longest pipeline over the fastest links, the
   sync that cannot hide, the longest optimizer update;
3. placements that the model can tell apart: simulated.

The work is counted in candidates, not seconds. When the budget ends first, the answer stands but
is not proved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import sub

from eth_cli.search.assign import Column, columns
from eth_cli.search.bounds import best_capacity
from eth_cli.search.building import Builder, Load
from eth_cli.search.capacity import Families
from eth_cli.search.place import Share, placements
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.shares import splits
from eth_cli.search.syncbound import SyncBound
from eth_cli.search.templates import Counts, Problem, Template
from eth_cli.search.timeline import run_pipeline

ROUNDING = 1e-12
"""Relative: candidates whose bound is within rounding of the best known are not tried."""


_UNITS_OF_A_SET = 20
"""Cost of bounding the sync of a set of templates, in units of looking at one stage of one."""
_LOOK = 500
"""Units between two looks at the time."""
_UNITS_OF_A_SIMULATION = 30
"""Cost of simulating a plan, in the same units."""


class BudgetExhaustedError(Exception):
    """The search has looked at as many candidates as it may, or for as long."""


@dataclass(kw_only=True)
class Best:
    """The best plan so far, and what was left out on the way."""

    pipelines: tuple[PlacedPipeline, ...] | None = None
    time_s: float = float("inf")
    pruned: dict[str, int] = field(default_factory=dict)
    num_simulated: int = 0
    max_pipelines: int | None = None
    """Most pipelines that a plan may have; None: any number."""

    def offer(self, pipelines: tuple[PlacedPipeline, ...], time_s: float) -> bool:
        """Keep a plan if it is better and has no more pipelines than it may."""
        self.num_simulated += 1
        if self.max_pipelines is not None and len(pipelines) > self.max_pipelines:
            return False
        if time_s < self.time_s:
            self.pipelines, self.time_s = pipelines, time_s
            return True
        return False

    def prune(self, rule: str, number: int = 1) -> None:
        """Count candidates that a rule left out."""
        if number:
            self.pruned[rule] = self.pruned.get(rule, 0) + number

    @property
    def limit_s(self) -> float:
        """Only what is below this is better."""
        return self.time_s * (1 - ROUNDING)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A template that may take part in a plan of several pipelines."""

    template: Template
    counts: Counts
    max_micro_batches: int
    """Most that it finishes in time for a better plan, over the fastest links."""
    optimizer_s: float

    @property
    def column(self) -> Column:
        """The candidate as a column of the assignment."""
        return Column(self.counts, self.template.micro_batch_size, self.max_micro_batches)


class Exhaustive:
    """One exhaustive search. `run` may be called once."""

    def __init__(self, problem: Problem, families: Families, best: Best, *, budget: int) -> None:
        self.problem = problem
        self.families = families
        self.best = best
        self.budget = budget
        self._next_look = budget
        """Budget below which it is time to ask whether the time is over."""
        self._sync = SyncBound(problem)
        self._others: dict[Counts, int] = {}
        self.bounds = problem.pruning.bound
        """Whether what takes no less than the best plan is left out."""

    def run(self) -> bool:
        """Improve ``best`` to the optimum. Returns whether that is proved."""
        try:
            found = self._templates()
            self._combine(self._useful(found))
        except BudgetExhaustedError:
            return False
        return True

    def _spend(self, units: int = 1) -> None:
        self.budget -= units
        if self.budget < self._next_look:
            self._next_look = max(0, self.budget - _LOOK)
            if self.budget < 0 or self.problem.is_over():
                raise BudgetExhaustedError

    @property
    def limit_s(self) -> float:
        """What takes no less than this is not looked at [s]."""
        return self.best.limit_s if self.bounds else math.inf

    def _capacity(self, found: Sequence[Column]) -> dict[Counts, int]:
        """Samples that any devices left over can do at most, by their counts."""
        if self.problem.pruning.capacity:
            return best_capacity(found, self.problem.counts)
        # As if they could do the whole batch, how few they be.
        ranges = [range(n + 1) for n in self.problem.counts]
        return dict.fromkeys(itertools.product(*ranges), self.problem.global_batch_size)

    # --- Level 1: templates ------------------------------------------------------------------

    def _templates(self) -> list[_Candidate]:
        """Templates for plans of several pipelines; plans of one are simulated on the way."""
        problem = self.problem
        target_s = self.limit_s - problem.sync_floor_s
        cols, num_dominated = columns(self.families, target_s)
        self.best.prune("dominated", num_dominated)
        others = self._capacity(cols)
        found: list[_Candidate] = []
        for b in problem.micro_batch_sizes:
            for stages, loads in self._builder(b, others).run():
                template = Template(b, stages)
                self._try_single(template)
                candidate = self._candidate(template, loads, others)
                if candidate is not None:
                    found.append(candidate)
        return found

    def _builder(self, micro_batch_size: int, others: dict[Counts, int]) -> Builder:
        return Builder(
            self.problem,
            micro_batch_size,
            others,
            limit_s=lambda: self.limit_s,
            spend=self._spend,
            prune=self.best.prune,
        )

    def _try_single(self, template: Template) -> None:
        micro_batches, rest = divmod(self.problem.global_batch_size, template.micro_batch_size)
        if rest or micro_batches > self.problem.max_micro_batches(template):
            return
        least_s = self._time_s(template, micro_batches)
        if least_s + self.problem.optimizer_s(template) >= self.limit_s:
            self.best.prune("bound")
            return
        self._try([Share(template, micro_batches)])

    def _candidate(
        self, template: Template, loads: Sequence[Load], others: dict[Counts, int]
    ) -> _Candidate | None:
        problem = self.problem
        counts = template.counts(len(problem.kinds))
        left = _minus(problem.counts, counts)
        optimizer_s = problem.optimizer_s(template)
        target_s = self.limit_s - problem.sync_floor_s - optimizer_s
        needed = -((others[left] - problem.global_batch_size) // template.micro_batch_size)
        room = most = problem.max_micro_batches(template)
        if room == 0:
            return None  # No plan may have it.
        if math.isfinite(target_s):
            most = min(most, *(int((target_s - load.before_s) / load.work_s) for load in loads))
            while most >= max(needed, 1) and self._time_s(template, most) >= target_s:
                most -= 1
        if most < max(needed, 1):
            self.best.prune("capacity" if most >= 1 or room < needed else "bound")
            return None
        return _Candidate(
            template=template, counts=counts, max_micro_batches=most, optimizer_s=optimizer_s
        )

    def _time_s(self, template: Template, micro_batches: int) -> float:
        self._spend(len(template.stages) * micro_batches // 2)
        return self.problem.time_s(template, micro_batches)

    def _useful(self, found: list[_Candidate]) -> list[_Candidate]:
        """Those that some set of the others completes to a whole batch, until nothing changes."""
        problem = self.problem
        while True:
            self._others = self._capacity(_best_columns(found))
            kept = [
                c
                for c in found
                if c.column.max_samples + self._others[_minus(problem.counts, c.counts)]
                >= problem.global_batch_size
            ]
            self.best.prune("capacity", len(found) - len(kept))
            if len(kept) == len(found):
                return kept
            found = kept

    # --- Level 2: sets of templates and shares ---------------------------------------------------

    def _combine(self, found: Sequence[_Candidate]) -> None:
        by_counts: dict[Counts, list[_Candidate]] = {}
        for candidate in found:
            by_counts.setdefault(candidate.counts, []).append(candidate)
        for members in by_counts.values():
            members.sort(key=lambda c: (-c.column.max_samples, c.template))
        # Devices that finish most each come first: good plans early tighten the bound.
        groups = sorted(
            by_counts.items(), key=lambda g: (-g[1][0].column.max_samples / sum(g[0]), g[0])
        )
        self._descend(groups, 0, 0, [], self.problem.counts, 0)

    def _descend(
        self,
        groups: Sequence[tuple[Counts, list[_Candidate]]],
        group: int,
        member: int,
        chosen: list[_Candidate],
        left: Counts,
        samples: int,
    ) -> None:
        """Add a candidate from this one on, so that every set comes up in one order only."""
        if self.best.max_pipelines is not None and len(chosen) >= self.best.max_pipelines:
            return
        total = self.problem.global_batch_size
        for g in range(group, len(groups)):
            counts, members = groups[g]
            self._spend()
            rest = _minus(left, counts)
            if min(rest) < 0:
                continue
            least = total - samples - self._others[rest]
            first = member if g == group else 0
            for index in range(first, len(members)):
                candidate = members[index]
                if candidate.column.max_samples < least:
                    self.best.prune("capacity", len(members) - index)
                    break
                self._spend()
                now = samples + candidate.column.max_samples
                chosen.append(candidate)
                if len(chosen) > 1 and now >= total:
                    self._share_out(chosen)
                self._descend(groups, g, index, chosen, rest, now)
                chosen.pop()

    def _share_out(self, chosen: Sequence[_Candidate]) -> None:
        problem = self.problem
        self._spend(_UNITS_OF_A_SET)
        update_s = max(c.optimizer_s for c in chosen)
        exposed_s = self._sync.exposed_s([c.template for c in chosen])
        # The best may have improved since the candidates were made, and their sync is known now.
        limits = [self.limit_s - update_s - exposed for exposed in exposed_s]
        most = [self._most_within(c, limit) for c, limit in zip(chosen, limits, strict=True)]
        sizes = [c.template.micro_batch_size for c in chosen]
        capacity = sum(b * m for b, m in zip(sizes, most, strict=True))
        if 0 in most or capacity < problem.global_batch_size:
            self.best.prune("bound")
            return
        for split in splits(sizes, most, problem.global_batch_size):
            self._spend(10)
            shares = [Share(c.template, m) for c, m in zip(chosen, split, strict=True)]
            if problem.pruning.like_pipelines and any(
                a.template == b.template and a.micro_batches < b.micro_batches
                for a, b in itertools.pairwise(shares)
            ):
                self.best.prune("like-pipelines")  # the same split in another order
            elif self._sync.end_s(shares) + update_s >= self.limit_s:
                self.best.prune("bound")
            else:
                self._try(shares)

    def _most_within(self, candidate: _Candidate, limit_s: float) -> int:
        """Most micro-batches of a candidate that end before a limit."""
        most = candidate.max_micro_batches
        while most and self.problem.time_s(candidate.template, most) >= limit_s:
            most -= 1
        return most

    # --- Level 3: placements -----------------------------------------------------------------

    def _try(self, shares: Sequence[Share]) -> None:
        problem, model = self.problem, self.problem.model
        templates = [share.template for share in shares]
        exposed_s = self._sync.exposed_s(templates) if len(shares) > 1 else [0.0]
        update_s = max(problem.optimizer_s(t) for t in templates)

        def keep(i: int, pipeline: PlacedPipeline) -> bool:
            """Whether a pipeline on its devices still ends early enough for a better plan."""
            self._spend(3)
            if not self.bounds:
                return True
            end_s = run_pipeline(model.times(pipeline), pipeline.micro_batches).end_s
            if end_s + exposed_s[i] + update_s < self.best.limit_s:
                return True
            self.best.prune("bound")
            return False

        for pipelines in placements(
            shares,
            problem.kinds,
            model.cluster,
            keep=keep,
            excluded=problem.excluded,
            pruning=problem.pruning,
            prune=self.best.prune,
        ):
            self._spend(_UNITS_OF_A_SIMULATION)
            self.best.offer(pipelines, model.evaluate(pipelines).step_time_s)


def _minus(counts: Counts, used: Counts) -> Counts:
    return tuple(map(sub, counts, used))


def _best_columns(found: Sequence[_Candidate]) -> list[Column]:
    best: dict[Counts, Column] = {}
    for candidate in found:
        column = candidate.column
        known = best.get(column.vector)
        if known is None or known.max_samples < column.max_samples:
            best[column.vector] = column
    return list(best.values())
