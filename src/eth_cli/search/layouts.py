"""Like pipelines laid out together: what sharing nodes makes of their transfers and their sync.

So many *copies* of a template stand side by side, stage by stage. Of one copy alone the stages
follow each other through a node, which costs no transfer between nodes but makes the node's NIC
carry the gradients of many stages. Of as many copies as a node has devices, a node holds one stage
of all of them: one ring for their gradients, but all their activations cross. What is best lies
somewhere between, and depends on the links. Estimates by formulas; plans are simulated.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np

from eth_cli.buckets import GRADIENT_BYTES
from eth_cli.search.pricing import Resource
from eth_cli.search.templates import Floats, Option, Problem, Template, TemplateStage
from eth_cli.search.timeline import PipelineTimes, chain_s, period_s


class Bundle(NamedTuple):
    """A template and how many copies of it are laid out together."""

    template: Template
    copies: int


class LaidOut(NamedTuple):
    """What a pipeline of a bundle costs, by formula."""

    bundle: Bundle
    times: PipelineTimes
    chain_s: float
    period_s: float
    after_s: float
    """Gradient sync that nothing hides, and the optimizer's update [s]."""
    most: int
    """Most micro-batches that memory has room for."""
    uses: tuple[tuple[Resource, int], ...]

    def micro_batches(self, time_s: float) -> int:
        """Most that it finishes within a step time."""
        spare_s = time_s - self.after_s - self.chain_s
        return 0 if spare_s < 0 else min(self.most, 1 + int(spare_s / self.period_s))

    def time_s(self, micro_batches: int) -> float:
        """Step time with so many micro-batches [s]."""
        return self.chain_s + (micro_batches - 1) * self.period_s + self.after_s


class _Known(NamedTuple):
    """What is the same for any number of copies of a template."""

    most: int
    update_s: float
    uses: tuple[tuple[Resource, int], ...]


class Layouts:
    """Estimates for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.room = [max(nodes.values(), default=0) for nodes in problem.in_nodes]
        """By kind: most usable devices of it in a node."""
        self.meets = self._meets()
        """By pair of kinds: whether any node has both."""
        self.num_devices = sum(problem.counts)
        self._crossing: dict[tuple[Option, Option, int, int], float] = {}
        self._rings: dict[object, float] = {}
        self._known: dict[Template, _Known] = {}

    def _meets(self) -> list[list[bool]]:
        nodes = [set(found) for found in self.problem.in_nodes]
        return [[bool(mine & others) for others in nodes] for mine in nodes]

    def numbers_of_copies(self) -> list[int]:
        """The numbers of copies that are worth a look: powers of two up to a node's devices."""
        found = [1]
        while found[-1] * 2 <= max(self.room):
            found.append(found[-1] * 2)
        return found

    def lay_out(self, bundle: Bundle) -> LaidOut | None:
        """Estimate a bundle; None: memory has no room for it."""
        template, copies = bundle
        known = self._known.get(template)
        if known is None:
            known = self._known[template] = self._look_up(template)
        most, update_s, uses = known
        if most < 1:
            return None
        problem = self.problem
        in_node = self._share_nodes(template, copies)
        best = problem.times(template)
        down, up = list(best.send_forward_s), list(best.send_backward_s)
        together = self._pipelines_in_node(template, in_node)
        for s, (upper, lower) in enumerate(itertools.pairwise(template.stages)):
            if in_node[s] != in_node[s + 1]:
                size = template.micro_batch_size
                most_at_once = max(together[s], together[s + 1])
                down[s] = self.crossing_s(upper.option, lower.option, size, most_at_once)
                up[s] = self.crossing_s(lower.option, upper.option, size, most_at_once)
        times = best._replace(send_forward_s=tuple(down), send_backward_s=tuple(up))
        return LaidOut(
            bundle,
            times,
            chain_s(times),
            period_s(times),
            self._sync_s(bundle, in_node, times) + update_s,
            most,
            uses,
        )

    def _look_up(self, template: Template) -> _Known:
        return _Known(
            self.problem.max_micro_batches(template),
            self.problem.optimizer_s(template),
            self.problem.uses(template),
        )

    def _share_nodes(self, template: Template, copies: int) -> list[int]:
        """By stage a number: stages of the same number are in the same nodes."""
        numbers: list[int] = []
        left: Counter[int] = Counter()
        for s, stage in enumerate(template.stages):
            need = copies * stage.tensor_parallel
            before = template.stages[s - 1].kind if s else stage.kind
            if not s or not self.meets[before][stage.kind] or left[stage.kind] < need:
                numbers.append(s)
                left = Counter(dict(enumerate(self.room)))
            else:
                numbers.append(numbers[-1])
            left[stage.kind] -= need
        return numbers

    def _pipelines_in_node(self, template: Template, in_node: list[int]) -> list[int]:
        """By stage: how many like pipelines a node has room for the same stages of."""
        widths: Counter[tuple[int, int]] = Counter()
        for number, stage in zip(in_node, template.stages, strict=True):
            widths[number, stage.kind] += stage.tensor_parallel
        most = {
            number: min(self.room[k] // w for (n, k), w in widths.items() if n == number)
            for number in set(in_node)
        }
        return [max(1, most[number]) for number in in_node]

    def crossing_s(self, source: Option, target: Option, size: int, together: int) -> float:
        """Boundary transfer between nodes while those of other pipelines are on their way [s]."""
        key = (source, target, size, together)
        if key not in self._crossing:
            problem = self.problem
            time_s = problem.network.best_transfer_s(
                problem.kinds[source.kind].device_type,
                problem.kinds[target.kind].device_type,
                problem.model.profile.model.boundary_bytes_per_sample * size,
                flows=together * target.tensor_parallel,
                across_nodes=True,
            )
            if time_s is None:
                time_s = problem.one_way_s(source.kind, target, size)
            self._crossing[key] = time_s
        return self._crossing[key]

    def _sync_s(self, bundle: Bundle, in_node: list[int], times: PipelineTimes) -> float:
        """Sync that nothing hides: the rings of all stages in a node share its NIC [s]."""
        stages = bundle.template.stages
        owners = self.num_devices // sum(s.tensor_parallel for s in stages)
        if owners < 2:
            return 0.0
        flows: Counter[int] = Counter()
        for number, stage in zip(in_node, stages, strict=True):
            flows[number] += stage.tensor_parallel
        others = set(range(len(self.room))) - {stage.kind for stage in stages}
        exposed = hidden = 0.0
        for s, stage in enumerate(stages):
            exposed = max(
                exposed,
                self.ring_s(
                    stage,
                    owners,
                    flows=flows[in_node[s]],
                    inside=owners
                    <= min(bundle.copies, self.room[stage.kind] // stage.tensor_parallel),
                    others=frozenset(others),
                )
                - hidden,
            )
            hidden += times.backward_s[s]
            if s < len(times.send_backward_s):
                hidden += times.send_backward_s[s]
        return exposed

    def ring_s(
        self,
        stage: TemplateStage,
        owners: int,
        *,
        flows: int,
        inside: bool,
        others: frozenset[int],
    ) -> float:
        """All-reduce of a stage's gradients [s].

        Args:
            flows: transfers at once on a NIC, of all rings that use it.
            inside: whether all owners are in one node.
            others: kinds whose devices own the same blocks in other pipelines.
        """
        count = self.problem.model.profile.model.stage_parameters(stage.start, stage.stop)
        key = (count, owners, stage.kind, stage.tensor_parallel, flows, inside, others)
        if key not in self._rings:
            names = [kind.device_type for kind in self.problem.kinds]
            num_bytes = count * GRADIENT_BYTES / (owners * stage.tensor_parallel)
            hops = [
                self.problem.network.best_transfer_s(
                    names[stage.kind], names[k], num_bytes, flows=flows, across_nodes=not inside
                )
                for k in (stage.kind, *others)
            ]
            slowest = max((h for h in hops if h is not None), default=0.0)
            self._rings[key] = 2 * (owners - 1) * slowest
        return self._rings[key]

    # --- For the search for templates ----------------------------------------------------------

    def hops(self, size: int, copies: int) -> Floats:
        """Both ways over a boundary on average, by [option, option]: as `Problem.hops` [s].

        Of neighbours of one kind only those cross that a node has no room for.
        """
        options = self.problem.options
        inside = self.problem.hops(size)
        found = np.empty_like(inside)
        for i, upper in enumerate(options):
            for j, lower in enumerate(options):
                together = max(
                    min(copies, self.room[o.kind] // o.tensor_parallel) for o in (upper, lower)
                )
                across = self.crossing_s(upper, lower, size, together)
                across += self.crossing_s(lower, upper, size, together)
                part = 1.0
                if self.meets[upper.kind][lower.kind]:
                    part = min(1.0, copies * lower.tensor_parallel / self.room[lower.kind])
                # Options that never meet have no time inside: infinite times nothing is no number.
                found[i, j] = across
                if part < 1.0:
                    found[i, j] = part * across + (1 - part) * inside[i, j]
        return found

    def sync_s(self, copies: int) -> Floats:
        """All-reduce of a stage's gradients with those of as many others as share its nodes [s].

        By [start, stop], for single devices of the kind of most room.
        """
        problem = self.problem
        kind = max(range(len(self.room)), key=lambda k: self.room[k])
        num_blocks = problem.num_blocks
        seconds = np.zeros((num_blocks + 1, num_blocks + 1))
        for start in range(num_blocks):
            for stop in range(start + 1, num_blocks + 1):
                num_stages = max(1, round(num_blocks / (stop - start)))
                owners = self.num_devices // num_stages
                if owners > 1:
                    seconds[start, stop] = self.ring_s(
                        TemplateStage(kind, start, stop),
                        owners,
                        flows=min(num_stages, max(1, self.room[kind] // copies)),
                        inside=owners <= copies,
                        others=frozenset(),
                    )
        return seconds
