"""Runs one rank's stage over its pipeline's share of a batch, in the plan's own order of actions.

The order comes from `eth_cli.schedule`, so what is executed is what the simulator times. It is run
here and not by `torch.distributed.pipelining`, whose stages have one rank each: here a stage may be
a tensor-parallel group, and its neighbours groups of other widths. Every rank of a group holds the
whole tensor of a boundary; each rank of the next group gets it from one of them.

Shapes: B micro-batch size, S sequence length, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eth_cli.launch.runtime.data import Batch
from eth_cli.launch.runtime.groups import Groups
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.runtime.pacing import Pacer
from eth_cli.launch.runtime.stage import StageModule
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.schedule import Action, Op, pipeline_order


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """Whom one rank exchanges the boundary tensors of one direction with."""

    source: int | None
    """The rank that it gets them from; None at the pipeline's end."""
    targets: tuple[int, ...]
    """The ranks that it hands its own to; none where others of its group do it."""


def neighbours(plan: Plan, rank: int, *, forward: bool) -> Neighbours:
    """Whom a rank gets activations from and hands them to; with ``forward=False`` gradients.

    Rank i of a group gets from rank i modulo the width of the group before it.
    """
    place = plan.ranks[rank]
    mine = plan.ranks_of(place.pipeline, place.stage)
    index = mine.index(rank)
    step = 1 if forward else -1

    def group(stage: int) -> tuple[int, ...]:
        inside = 0 <= stage < len(plan.pipelines[place.pipeline].stages)
        return plan.ranks_of(place.pipeline, stage) if inside else ()

    before, after = group(place.stage - step), group(place.stage + step)
    return Neighbours(
        source=before[index % len(before)] if before else None,
        targets=tuple(r for i, r in enumerate(after) if i % len(mine) == index),
    )


class PipelineRunner:
    """Forward and backward of all micro-batches of one rank's stage."""

    def __init__(
        self,
        module: StageModule,
        *,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        groups: Groups,
        device: torch.device,
        boundary: torch.dtype = torch.float32,
        journal: Journal,
        pacer: Pacer,
    ) -> None:
        place = plan.ranks[rank]
        pipeline = plan.pipelines[place.pipeline]
        num_stages = len(pipeline.stages)
        self._module = module
        self._journal = journal
        self._pacer = pacer
        self._device = device
        self._dtype = boundary
        self._group = groups.pipeline
        self._stage_index = place.stage
        self._is_first = place.stage == 0
        self._is_last = place.stage == num_stages - 1
        self._counts_loss = plan.ranks_of(place.pipeline, place.stage)[0] == rank
        self._micro_batch_size = pipeline.micro_batch_size
        self._boundary_shape = (pipeline.micro_batch_size, plan.seq_len, spec.hidden_size)
        self._down = neighbours(plan, rank, forward=True)
        self._up = neighbours(plan, rank, forward=False)
        self._order = pipeline_order(num_stages, pipeline.micro_batches)[place.stage]
        compute = [action for action in self._order if action.op.is_compute]
        # What each action is followed by, to tell the launcher what this rank waits for.
        self._next = dict(zip([None, *compute], [*compute, None], strict=True))
        self._began = 0.0
        self.executed: list[Action] = []
        """What was executed in the step in progress, in order."""

        self._arriving: dict[tuple[Op, int], tuple[torch.Tensor, list[dist.Work]]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def run(self, batch: Batch, *, scale: float = 1.0) -> torch.Tensor:
        """Run a step's share; gradients, times ``scale``, are added to the parameters'.

        Returns:
            This pipeline's part of the loss of the global batch, fp64 scalar: the sum over its
            valid tokens divided by the valid tokens of the global batch. Zero except on the first
            rank of the last stage.
        """
        self.executed.clear()
        # A batch of ignored labels only has no gradient; it must not divide by zero.
        per_token = 1 / max(1, batch.num_valid)
        size = self._micro_batch_size
        tokens = () if batch.tokens is None else torch.split(batch.tokens, size)
        labels = () if batch.labels is None else torch.split(batch.labels, size)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._announce(None)
        for action in self._order:
            self.executed.append(action)
            micro_batch = action.micro_batch
            if action.op is Op.FORWARD:
                loss = self._forward(action, tokens, labels, per_token * scale)
                if loss is not None and self._counts_loss:
                    total += loss
            elif action.op is Op.BACKWARD:
                self._backward(action)
            elif action.op is Op.SEND_FORWARD:
                self._send(self._outputs[micro_batch].detach(), self._down.targets)
            elif action.op is Op.SEND_BACKWARD:
                self._send(self._gradients.pop(micro_batch), self._up.targets)
            elif action.op is Op.RECV_FORWARD:
                self._receive(action, self._down.source)
            else:
                self._receive(action, self._up.source)
        while self._sent:
            self._sent.popleft()[0].wait()
        return total / scale

    def _forward(
        self,
        action: Action,
        tokens: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        factor: float,
    ) -> torch.Tensor | None:
        """One forward; of the last stage, with the loss times ``factor``, which it returns."""
        micro_batch = action.micro_batch
        if self._is_first:
            x = tokens[micro_batch]
        else:
            x = self._arrived(Op.RECV_FORWARD, micro_batch).requires_grad_()
            self._inputs[micro_batch] = x
        self._begin(action)
        output = self._module(x)
        loss = None
        if self._is_last:
            output = self._module.loss(output, labels[micro_batch]) * factor
            loss = output.detach()
        self._outputs[micro_batch] = output
        self._pacer.end_forward()
        self._end(action)
        return loss

    def _backward(self, action: Action) -> None:
        micro_batch = action.micro_batch
        gradient = None if self._is_last else self._arrived(Op.RECV_BACKWARD, micro_batch)
        self._begin(action)
        torch.autograd.backward(self._outputs.pop(micro_batch), gradient)
        if not self._is_first:
            computed = self._inputs.pop(micro_batch).grad
            assert computed is not None  # every block uses its input
            self._gradients[micro_batch] = computed
        self._pacer.end_backward()
        self._end(action)

    # --- Transfers ----------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, targets: Sequence[int]) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        if not targets:
            return
        tensor = tensor.contiguous()
        operations = [dist.P2POp(dist.isend, tensor, peer, self._group) for peer in targets]
        self._sent += [(work, tensor) for work in dist.batch_isend_irecv(operations)]

    def _receive(self, action: Action, source: int | None) -> None:
        buffer = torch.empty(self._boundary_shape, dtype=self._dtype, device=self._device)
        operation = dist.P2POp(dist.irecv, buffer, source, self._group)
        works = dist.batch_isend_irecv([operation])
        self._arriving[action.op, action.micro_batch] = (buffer, works)

    def _arrived(self, op: Op, micro_batch: int) -> torch.Tensor:
        buffer, works = self._arriving.pop((op, micro_batch))
        for work in works:
            work.wait()
        return buffer

    # --- What the launcher and the report are told ----------------------------------------------

    def _begin(self, action: Action) -> None:
        """A forward or backward begins; what it needs has arrived."""
        self._journal.begin(str(action))
        self._began = time.time()
        self._pacer.begin()

    def _end(self, action: Action) -> None:
        self._journal.span(action.op.value, self._began, micro_batch=action.micro_batch)
        self._announce(action)

    def _announce(self, done: Action | None) -> None:
        """Say what comes next, and whether it may have to wait for a neighbour."""
        following = self._next[done]
        if following is None:
            self._journal.begin("SEND", waits=True)
            return
        source_is_here = self._is_first if following.op is Op.FORWARD else self._is_last
        self._journal.begin(str(following), waits=not source_is_here)
