"""Templates to make a plan from, seen from those of an old plan, and what each does in a time.

The old ones, their neighbours (a stage less or more), chains of one option, and chains that go over
from an option to one of another kind; all but the old ones with their cuts made anew.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from eth_cli.search.heuristic import recut
from eth_cli.search.master import Column
from eth_cli.search.templates import Option, Problem, Template
from eth_cli.search.timeline import Clock

_LONGEST_CHAIN = 16
"""Stages of the longest chain of one option; old templates may be longer."""
_LONGEST_PAIR = 8
"""Stages of the longest chain of two options."""
_CHANGED = 12
"""Different old templates, the commonest first, whose neighbours are templates too."""


class Entry:
    """A template with what it takes and does."""

    def __init__(self, problem: Problem, template: Template, ring_s: Iterable[float]) -> None:
        """
        Args:
            ring_s: by stage the sync of all its gradients over owners of several nodes [s].
        """
        self.template = template
        self.uses = problem.uses(template)
        self._most = problem.max_micro_batches(template)
        self._clock = Clock(problem.times(template))
        self._update_s = problem.optimizer_s(template)
        times = self._clock.times
        # A stage's sync is hidden by its own last backward and by those of the stages before it.
        hidden_s = itertools.accumulate(
            backward + sent
            for backward, sent in zip(times.backward_s, (0.0, *times.send_backward_s), strict=True)
        )
        self._syncs = list(zip(ring_s, hidden_s, strict=True))

    @property
    def slowest_s(self) -> float:
        """Time of all micro-batches that it has memory for, sync aside [s]."""
        return self._clock(self._most) + self._update_s

    def micro_batches(self, time_s: float, sync_weight: float) -> int:
        """Most micro-batches that it finishes within a step time.

        Args:
            sync_weight: how many times as long a stage's sync takes as on the best links alone.
        """
        exposed_s = max(0.0, *(sync_weight * ring - hidden for ring, hidden in self._syncs))
        return self._clock.most_within(time_s - self._update_s - exposed_s, self._most)

    def column(self, time_s: float, sync_weight: float) -> Column[Template]:
        """The template as a column of the master problem for a step time."""
        micro_batches = self.micro_batches(time_s, sync_weight)
        return Column(self.template, self.template.micro_batch_size, self.uses, micro_batches)


class Pool:
    """Templates of one problem, each with its entry."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.entries: dict[Template, Entry] = {}
        self._rings: dict[int, float] = {}

    def entry(self, template: Template) -> Entry:
        """The entry of a template, added where it is new."""
        if template not in self.entries:
            rings = [self._ring_s(stage.start, stage.stop) for stage in template.stages]
            self.entries[template] = Entry(self.problem, template, rings)
        return self.entries[template]

    def _ring_s(self, start: int, stop: int) -> float:
        count = self.problem.model.profile.model.stage_parameters(start, stop)
        if count not in self._rings:
            owners = self.problem.largest_node + 1
            self._rings[count] = self.problem.best_ring_s(count, owners, across_nodes=True)
        return self._rings[count]

    def fill(self, old: Counter[Template]) -> None:
        """Add the templates of an old plan, which come in these numbers, and what is like them."""
        for template in [*old, *self._like(old)]:
            if self.problem.max_micro_batches(template):
                self.entry(template)

    def _like(self, old: Counter[Template]) -> Iterator[Template]:
        used = list(dict.fromkeys(stage.option for t in old for stage in t.stages))
        for k in range(len(self.problem.kinds)):
            narrow = [o for o in self.problem.options if o.kind == k and not o.recompute]
            used += [o for o in narrow[:1] if o not in used]
        for template, _ in old.most_common(_CHANGED):
            yield from self._neighbours(template, used)
        for option, b in itertools.product(used, self.problem.micro_batch_sizes):
            room = self.problem.groups[option.kind, option.tensor_parallel]
            longest = min(_LONGEST_CHAIN, self.problem.num_blocks, room)
            for num_stages in range(1, longest + 1):
                yield from self._cut([option] * num_stages, b)
        yield from self._pairs(used, sorted({t.micro_batch_size for t in old}))

    def _neighbours(self, template: Template, used: Sequence[Option]) -> Iterator[Template]:
        """A stage less, or one more of any option: beside its like, else at the ends."""
        options = [stage.option for stage in template.stages]
        b = template.micro_batch_size
        for at, option in enumerate(options):
            if len(options) > 1 and (at == 0 or options[at - 1] != option):
                yield from self._cut([*options[:at], *options[at + 1 :]], b)
        if len(options) == self.problem.num_blocks:
            return
        for option in used:
            last = [i + 1 for i, o in enumerate(options) if o.kind == option.kind][-1:]
            for at in last or [0, len(options)]:
                yield from self._cut([*options[:at], option, *options[at:]], b)

    def _pairs(self, used: Sequence[Option], sizes: Sequence[int]) -> Iterator[Template]:
        """Chains that begin with the kind that has more memory: the first stages need most."""
        capacity = [kind.capacity_bytes for kind in self.problem.kinds]
        pairs = [
            (o, p)
            for o, p in itertools.product(used, repeat=2)
            if (capacity[o.kind], -o.kind) > (capacity[p.kind], -p.kind)
        ]
        longest = min(_LONGEST_PAIR, self.problem.num_blocks)
        for (o, p), b in itertools.product(pairs, sizes):
            for num_stages in range(2, longest + 1):
                for ahead in range(1, num_stages):
                    yield from self._cut([o] * ahead + [p] * (num_stages - ahead), b)

    def _cut(self, options: Sequence[Option], micro_batch_size: int) -> Iterator[Template]:
        template = recut(self.problem, options, micro_batch_size)
        if template is not None:
            yield template
