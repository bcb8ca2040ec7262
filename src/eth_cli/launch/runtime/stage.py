"""One rank's stage: its blocks, and torch's pipeline runtime on the plan's own order of actions.

`torch.distributed.pipelining` moves activations and gradients and runs autograd; the order comes
from `eth_cli.schedule`, so the runtime executes what the simulator times. Shapes: B micro-batch
size, S sequence length, H hidden size, V vocabulary size, M micro-batches of this pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by
from torch.utils.checkpoint import checkpoint

from eth_cli.launch.dataset import IGNORED_LABEL
from eth_cli.launch.runtime.data import Batch
from eth_cli.launch.runtime.groups import Groups
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.runtime.pacing import Pacer
from eth_cli.model import ModelSpec
from eth_cli.models import build
from eth_cli.plan import Plan
from eth_cli.schedule import Action, Op, pipeline_order


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedParameter:
    """One parameter that a rank holds."""

    name: str
    """Its name in the whole model, see `eth_cli.models.build.canonical_name`."""
    block: int
    """The block whose backward completes its gradient: the lowest of the stage that uses it."""
    parameter: nn.Parameter


class StageModule(nn.Module):
    """The blocks ``[start, stop)`` of a model, one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: tuple[int, int],
        *,
        seed: int,
        recompute: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._start = blocks[0]
        self._recompute = recompute
        self.blocks = nn.ModuleList()
        for index in range(*blocks):
            block = build.build_block(spec, index, dtype=torch.float32, device=device)
            build.initialise_block(block, spec, index, seed=seed)
            self.blocks.append(block)
        if spec.tied and blocks == (0, spec.num_blocks):
            build.tie(self.blocks[0], self.blocks[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 or (B, S, H) -> (B, S, H) or logits (B, S, V)."""
        for block in self.blocks:
            if self._recompute:
                # No block draws random numbers, so there is no generator state to restore.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x

    def owned_parameters(self) -> Iterator[OwnedParameter]:
        """Every parameter once, by ascending block."""
        seen: set[nn.Parameter] = set()
        for index, block in enumerate(self.blocks, start=self._start):
            for local_name, parameter in block.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    name = build.canonical_name(self._spec, index, local_name)
                    yield OwnedParameter(name=name, block=index, parameter=parameter)


class _ObservedStage(PipelineStage):
    """A stage that tells its `PipelineRunner` what it executes, and keeps few buffers.

    torch keeps a receive buffer for every micro-batch; here one lives from its receive to the end
    of its micro-batch's backward, so that memory grows with micro-batches in flight only.
    """

    runner: PipelineRunner
    boundary_shape: tuple[int, int, int]
    """(B, S, H)"""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.runner.compute_begins(Op.FORWARD, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_last:  # on the last stage the loss belongs to the forward
            self.runner.compute_ends(Op.FORWARD, fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.runner.compute_begins(Op.BACKWARD, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.runner.compute_ends(Op.BACKWARD, bwd_chunk_id)
        for info in self._received(bwd_chunk_id):
            info.buffer = None

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        self.runner.executes(Op.SEND_FORWARD, fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        self.runner.executes(Op.RECV_FORWARD, fwd_chunk_id)
        self._provide(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        self.runner.executes(Op.SEND_BACKWARD, bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        self.runner.executes(Op.RECV_BACKWARD, bwd_chunk_id)
        self._provide(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _received(self, micro_batch: int) -> Iterator[Any]:
        infos = (*self.args_recv_info[micro_batch], *self.grad_recv_info[micro_batch])
        return (info for info in infos if not info.is_root_arg)

    def _provide(self, infos: Iterable[Any]) -> None:
        for info in infos:
            info.buffer = torch.empty(self.boundary_shape, device=self.device)


class PipelineRunner:
    """Runs one rank's stage over its pipeline's share of a batch."""

    def __init__(
        self,
        module: StageModule,
        *,
        plan: Plan,
        spec: ModelSpec,
        rank: int,
        groups: Groups,
        device: torch.device,
        journal: Journal,
        pacer: Pacer,
    ) -> None:
        place = plan.ranks[rank]
        pipeline = plan.pipelines[place.pipeline]
        num_stages = len(pipeline.stages)
        self._journal = journal
        self._pacer = pacer
        self._stage_index = place.stage
        self._is_last = place.stage == num_stages - 1
        self._device = device
        self._began = 0.0
        self._num_valid = 1
        self.executed: list[Action] = []
        """What was executed in the step in progress, in order."""

        order = pipeline_order(num_stages, pipeline.micro_batches)
        compute = [action for action in order[place.stage] if action.op.is_compute]
        # What each action is followed by, to tell the launcher what this rank waits for.
        self._next = dict(zip([None, *compute], [*compute, None], strict=True))

        hidden = torch.empty(
            pipeline.micro_batch_size,
            plan.seq_len,
            spec.hidden_size,
            device="meta",
            requires_grad=True,
        )
        tokens = torch.empty(
            pipeline.micro_batch_size, plan.seq_len, dtype=torch.int64, device="meta"
        )
        # With the shapes of both ends given, torch asks neighbours for none. The last stage's
        # output goes nowhere, so its shape does not matter.
        stage = _ObservedStage(
            module,
            place.stage,
            num_stages,
            device,
            input_args=tokens if place.stage == 0 else hidden,
            output_args=hidden,
            group=groups.pipeline,
        )
        stage.runner = self
        stage.boundary_shape = (pipeline.micro_batch_size, plan.seq_len, spec.hidden_size)
        self._schedule = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call] # torch's has no types
            [stage], pipeline.micro_batches, loss_fn=self._loss, scale_grads=False
        )
        # torch wants each group rank's list; ranks of a group ascend, stages need not.
        self._schedule._prepare_schedule_with_comms(
            {
                group_rank: [_Action.from_str(str(action)) for action in order[plan.ranks[r].stage]]
                for group_rank, r in enumerate(groups.pipeline_ranks)
            },
            format="compute_comms",
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters'.

        Returns:
            This pipeline's part of the loss of the global batch, fp64 scalar: the sum over its
            valid tokens divided by the valid tokens of the global batch. Zero except on the last
            stage.
        """
        self.executed.clear()
        # A batch of ignored labels only has no gradient; it must not divide by zero.
        self._num_valid = max(1, batch.num_valid)
        losses: list[torch.Tensor] = []
        self._announce(None)
        inputs = () if batch.tokens is None else (batch.tokens,)
        self._schedule.step(*inputs, target=batch.labels, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of token losses / valid tokens of the global batch: (B, S, V), (B, S) -> scalar."""
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        loss = total / self._num_valid
        self.compute_ends(Op.FORWARD, self.executed[-1].micro_batch)
        return loss

    # --- What the stage reports ---------------------------------------------------------------

    def executes(self, op: Op, micro_batch: int) -> None:
        """An action is executed."""
        self.executed.append(Action(self._stage_index, op, micro_batch))

    def compute_begins(self, op: Op, micro_batch: int) -> None:
        """A forward or backward begins; what it needs has arrived."""
        self.executes(op, micro_batch)
        self._journal.begin(str(self.executed[-1]))
        self._began = time.time()
        self._pacer.begin()

    def compute_ends(self, op: Op, micro_batch: int) -> None:
        """The real forward or backward is done."""
        if op is Op.FORWARD:
            self._pacer.end_forward()
        else:
            self._pacer.end_backward()
        self._journal.span(op.value, self._began, micro_batch=micro_batch)
        self._announce(Action(self._stage_index, op, micro_batch))

    def _announce(self, done: Action | None) -> None:
        """Say what comes next, and whether it may have to wait for a neighbour."""
        following = self._next[done]
        if following is None:
            self._journal.begin("SEND", waits=True)
            return
        source_is_here = self._stage_index == 0 if following.op is Op.FORWARD else self._is_last
        self._journal.begin(str(following), waits=not source_is_here)
