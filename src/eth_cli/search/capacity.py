"""What pipelines over given counts of devices can do at best: bounds for whole families at once.

For devices u (a count of each kind), micro-batch size b and m micro-batches, `Families.time_s` is a
lower bound on the time of every template over u, and the cut that attains it is at hand. All orders
of the kinds and all cuts are covered by one dynamic programme that builds pipelines from their last
stage; a stage's place from the end gives its micro-batches in flight, so memory is exact.

For a stage of work w = f + b in front of a rest with bound R and shortest chain D (transfers both
ways included), with q = min(m, place from the end) micro-batches in flight:

    R' = max(m w + [D - (q-1) f]+ + {m > q} [D - (q-1) b]+ ,  w + D_hop + R)

First part: the stage itself works m w, and while its first micro-batch is away at the rest for at
least D, 1F1B lets it do only q - 1 other forwards; likewise q - 1 backwards around the last one.
Second part: the rest starts after this stage's first forward, and its last gradient passes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.search.templates import Counts, Floats, Ints, Problem, Template, TemplateStage


class _Level(NamedTuple):
    """Families with the same number of stages."""

    vectors: tuple[Counts, ...]
    rows: tuple[Ints, ...]
    """By kind k: indices of the vectors that hold a k."""
    rests: tuple[Ints, ...]
    """By kind k: for each of those, the index of vector - e_k in the level below."""


class CountSpace:
    """Count vectors of up to ``max_stages`` devices, of each kind up to a limit, which may be 0."""

    def __init__(self, limits: Counts, max_stages: int) -> None:
        self.kinds = tuple(k for k, limit in enumerate(limits) if limit)
        below: dict[Counts, int] = {(0,) * len(limits): 0}
        self.levels: list[_Level] = []
        for _ in range(max_stages):
            found: dict[Counts, int] = {}
            for vector in below:
                for k in self.kinds:
                    if vector[k] < limits[k]:
                        larger = (*vector[:k], vector[k] + 1, *vector[k + 1 :])
                        found.setdefault(larger, len(found))
            if not found:
                break
            rows, rests = [], []
            for k in range(len(limits)):
                holding = [v for v in found if v[k]]
                rows.append(np.array([found[v] for v in holding], dtype=np.int64))
                rests.append(
                    np.array(
                        [below[(*v[:k], v[k] - 1, *v[k + 1 :])] for v in holding],
                        dtype=np.int64,
                    )
                )
            self.levels.append(_Level(tuple(found), tuple(rows), tuple(rests)))
            below = found
        self.vectors: tuple[Counts, ...] = tuple(
            itertools.chain.from_iterable(level.vectors for level in self.levels)
        )

    def beats_smaller(self, values: Ints) -> NDArray[np.bool_]:
        """By vector: whether its value is above 0 and that of every vector contained in it."""
        result = np.zeros(len(values), dtype=np.bool_)
        below = np.zeros(1, dtype=np.int64)
        first = 0
        for level in self.levels:
            own = values[first : first + len(level.vectors)]
            smaller = np.zeros(len(own), dtype=np.int64)
            for rows, rests in zip(level.rows, level.rests, strict=True):
                smaller[rows] = np.maximum(smaller[rows], below[rests])
            result[first : first + len(own)] = own > smaller
            below = np.maximum(own, smaller)
            first += len(own)
        return result


def num_vectors(counts: Sequence[int], max_stages: int) -> int:
    """How many count vectors a space would have, without building it."""
    ways = [1] + [0] * max_stages
    for count in counts:
        ways = [sum(ways[max(0, n - count) : n + 1]) for n in range(max_stages + 1)]
    return sum(ways) - 1


class Families:
    """Bounds for every family of a space at every micro-batch size.

    ``grids[b]`` are the numbers of micro-batches that are computed; between two of them a bound of
    the lower one holds.
    """

    def __init__(self, problem: Problem, space: CountSpace, *, max_grid: int) -> None:
        self.problem = problem
        self.space = space
        self.grids = {
            b: micro_batch_grid(problem.global_batch_size // b, max_grid)
            for b in problem.micro_batch_sizes
        }
        self._chains = {b: self._chain_levels(b) for b in self.grids}
        optimizer = {b: self._optimizer_bound(b) for b in self.grids}
        self.times_s: dict[int, Floats] = {}
        """By micro-batch size: bound on the end of the last backward and the optimizer update
        after it, by [index of m in the grid, index of the vector] [s]."""
        self._levels: dict[tuple[int, int], list[Floats]] = {}
        for b, grid in self.grids.items():
            rows = [self._bounds(self._time_levels(b, m)) + optimizer[b] for m in grid]
            # A family that cannot run m micro-batches cannot run more; keep rounding from saying so
            self.times_s[b] = np.maximum.accumulate(np.array(rows), axis=0)

    @property
    def vectors(self) -> tuple[Counts, ...]:
        """The count vectors, in the order of the arrays here."""
        return self.space.vectors

    def capacity(self, micro_batch_size: int, time_s: float) -> Ints:
        """By vector: no template over it finishes more micro-batches within a time."""
        grid = np.array([*self.grids[micro_batch_size], 0], dtype=np.int64)
        times = self.times_s[micro_batch_size]
        within = (np.isfinite(times) & (times <= time_s)).sum(axis=0)
        # The next grid point is out of reach, what lies between may not be.
        upper = np.append(grid[1:-1] - 1, grid[-2])
        return np.where(within > 0, upper[np.maximum(within - 1, 0)], 0)

    def candidate_times_s(self) -> Floats:
        """Every time at which a capacity changes, ascending [s]."""
        values = np.concatenate([times.ravel() for times in self.times_s.values()])
        return np.unique(values[np.isfinite(values)])

    # --- The dynamic programme ---------------------------------------------------------------

    def _chain_levels(self, b: int) -> list[Floats]:
        """Shortest time of one micro-batch through a suffix, by level [vector, kind, start]."""
        hops = self.problem.hops(b)
        levels: list[Floats] = []
        for level in self.space.levels:
            values = self._empty(level)
            for k in self.space.kinds:
                work = self.problem.costs(k, b).work_s
                if not levels:
                    values[level.rows[k], k, :] = work[:, -1]
                elif len(level.rows[k]):
                    rest = self._rest(levels[-1], level.rests[k], hops[k])
                    values[level.rows[k], k, :] = (work + rest[:, None, :]).min(axis=2)
            levels.append(values)
        return levels

    def _time_levels(self, b: int, m: int) -> list[Floats]:
        """The bound R with m micro-batches, by level [vector, kind of the first stage, start]."""
        hops = self.problem.hops(b)
        levels: list[Floats] = []
        for q, level in enumerate(self.space.levels, start=1):
            values = self._empty(level)
            for k in self.space.kinds:
                if not len(level.rows[k]):
                    continue
                if not levels:
                    work, _, _ = self._stage(k, b, m, 1)
                    values[level.rows[k], k, :] = m * work[:, -1]
                else:
                    values[level.rows[k], k, :] = self._through(
                        k, b, m, q, level.rests[k], levels[-1], hops[k]
                    ).min(axis=2)
            levels.append(values)
        return levels

    def _stage(self, k: int, b: int, m: int, place: int) -> tuple[Floats, Floats, Floats]:
        """Work, forward and backward of all stages of a kind at a place from the end."""
        costs = self.problem.costs(k, b)
        fits = costs.in_flight >= min(m, place)
        return (
            np.where(fits, costs.work_s, np.inf),
            np.where(fits, costs.forward_s, 0.0),
            np.where(fits, costs.backward_s, 0.0),
        )

    def _through(
        self, k: int, b: int, m: int, place: int, rests: Ints, below: Floats, hop: Floats
    ) -> Floats:
        """R of every first stage of kind k before every rest, by [rest, start, stop]."""
        work, forward, backward = self._stage(k, b, m, place)
        rest = self._rest(below, rests, hop)[:, None, :]
        chain = self._rest(self._chains[b][place - 2], rests, hop)[:, None, :]
        ahead = min(m, place) - 1
        with np.errstate(invalid="ignore"):
            idle = np.maximum(chain - ahead * forward, 0.0)
            if m > place:
                idle = idle + np.maximum(chain - ahead * backward, 0.0)
            return np.maximum(m * work + idle, work + rest)

    def _rest(self, below: Floats, rests: Ints, hop: Floats) -> Floats:
        """Best value of a rest with the hop to it, over the kind of its first stage."""
        best: Floats = (below[rests] + hop[None, :, None]).min(axis=1)
        return best

    def _empty(self, level: _Level) -> Floats:
        shape = (len(level.vectors), len(self.problem.kinds), self.problem.num_blocks + 1)
        return np.full(shape, np.inf)

    def _bounds(self, levels: list[Floats]) -> Floats:
        """By vector: the bound of whole pipelines."""
        return np.concatenate([values[:, :, 0].min(axis=1) for values in levels])

    def _optimizer_bound(self, b: int) -> Floats:
        """By vector: the least longest optimizer update of any cut."""
        levels: list[Floats] = []
        for level in self.space.levels:
            values = self._empty(level)
            for k in self.space.kinds:
                update = self.problem.costs(k, b).optimizer_s
                if not levels:
                    values[level.rows[k], k, :] = update[:, -1]
                elif len(level.rows[k]):
                    rest = levels[-1][level.rests[k]].min(axis=1)[:, None, :]
                    values[level.rows[k], k, :] = np.maximum(update, rest).min(axis=2)
            levels.append(values)
        return self._bounds(levels)

    # --- From a bound to the cut that attains it -----------------------------------------------

    def template(self, vector: Counts, micro_batch_size: int, m: int) -> Template | None:
        """The cut and order over a vector with the least bound; None: nothing fits."""
        b = micro_batch_size
        key = (b, m)
        if key not in self._levels:
            self._levels[key] = self._time_levels(b, m)
        levels = self._levels[key]
        hops = self.problem.hops(b)
        place = sum(vector)
        index = self.space.levels[place - 1].vectors.index(vector)
        kind = int(levels[place - 1][index, :, 0].argmin())
        if not np.isfinite(levels[place - 1][index, kind, 0]):
            return None
        stages = []
        start = 0
        for q in range(place, 1, -1):
            level = self.space.levels[q - 1]
            row = int(np.flatnonzero(level.rows[kind] == index)[0])
            rests = level.rests[kind][row : row + 1]
            through = self._through(kind, b, m, q, rests, levels[q - 2], hops[kind])
            stop = int(through[0, start].argmin())
            stages.append(TemplateStage(kind, start, stop))
            index = int(rests[0])
            start = stop
            kind = int((levels[q - 2][index, :, stop] + hops[kind]).argmin())
        stages.append(TemplateStage(kind, start, self.problem.num_blocks))
        return Template(b, tuple(stages))


def micro_batch_grid(largest: int, max_points: int) -> tuple[int, ...]:
    """1 ... largest, all of them if few, else growing in proportion beyond the first half."""
    if largest <= max_points:
        return tuple(range(1, largest + 1))
    exact = max_points // 2
    ratio = (largest / exact) ** (1 / (max_points - exact))
    points = {*range(1, exact + 1), largest}
    points |= {round(exact * ratio**i) for i in range(1, max_points - exact)}
    return tuple(sorted(points))
