"""Whether one pipeline fits some devices, and how many bytes the one that comes nearest lacks.

Exact and quick, because memory alone is looked at: going from the last stage to the first, each
stage takes as many blocks as it has room for. A stage needs no more when its last block is taken
away, so leaving fewer blocks to the stages before it is never worse, and of a set of groups of
devices only the first block that they reach from the end has to be known (`Fitter._reach`). For
the same reason a stage recomputes just where it reaches farther so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.cluster import Device
from eth_cli.search.capacity import CountSpace, Step, num_vectors
from eth_cli.search.memory import stage_memory
from eth_cli.search.place import Free
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.templates import Counts, Ints, Option, Problem, TemplateStage

_MAX_VECTORS = 20_000
"""Vectors of groups up to which every order of them is looked at, else only some."""
_NO_STAGE = 2**50
"""More bytes than any device has, small enough to be multiplied by micro-batches."""
_MAX_PERMUTED = 4
"""Kinds up to which all orders of them are looked at where the vectors are too many."""

Room = dict[Step, int]
"""By (kind, width): how many groups of that width the nodes have room for."""


class Fit(NamedTuple):
    """One pipeline, and what its worst stage lacks."""

    stages: tuple[TemplateStage, ...]
    lacking_bytes: int
    """Above 0: bytes that a device of the worst stage is over its memory; 0: the pipeline fits."""
    worst: int
    """Index of that stage."""
    num_in_flight: int
    """Micro-batches in flight there."""


class More(NamedTuple):
    """Devices of a kind that would do, beside those that there are."""

    number: int
    node_size: int
    """In new nodes of so many; 1: in any, for no stage of the kind takes more than one."""


class Fitter:
    """One pipeline over the devices of a problem, by its options, at one micro-batch size.

    Args:
        micro_batches: the pipeline's micro-batches: what may be in flight at most.
    """

    def __init__(self, problem: Problem, *, micro_batch_size: int, micro_batches: int) -> None:
        self.problem = problem
        self.kinds = problem.kinds
        self.micro_batch_size = micro_batch_size
        self.micro_batches = micro_batches
        self.num_blocks = problem.num_blocks
        self.steps = tuple(
            dict.fromkeys(_step(option) for option in problem.options if self._has(option))
        )
        """What a stage may take, each once: (kind, width)."""
        self._options = {
            step: [o for o in problem.options if _step(o) == step and self._has(o)]
            for step in self.steps
        }
        self._widths = [
            sorted(width for k, width in self.steps if k == kind) for kind in range(len(self.kinds))
        ]
        self._memory = {o: self._bytes(o) for o in itertools.chain(*self._options.values())}
        self._spaces: dict[Counts, CountSpace] = {}
        self._firsts: dict[tuple[Step, int], tuple[int, Ints]] = {}

    @property
    def is_exact(self) -> bool:
        """Whether `closest` looks at every order of all groups that the nodes have room for."""
        return self._is_exact(self._limits(self._room()))

    def closest(self) -> Fit | None:
        """The pipeline that lacks least; None: the profile has entries of no kind.

        Of every order of the groups if `is_exact`, else of some.
        """
        if not self.steps:
            return None
        whole = min(self._lacking_bytes(option, 0, self.num_blocks, 1) for option in self._memory)
        # With so much more memory one group holds the whole model.
        low, high = -1, max(whole, 0)
        room = self._room()
        if self._stages(room, 0) is not None:
            high = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._stages(room, middle) is None:
                low = middle
            else:
                high = middle
        stages = self._stages(room, high)
        assert stages is not None
        in_flight = [self._in_flight(place) for place in range(len(stages), 0, -1)]
        lacking = [
            self._lacking_bytes(stage.option, stage.start, stage.stop, n)
            for stage, n in zip(stages, in_flight, strict=True)
        ]
        worst = lacking.index(max(lacking))
        return Fit(stages, max(0, lacking[worst]), worst, in_flight[worst])

    def devices_needed(self, kind: int) -> More | None:
        """Fewest more devices of a kind with which a pipeline fits; None: no number does.

        They stand in new nodes, each as large as the largest one that there is for the kind. Where
        `closest` would not be exact it is a number that is enough, maybe not the fewest.
        """
        if not self._widths[kind]:
            return None
        # A new node has room for a group of every width, and a pipeline no use for more groups.
        most = self.num_blocks * self._node_size(kind)
        enlarged = self._limits(self._room({kind: most}))
        if self._is_exact(enlarged):
            return self._fewest(kind, self._space(enlarged), most)
        return self._enough(kind, most)

    def _fewest(self, kind: int, space: CountSpace, most: int) -> More | None:
        found = [
            np.array(level.vectors)[reach == 0]
            for level, reach in zip(space.levels, self._reach(space, 0), strict=True)
        ]
        vectors = np.concatenate(found)
        vectors = vectors[self._is_placed(vectors, self._room({kind: most}))]
        if not len(vectors):
            return None
        wide = [s for s, (k, width) in enumerate(self.steps) if k == kind and width > 1]
        number = 0
        while not (placed := self._is_placed(vectors, self._room({kind: number}))).any():
            number += 1
        is_wide = bool((vectors[placed][:, wide].sum(axis=1) > 0).all())
        return More(number, self._node_size(kind) if is_wide else 1)

    def _enough(self, kind: int, most: int) -> More | None:
        low, high = -1, most
        if self._in_some_order(self._room({kind: most}), 0) is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._in_some_order(self._room({kind: middle}), 0) is None:
                low = middle
            else:
                high = middle
        stages = self._in_some_order(self._room({kind: high}), 0)
        assert stages is not None
        widest = max((s.tensor_parallel for s in stages if s.kind == kind), default=1)
        return More(high, self._node_size(kind) if widest > 1 else 1)

    # --- Groups and the nodes that they lie in -------------------------------------------------

    def _has(self, option: Option) -> bool:
        tables = self.problem.model.tables
        key = (self.kinds[option.kind].device_type, option.tensor_parallel, self.micro_batch_size)
        return tables.has(*key) and (not option.recompute or tables.table(*key).can_recompute)

    def _node_size(self, kind: int) -> int:
        return max(self.problem.in_nodes[kind].values())

    def _room(self, more: dict[int, int] | None = None) -> Room:
        """Groups that the nodes have room for, and new nodes with more devices of some kinds."""
        room = {}
        for k, width in self.steps:
            groups = self.problem.groups[k, width]
            if more is not None and k in more:
                size = self._node_size(k)
                full, rest = divmod(more[k], size)
                groups += full * (size // width) + rest // width
            room[k, width] = groups
        return room

    def _limits(self, room: Room) -> Counts:
        return tuple(min(room[step], self.num_blocks) for step in self.steps)

    def _is_exact(self, limits: Counts) -> bool:
        return self._is_chain and num_vectors(limits, self.num_blocks) <= _MAX_VECTORS

    @property
    def _is_chain(self) -> bool:
        """Whether each width of a kind divides the next one, as 1, 2, 4, 8 do.

        Then groups have room in the nodes just if, for each width, all that are not narrower do not
        take more than there is of groups of that width: whatever node a wide one lies in, it takes
        as many of the narrower ones.
        """
        return all(
            wide % narrow == 0
            for widths in self._widths
            for narrow, wide in itertools.pairwise(widths)
        )

    def _is_placed(self, vectors: Ints, room: Room) -> NDArray[np.bool_]:
        """By vector of groups, of chains of widths: whether the nodes have room for them."""
        placed = np.ones(len(vectors), dtype=np.bool_)
        for kind, width in self.steps:
            takes = [w // width if k == kind and w >= width else 0 for k, w in self.steps]
            placed &= vectors @ np.array(takes) <= room[kind, width]
        return placed

    def _stages(self, room: Room, slack_bytes: int) -> tuple[TemplateStage, ...] | None:
        """A pipeline over devices with so much more memory; None: there is none."""
        if self._is_exact(self._limits(room)):
            return self._in_any_order(room, slack_bytes)
        return self._in_some_order(room, slack_bytes)

    # --- Every order of every set of groups ----------------------------------------------------

    def _in_any_order(self, room: Room, slack_bytes: int) -> tuple[TemplateStage, ...] | None:
        space = self._space(self._limits(room))
        reach = self._reach(space, slack_bytes)
        for place, (level, first) in enumerate(zip(space.levels, reach, strict=True), start=1):
            for index in np.flatnonzero(first == 0).tolist():
                if self._is_placed(np.array([level.vectors[index]]), room)[0]:
                    return self._back(space, reach, place, index, slack_bytes)
        return None

    def _space(self, limits: Counts) -> CountSpace:
        """Vectors of groups by step: to the space each is a kind of its own."""
        if limits not in self._spaces:
            self._spaces[limits] = CountSpace(limits, self.num_blocks)
        return self._spaces[limits]

    def _reach(self, space: CountSpace, slack_bytes: int) -> list[Ints]:
        """By level and vector: the first block of the longest suffix that fits these groups."""
        below = np.array([self.num_blocks])
        levels = []
        for place, level in enumerate(space.levels, start=1):
            reach = np.full(len(level.vectors), self.num_blocks + 1)
            for s, step in enumerate(self.steps):
                first = self._first_of(step, self._in_flight(place), slack_bytes)
                rows = level.rows[s]
                reach[rows] = np.minimum(reach[rows], first[below[level.rests[s]]])
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
            for s, step in enumerate(self.steps):
                (row,) = np.nonzero(level.rows[s] == index)
                if not len(row):
                    continue
                rest = int(level.rests[s][row[0]])
                stop = int(reach[q - 2][rest]) if q > 1 else self.num_blocks
                if self._first_of(step, self._in_flight(q), slack_bytes)[stop] == start:
                    break
            stages.append(self._stage(step, start, stop, q, slack_bytes))
            index = rest
        return tuple(stages)

    # --- Some orders: kinds one after another, each with its widest groups first -----------------

    def _in_some_order(self, room: Room, slack_bytes: int) -> tuple[TemplateStage, ...] | None:
        for rows in self._orders(room):
            stages: list[TemplateStage] = []
            stop = self.num_blocks
            for step in rows:
                place = len(stages) + 1
                start = int(self._first_of(step, self._in_flight(place), slack_bytes)[stop])
                if start < stop:
                    stages.insert(0, self._stage(step, start, stop, place, slack_bytes))
                    stop = start
                if stop == 0:
                    return tuple(stages)
        return None

    def _orders(self, room: Room) -> Iterator[list[Step]]:
        by_memory = sorted(range(len(self.kinds)), key=lambda k: self.kinds[k].capacity_bytes)
        if len(self.kinds) <= _MAX_PERMUTED:
            orders = list(itertools.permutations(by_memory))
        else:
            orders = [(k, *(j for j in by_memory if j != k)) for k in by_memory]
            orders += [tuple(by_memory[::-1])]
        for widest in sorted({width for _, width in self.steps}):
            rows = [self._groups(k, widest, room) for k in range(len(self.kinds))]
            for order in orders:
                yield [step for k in order for step in rows[k]]

    def _groups(self, kind: int, widest: int, room: Room) -> list[Step]:
        """All groups of a kind up to a width, or of its least one: widest first, for the last
        stages; narrower ones where devices are left over."""
        widths = [w for w in self._widths[kind] if w <= widest] or self._widths[kind][:1]
        if not self._is_chain:
            widths = widths[-1:]
        found: list[Step] = []
        for width in reversed(widths):
            taken = sum(w // width for _, w in found)
            number = min(room[kind, width] - taken, self.num_blocks - len(found))
            found += [(kind, width)] * number
        return found

    # --- Stages --------------------------------------------------------------------------------

    def _bytes(self, option: Option) -> tuple[Ints, Ints]:
        """Bytes of every stage [start, stop): all but its activations, and these a micro-batch."""
        size = self.num_blocks + 1
        fixed, activations = (np.full((size, size), _NO_STAGE) for _ in range(2))
        model = self.problem.model
        table = model.tables.table(
            self.kinds[option.kind].device_type, option.tensor_parallel, self.micro_batch_size
        )
        for start in range(self.num_blocks):
            for stop in range(start + 1, size):
                memory = stage_memory(
                    model.profile,
                    table,
                    start=start,
                    stop=stop,
                    num_in_flight=1,
                    recompute=option.recompute,
                )
                activations[start, stop] = memory.activations_bytes
                fixed[start, stop] = memory.total_bytes - memory.activations_bytes
        return fixed, activations

    def _stage(
        self, step: Step, start: int, stop: int, place: int, slack_bytes: int
    ) -> TemplateStage:
        """A stage that reaches so far; without recomputation where it does all the same."""
        in_flight = self._in_flight(place)
        for option in self._options[step]:
            if self._first(option, in_flight, slack_bytes)[stop] == start:
                break
        return TemplateStage(option.kind, start, stop, *option[1:])

    def _first_of(self, step: Step, num_in_flight: int, slack_bytes: int) -> Ints:
        """`_first` of the best of the options that take the same."""
        key = (step, num_in_flight)
        known = self._firsts.get(key)
        if known is None or known[0] != slack_bytes:
            firsts = [self._first(o, num_in_flight, slack_bytes) for o in self._options[step]]
            known = self._firsts[key] = (slack_bytes, np.minimum.reduce(firsts))
        return known[1]

    def _first(self, option: Option, num_in_flight: int, slack_bytes: int) -> Ints:
        """By its stop, the first block of the largest stage that fits; num_blocks + 1: none does.

        It may be asked with that number for a stop, too.
        """
        fixed, activations = self._memory[option]
        capacity = self.kinds[option.kind].capacity_bytes + slack_bytes
        fits = fixed + num_in_flight * activations <= capacity
        fits[self.num_blocks] = True
        first = fits.argmax(axis=0)
        first[first == self.num_blocks] = self.num_blocks + 1
        return np.append(first, self.num_blocks + 1)

    def _in_flight(self, place: int) -> int:
        """Micro-batches in flight in the stage at a place from the end."""
        return min(self.micro_batches, place)

    def _lacking_bytes(self, option: Option, start: int, stop: int, num_in_flight: int) -> int:
        fixed, activations = self._memory[option]
        needed = int(fixed[start, stop] + num_in_flight * activations[start, stop])
        return needed - self.kinds[option.kind].capacity_bytes


def _step(option: Option) -> Step:
    return option.kind, option.tensor_parallel


def placed_alone(problem: Problem, fit: Fit, micro_batch_size: int) -> PlacedPipeline:
    """The whole batch on the pipeline of a fit, its widest groups placed first.

    They always find room: see `Fitter._is_chain`; where that does not hold, all groups of a kind
    are alike. Nodes that a group leaves fullest are taken first.
    """
    free = Free(problem.model.cluster, problem.excluded)
    groups: dict[int, tuple[Device, ...]] = {}
    for s in sorted(range(len(fit.stages)), key=lambda s: -fit.stages[s].tensor_parallel):
        stage = fit.stages[s]
        name, width = problem.kinds[stage.kind].device_type, stage.tensor_parallel
        nodes = [n for n in range(len(free.nodes)) if free.count(n, name) >= width]
        groups[s] = free.take(min(nodes, key=lambda n: free.count(n, name)), name, width)
    return PlacedPipeline(
        micro_batch_size,
        problem.global_batch_size // micro_batch_size,
        tuple(
            PlacedStage(stage.start, stage.stop, groups[s], stage.recompute)
            for s, stage in enumerate(fit.stages)
        ),
    )
