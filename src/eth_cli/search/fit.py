"""Whether one pipeline fits some devices, and how many bytes the one that comes nearest lacks.

Exact and quick, because memory alone is looked at: going from the last stage to the first, each
stage takes as many blocks as it has room for. A stage needs no more when its last block is taken
away, so leaving fewer blocks to the stages before it is never worse, and of a set of devices only
the first block that they reach from the end has to be known (`Fitter._reach`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eth_cli.search.capacity import CountSpace, num_vectors
from eth_cli.search.cost import CostModel
from eth_cli.search.memory import stage_memory
from eth_cli.search.templates import Counts, Ints, Kind, TemplateStage

_MAX_VECTORS = 20_000
"""Count vectors up to which every order of the devices is looked at, else only some."""
_NO_STAGE = 2**50
"""More bytes than any device has, small enough to be multiplied by micro-batches."""
_MAX_PERMUTED = 4
"""Kinds up to which all orders of them are looked at where the count vectors are too many."""


class Fit(NamedTuple):
    """One pipeline, and what its worst stage lacks."""

    stages: tuple[TemplateStage, ...]
    lacking_bytes: int
    """Above 0: bytes that the worst stage is over its device; 0: the pipeline fits."""
    worst: int
    """Index of that stage."""
    num_in_flight: int
    """Micro-batches in flight there."""


class Fitter:
    """One pipeline over devices of some kinds at one micro-batch size.

    Args:
        micro_batches: the pipeline's micro-batches: what may be in flight at most.
        kinds: one that the profile has no entries of, at this micro-batch size, fits nothing.
    """

    def __init__(
        self,
        model: CostModel,
        kinds: Sequence[Kind],
        *,
        micro_batch_size: int,
        micro_batches: int,
        recompute: bool = False,
    ) -> None:
        self.kinds = tuple(kinds)
        self.micro_batch_size = micro_batch_size
        self.micro_batches = micro_batches
        self.recompute = recompute
        self.num_blocks = model.profile.model.num_blocks
        self._spaces: dict[Counts, CountSpace] = {}
        self._firsts: dict[tuple[int, int], tuple[int, Ints]] = {}
        self._memory = [self._tables(model, kind.device_type) for kind in kinds]

    @property
    def is_exact(self) -> bool:
        """Whether `closest` looks at every order of the devices."""
        return _is_exact([kind.num_devices for kind in self.kinds], self.num_blocks)

    def closest(self) -> Fit | None:
        """The pipeline that lacks least; None: the profile has entries of no kind.

        Of every order of the devices if `is_exact`, else of some.
        """
        whole = [
            int(fixed[0, -1] + activations[0, -1]) - kind.capacity_bytes
            for kind, (fixed, activations) in zip(self.kinds, self._memory, strict=True)
            if fixed[0, -1] < _NO_STAGE
        ]
        if not whole:
            return None
        # With so much more memory one device holds the whole model.
        low, high = -1, max(min(whole), 0)
        counts = tuple(kind.num_devices for kind in self.kinds)
        if self._stages(counts, 0) is not None:
            high = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._stages(counts, middle) is None:
                low = middle
            else:
                high = middle
        stages = self._stages(counts, high)
        assert stages is not None
        lacking = [self._lacking_bytes(stages, s) for s in range(len(stages))]
        worst = lacking.index(max(lacking))
        return Fit(stages, max(0, lacking[worst]), worst, self._in_flight(len(stages) - worst))

    def devices_needed(self, kind: int) -> int | None:
        """Fewest more devices of a kind with which a pipeline fits; None: no number does.

        Where the count vectors are too many it is a number that is enough, maybe not the fewest.
        """
        counts = [k.num_devices for k in self.kinds]
        have = counts[kind] = min(counts[kind], self.num_blocks)
        counts[kind] = self.num_blocks
        if _is_exact(counts, self.num_blocks):
            space = self._space(tuple(counts))
            used = [
                vector[kind]
                for level, reach in zip(space.levels, self._reach(space, 0), strict=True)
                for vector, block in zip(level.vectors, reach.tolist(), strict=True)
                if block == 0
            ]
            return max(0, min(used) - have) if used else None
        for more in range(self.num_blocks - have + 1):
            counts[kind] = have + more
            if self._in_some_order(counts, 0) is not None:
                return more
        return None

    def _stages(self, counts: Counts, slack_bytes: int) -> tuple[TemplateStage, ...] | None:
        """A pipeline over devices with so much more memory; None: there is none."""
        if _is_exact(counts, self.num_blocks):
            return self._in_any_order(counts, slack_bytes)
        return self._in_some_order(counts, slack_bytes)

    # --- Every order of every subset of the devices --------------------------------------------

    def _in_any_order(self, counts: Counts, slack_bytes: int) -> tuple[TemplateStage, ...] | None:
        space = self._space(counts)
        reach = self._reach(space, slack_bytes)
        for place, first in enumerate(reach, start=1):
            if not first.min():
                return self._back(space, reach, place, int(first.argmin()), slack_bytes)
        return None

    def _space(self, counts: Counts) -> CountSpace:
        if counts not in self._spaces:
            self._spaces[counts] = CountSpace(counts, self.num_blocks)
        return self._spaces[counts]

    def _reach(self, space: CountSpace, slack_bytes: int) -> list[Ints]:
        """By level and vector: the first block of the longest suffix that fits these devices."""
        below = np.array([self.num_blocks])
        levels = []
        for place, level in enumerate(space.levels, start=1):
            reach = np.full(len(level.vectors), self.num_blocks + 1)
            for k in range(len(self.kinds)):
                first = self._first(k, self._in_flight(place), slack_bytes)
                rows = level.rows[k]
                reach[rows] = np.minimum(reach[rows], first[below[level.rests[k]]])
            levels.append(reach)
            below = reach
        return levels

    def _back(
        self, space: CountSpace, reach: Sequence[Ints], place: int, index: int, slack_bytes: int
    ) -> tuple[TemplateStage, ...]:
        """The stages of the suffix that a vector of a level reaches."""
        stages = []
        for q in range(place, 0, -1):
            level = space.levels[q - 1]
            start = int(reach[q - 1][index])
            for k in range(len(self.kinds)):
                (row,) = np.nonzero(level.rows[k] == index)
                if not len(row):
                    continue
                rest = int(level.rests[k][row[0]])
                stop = int(reach[q - 2][rest]) if q > 1 else self.num_blocks
                if self._first(k, self._in_flight(q), slack_bytes)[stop] == start:
                    break
            stages.append(TemplateStage(k, start, stop, recompute=self.recompute))
            index = rest
        return tuple(stages)

    # --- Some orders: kinds one after another --------------------------------------------------

    def _in_some_order(
        self, counts: Sequence[int], slack_bytes: int
    ) -> tuple[TemplateStage, ...] | None:
        for order in self._orders():
            stages: list[TemplateStage] = []
            stop = self.num_blocks
            for k in itertools.chain.from_iterable([k] * counts[k] for k in order):
                first = self._first(k, self._in_flight(len(stages) + 1), slack_bytes)
                start = int(first[stop])
                if start > self.num_blocks:
                    break
                stages.insert(0, TemplateStage(k, start, stop, recompute=self.recompute))
                stop = start
                if stop == 0:
                    return tuple(stages)
        return None

    def _orders(self) -> Iterable[Sequence[int]]:
        by_memory = sorted(range(len(self.kinds)), key=lambda k: self.kinds[k].capacity_bytes)
        if len(self.kinds) > _MAX_PERMUTED:
            return by_memory, by_memory[::-1]
        return itertools.permutations(by_memory)

    # --- Stages --------------------------------------------------------------------------------

    def _tables(self, model: CostModel, device_type: str) -> tuple[Ints, Ints]:
        """Bytes of every stage [start, stop): all but its activations, and these a micro-batch."""
        size = self.num_blocks + 1
        fixed, activations = (np.full((size, size), _NO_STAGE) for _ in range(2))
        if not model.tables.has(device_type, 1, self.micro_batch_size):
            return fixed, activations
        table = model.tables.table(device_type, 1, self.micro_batch_size)
        if self.recompute and not table.can_recompute:
            return fixed, activations
        for start in range(self.num_blocks):
            for stop in range(start + 1, size):
                memory = stage_memory(
                    model.profile,
                    table,
                    start=start,
                    stop=stop,
                    num_in_flight=1,
                    recompute=self.recompute,
                )
                activations[start, stop] = memory.activations_bytes
                fixed[start, stop] = memory.total_bytes - memory.activations_bytes
        return fixed, activations

    def _first(self, k: int, num_in_flight: int, slack_bytes: int) -> Ints:
        """By its stop, the first block of the largest stage that fits; num_blocks + 1: none does.

        It may be asked with that number for a stop, too.
        """
        key = (k, num_in_flight)
        known = self._firsts.get(key)
        if known is None or known[0] != slack_bytes:
            fixed, activations = self._memory[k]
            fits = fixed + num_in_flight * activations <= self.kinds[k].capacity_bytes + slack_bytes
            fits[self.num_blocks] = True
            first = fits.argmax(axis=0)
            first[first == self.num_blocks] = self.num_blocks + 1
            known = self._firsts[key] = (slack_bytes, np.append(first, self.num_blocks + 1))
        return known[1]

    def _in_flight(self, place: int) -> int:
        """Micro-batches in flight in the stage at a place from the end."""
        return min(self.micro_batches, place)

    def _lacking_bytes(self, stages: Sequence[TemplateStage], s: int) -> int:
        k, start, stop = stages[s][:3]
        fixed, activations = self._memory[k]
        in_flight = self._in_flight(len(stages) - s)
        needed = int(fixed[start, stop] + in_flight * activations[start, stop])
        return needed - self.kinds[k].capacity_bytes


def _is_exact(counts: Sequence[int], max_stages: int) -> bool:
    return num_vectors(counts, max_stages) <= _MAX_VECTORS
