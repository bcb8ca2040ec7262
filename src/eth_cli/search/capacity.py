"""What pipelines over given counts of devices can do at best: bounds for whole families at once.

For devices u (a count of each kind, in groups of any width), micro-batch size b and m
micro-batches, `Families.time_s` is a lower bound on the time of every template over u, and the cut
that attains it is at hand. All orders of the options and all cuts are covered by one dynamic
programme that builds pipelines from their last stage; a stage's place from the end gives its
micro-batches in flight, so memory is exact.

For a stage of work w = f + b in front of a rest with bound R and shortest chain D (transfers both
ways included), with q = min(m, place from the end) micro-batches in flight:

    R' = max(m w + [D - (q-1) f]+ + {m > q} [D - (q-1) b]+ ,  w + D_hop + R)

First part: the stage itself works m w, and while its first micro-batch is away at the rest for at
least D, 1F1B lets it do only q - 1 other forwards; likewise q - 1 backwards around the last one.
Second part: the rest starts after this stage's first forward, and its last gradient passes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eth_cli.search.templates import Counts, Floats, Ints, Option, Problem, Template, TemplateStage


class _Level(NamedTuple):
    """Families with the same number of stages."""

    vectors: tuple[Counts, ...]
    rows: tuple[Ints, ...]
    """By step: indices of the vectors that hold one."""
    rests: tuple[Ints, ...]
    """By step: for each of those, the index of what is left without it in the level below."""
    places: Ints
    """By vector: its index among the vectors of the space."""


Step = tuple[int, int]
"""What a stage takes: (kind, number of devices)."""


class CountSpace:
    """Count vectors of pipelines of up to ``max_stages`` stages, of each kind up to a limit.

    A limit may be 0. A stage takes a step: so many devices of one kind. A vector may be in several
    levels, for a wide stage takes as many devices as several narrow ones.

    Args:
        steps: what stages may take; None: one device of any kind.
    """

    def __init__(
        self, limits: Counts, max_stages: int, steps: Sequence[Step] | None = None
    ) -> None:
        self.steps = tuple((k, 1) for k in range(len(limits))) if steps is None else tuple(steps)
        below: dict[Counts, int] = {(0,) * len(limits): 0}
        self.levels: list[_Level] = []
        places: dict[Counts, int] = {}
        for _ in range(max_stages):
            found: dict[Counts, int] = {}
            for vector in below:
                for k, width in self.steps:
                    if vector[k] + width <= limits[k]:
                        larger = (*vector[:k], vector[k] + width, *vector[k + 1 :])
                        found.setdefault(larger, len(found))
            if not found:
                break
            rows, rests = [], []
            for k, width in self.steps:
                pairs = [
                    (found[v], below[rest])
                    for v in found
                    if (rest := (*v[:k], v[k] - width, *v[k + 1 :])) in below
                ]
                rows.append(np.array([row for row, _ in pairs], dtype=np.int64))
                rests.append(np.array([rest for _, rest in pairs], dtype=np.int64))
            at = [places.setdefault(v, len(places)) for v in found]
            self.levels.append(
                _Level(tuple(found), tuple(rows), tuple(rests), np.array(at, dtype=np.int64))
            )
            below = found
        self.vectors: tuple[Counts, ...] = tuple(places)
        self._coordinates = np.array(self.vectors, dtype=np.int64).reshape(-1, len(limits)).T

    def beats_smaller(self, values: Ints) -> NDArray[np.bool_]:
        """By vector: whether its value is above 0 and that of every vector contained in it."""
        if not len(values):
            return np.zeros(0, dtype=np.bool_)
        at = tuple(self._coordinates)
        most = np.zeros([int(axis.max()) + 2 for axis in at], dtype=np.int64)
        # One row of zeros before each axis: there is nothing below no device.
        inner = tuple(axis + 1 for axis in at)
        most[inner] = values
        for axis in range(most.ndim):
            most = np.maximum.accumulate(most, axis=axis)
        smaller = np.zeros(len(values), dtype=np.int64)
        for axis in range(most.ndim):
            below = list(inner)
            below[axis] = at[axis]
            smaller = np.maximum(smaller, most[tuple(below)])
        return np.asarray(values > smaller)


def num_vectors(counts: Sequence[int], max_stages: int) -> int:
    """How many count vectors of single devices a space would have, without building it."""
    ways = [1] + [0] * max_stages
    for count in counts:
        ways = [sum(ways[max(0, n - count) : n + 1]) for n in range(max_stages + 1)]
    return sum(ways) - 1


def steps_of(problem: Problem) -> tuple[Step, ...]:
    """What stages of a problem may take, each once."""
    return tuple(dict.fromkeys((o.kind, o.tensor_parallel) for o in problem.options))


class Families:
    """Bounds for every family of a space at every micro-batch size.

    ``grids[b]`` are the numbers of micro-batches that are computed; between two of them a bound of
    the lower one holds.
    """

    def __init__(self, problem: Problem, space: CountSpace, *, max_grid: int) -> None:
        """Raises SearchOverError where the time of the search is over."""
        self.problem = problem
        self.space = space
        self.grids = {
            b: micro_batch_grid(problem.global_batch_size // b, max_grid)
            for b in problem.micro_batch_sizes
        }
        self._options: list[list[Option]] = [
            [o for o in problem.options if (o.kind, o.tensor_parallel) == step]
            for step in space.steps
        ]
        self._chains = {b: self._chain_levels(b) for b in self.grids}
        optimizer = {b: self._optimizer_bound(b) for b in self.grids}
        self.times_s: dict[int, Floats] = {}
        """By micro-batch size: bound on the end of the last backward and the optimizer update
        after it, by [index of m in the grid, index of the vector] [s]."""
        self._levels: dict[tuple[int, int], list[Floats]] = {}
        for b, grid in self.grids.items():
            rows = []
            for m in grid:
                problem.check_over()
                rows.append(self._bounds(self._time_levels(b, m)) + optimizer[b])
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

    def _hops(self, b: int) -> Floats:
        """Both ways over a boundary, by [step, step] [s]; recomputation makes no difference."""
        index = [self.problem.options.index(options[0]) for options in self._options]
        return self.problem.hops(b)[np.ix_(index, index)]

    def _chain_levels(self, b: int) -> list[Floats]:
        """Shortest time of one micro-batch through a suffix, by level [vector, step, start]."""
        hops = self._hops(b)
        levels: list[Floats] = []
        for level in self.space.levels:
            values = self._empty(level)
            for k, options in enumerate(self._options):
                if not len(level.rows[k]):
                    continue
                work = np.minimum.reduce([self.problem.costs(o, b).work_s for o in options])
                if not levels:
                    values[level.rows[k], k, :] = work[:, -1]
                else:
                    rest = self._rest(levels[-1], level.rests[k], hops[k])
                    values[level.rows[k], k, :] = (work + rest[:, None, :]).min(axis=2)
            levels.append(values)
        return levels

    def _time_levels(self, b: int, m: int) -> list[Floats]:
        """The bound R with m micro-batches, by level [vector, step of the first stage, start]."""
        hops = self._hops(b)
        levels: list[Floats] = []
        for q, level in enumerate(self.space.levels, start=1):
            values = self._empty(level)
            for k, options in enumerate(self._options):
                rows = level.rows[k]
                if not len(rows):
                    continue
                for o in options:
                    work, forward, backward = self._stage(o, b, m, q)
                    if not np.isfinite(work).any():
                        continue
                    if not levels:
                        found = (m * work[:, -1])[None, :]
                    else:
                        costs = (work, forward, backward)
                        found = self._through(
                            costs, b, m, q, level.rests[k], levels[-1], hops[k]
                        ).min(axis=2)
                    values[rows, k, :] = np.minimum(values[rows, k, :], found)
            levels.append(values)
        return levels

    def _stage(self, option: Option, b: int, m: int, place: int) -> tuple[Floats, Floats, Floats]:
        """Work, forward and backward of all stages of an option at a place from the end.

        Recomputation costs time, so it is left out wherever the same stage fits without.
        """
        costs = self.problem.costs(option, b)
        fits = costs.in_flight >= min(m, place)
        plain = self.problem.plain(option)
        if plain is not None:
            room = self.problem.costs(self.problem.options[plain], b).in_flight
            fits &= room < min(m, place)
        return (
            np.where(fits, costs.work_s, np.inf),
            np.where(fits, costs.forward_s, 0.0),
            np.where(fits, costs.backward_s, 0.0),
        )

    def _through(
        self,
        costs: tuple[Floats, Floats, Floats],
        b: int,
        m: int,
        place: int,
        rests: Ints,
        below: Floats,
        hop: Floats,
    ) -> Floats:
        """R of every first stage of these costs before every rest, by [rest, start, stop]."""
        work, forward, backward = costs
        rest = self._rest(below, rests, hop)[:, None, :]
        chain = self._rest(self._chains[b][place - 2], rests, hop)[:, None, :]
        ahead = min(m, place) - 1
        with np.errstate(invalid="ignore"):
            idle = np.maximum(chain - ahead * forward, 0.0)
            if m > place:
                idle = idle + np.maximum(chain - ahead * backward, 0.0)
            return np.maximum(m * work + idle, work + rest)

    def _rest(self, below: Floats, rests: Ints, hop: Floats) -> Floats:
        """Best value of a rest with the hop to it, over the step of its first stage."""
        best: Floats = (below[rests] + hop[None, :, None]).min(axis=1)
        return best

    def _empty(self, level: _Level) -> Floats:
        shape = (len(level.vectors), len(self._options), self.problem.num_blocks + 1)
        return np.full(shape, np.inf)

    def _bounds(self, levels: list[Floats]) -> Floats:
        """By vector: the bound of whole pipelines, of any number of stages."""
        best = np.full(len(self.vectors), np.inf)
        for level, values in zip(self.space.levels, levels, strict=True):
            best[level.places] = np.minimum(best[level.places], values[:, :, 0].min(axis=1))
        return best

    def _optimizer_bound(self, b: int) -> Floats:
        """By vector: the least longest optimizer update of any cut."""
        levels: list[Floats] = []
        for level in self.space.levels:
            values = self._empty(level)
            for k, options in enumerate(self._options):
                if not len(level.rows[k]):
                    continue
                update = np.minimum.reduce([self.problem.costs(o, b).optimizer_s for o in options])
                if not levels:
                    values[level.rows[k], k, :] = update[:, -1]
                else:
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
        hops = self._hops(b)
        best, place, index = np.inf, 0, 0
        for q, level in enumerate(self.space.levels, start=1):
            if vector in level.vectors:
                at = level.vectors.index(vector)
                if levels[q - 1][at, :, 0].min() < best:
                    best, place, index = float(levels[q - 1][at, :, 0].min()), q, at
        if not place:
            return None
        k = int(levels[place - 1][index, :, 0].argmin())
        stages = []
        start = 0
        for q in range(place, 1, -1):
            level = self.space.levels[q - 1]
            row = int(np.flatnonzero(level.rows[k] == index)[0])
            rests = level.rests[k][row : row + 1]
            ways = []
            for o in self._options[k]:
                costs = self._stage(o, b, m, q)
                through = self._through(costs, b, m, q, rests, levels[q - 2], hops[k])[0, start]
                ways.append((float(through.min()), o, int(through.argmin())))
            _, option, stop = min(ways)
            stages.append(TemplateStage(option.kind, start, stop, *option[1:]))
            index, start = int(rests[0]), stop
            k = int((levels[q - 2][index, :, stop] + hops[k]).argmin())
        option = min(self._options[k], key=lambda o: float(self._stage(o, b, m, 1)[0][start, -1]))
        stages.append(TemplateStage(option.kind, start, self.problem.num_blocks, *option[1:]))
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
