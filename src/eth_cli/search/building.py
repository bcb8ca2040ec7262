"""Templates that might take part in a better plan, built stage by stage from their last one.

Level 1 of `exhaust`. Each stage that is put in front is held against the rules of `pruning`, so
that what cannot help is left out with all that would be built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from eth_cli.search.templates import Counts, Problem, TemplateStage


class Load(NamedTuple):
    """One stage of a template as its time bound sees it: ``before_s + m work_s`` at least."""

    before_s: float
    """Forward and backward of the stages in front, transfers included."""
    work_s: float
    update_s: float
    """Its optimizer update."""


class Builder:
    """All templates of one micro-batch size that might take part in a better plan."""

    def __init__(
        self,
        problem: Problem,
        micro_batch_size: int,
        others: dict[Counts, int],
        *,
        limit_s: Callable[[], float],
        spend: Callable[[int], None],
        prune: Callable[[str], None],
    ) -> None:
        """
        Args:
            others: samples that any devices left over can do at most, by their counts.
            limit_s: a pipeline that takes no less is of no use; falls while plans are found [s].
            spend: told what was looked at; may raise to end it.
            prune: told the name of the rule for each stage that it leaves out.
        """
        self.problem = problem
        self.size = micro_batch_size
        self.others = others
        self.limit_s = limit_s
        self.spend = spend
        self.prune = prune
        self.hops = problem.hops(micro_batch_size)
        self.options = problem.options
        self.plain = [problem.plain(o) for o in self.options]
        """By option with recomputation the same without."""
        costs = [problem.costs(o, micro_batch_size) for o in self.options]
        # Plain lists: single elements of arrays are slow to read.
        self.work = [c.work_s.tolist() for c in costs]
        self.room = [c.in_flight.tolist() for c in costs]
        self.update = [c.optimizer_s.tolist() for c in costs]
        # What lies before a stage takes at least each block's fastest device, memory aside.
        self.before = [0.0]
        for block in range(problem.num_blocks):
            fastest = min(problem.block_s(o, block, micro_batch_size) for o in self.options)
            self.before.append(self.before[-1] + fastest)
        self.most = problem.global_batch_size // micro_batch_size
        self.bounds = problem.pruning.bound
        """Whether what takes no less than the best plan is left out."""
        self.looks_at_memory = problem.pruning.memory
        """Whether a stage without room ends what is built on it at once, not when it is whole."""

    def run(self) -> Iterator[tuple[tuple[TemplateStage, ...], list[Load]]]:
        """Stages of every such template, first stage first."""
        yield from self._extend([], [], -1, self.problem.counts, self.problem.num_blocks, self.most)

    def _extend(
        self,
        stages: list[TemplateStage],
        loads: list[Load],
        below: int,
        left: Counts,
        start: int,
        most: int,
    ) -> Iterator[tuple[tuple[TemplateStage, ...], list[Load]]]:
        """Put a stage before the stages.

        Args:
            loads: of these stages.
            below: option of the first of them.
            left: devices not used yet.
            start: the first block that is placed.
            most: micro-batches that memory permits.
        """
        place = len(stages) + 1
        for o, option in enumerate(self.options):
            k, width, recompute = option
            if left[k] < width:
                continue
            hop = float(self.hops[o, below]) if stages else 0.0
            rest = (*left[:k], left[k] - width, *left[k + 1 :])
            plain = self.plain[o]
            for first in range(start - 1, -1, -1):
                room = self.room[o][first][start]
                if room == 0 and self.looks_at_memory:
                    self.prune("memory")
                    continue
                if plain is not None and self.room[plain][first][start] >= min(room, most, place):
                    # The same without recomputation has room for as much, and is quicker.
                    self.prune("recompute")
                    continue
                self.spend(1 + place // 3)
                work = self.work[o][first][start]
                longer = [Load(before + work + hop, w, u) for before, w, u in loads]
                longer.append(Load(0.0, work, self.update[o][first][start]))
                fits = min(most, room) if room < place and self.looks_at_memory else most
                rule = self._ruled_out_by(longer, rest, first, fits)
                if rule:
                    self.prune(rule)
                    continue
                stage = TemplateStage(k, first, start, width, recompute)
                if first == 0:
                    yield (stage, *stages), longer
                elif sum(rest):
                    yield from self._extend([stage, *stages], longer, o, rest, first, fits)

    def _ruled_out_by(self, loads: list[Load], left: Counts, first: int, most: int) -> str:
        """The rule by which no better plan has a pipeline that ends so; empty: one may have it."""
        total = self.problem.global_batch_size
        update = max(u for _, _, u in loads)
        bounds = self.bounds
        limit = self.limit_s() - update - self.before[first]
        may_be_alone = most * self.size >= total and total % self.size == 0
        if may_be_alone:
            m = total // self.size
            if not bounds or all(before + m * work < limit for before, work, _ in loads):
                return ""
        others = self.others[left]
        m = max(1, -((others - total) // self.size))
        if others and m <= most:
            limit -= self.problem.sync_floor_s
            if not bounds or all(before + m * work < limit for before, work, _ in loads):
                return ""
            return "bound"
        if others and most < self.most:
            return "memory"
        # Alone it would do the whole batch, too late.
        return "bound" if may_be_alone else "capacity"
