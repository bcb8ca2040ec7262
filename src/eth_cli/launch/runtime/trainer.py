"""The training loop of one rank, inside an initialised default process group.

One optimizer step: read this rank's part of the batch, run the pipeline (gradients are summed block
by block meanwhile), agree with all ranks, update. Who starts the processes is none of its business:
`eth_cli.launch.runtime.worker` does it under torchrun, tests do it themselves.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from eth_cli.launch import checkpoints, paces, precision
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.dataset import TokenSource
from eth_cli.launch.runtime import checkpoint
from eth_cli.launch.runtime.buckets import BucketPlan, make_buckets
from eth_cli.launch.runtime.data import BatchReader
from eth_cli.launch.runtime.gradsync import GradientSync, bucket_limit
from eth_cli.launch.runtime.groups import create_groups
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.runtime.metrics import RunLogs, StepMetrics, continue_logs, reporting_rank
from eth_cli.launch.runtime.optim import Optimizer, learning_rate
from eth_cli.launch.runtime.pacing import Pacer, stage_pace
from eth_cli.launch.runtime.pipeline import PipelineRunner
from eth_cli.launch.runtime.scaling import LossScale
from eth_cli.launch.runtime.segments import sync_segments
from eth_cli.launch.runtime.stage import StageModule, StageOptions
from eth_cli.launch.status import StatusWriter
from eth_cli.model import ModelSpec
from eth_cli.models.build import TORCH_DTYPES
from eth_cli.plan import Plan

_SLOWEST_STEP = 5.0
"""A later step may take so many times as long as the first one before its waits end."""
_CLIP_EPSILON = 1e-6
"""Added to the norm that gradients are divided by, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What all ranks know of a step after its one all-reduce of scalars."""

    loss: float
    grad_norm: float
    stop: bool
    """Whether any rank was asked to stop."""
    num_writing: int = 0
    """Ranks that still write the checkpoint in the background."""
    num_failed: int = 0
    """Ranks on which writing it has failed."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may be applied; if not, every rank skips it."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Trainer:
    """Trains one rank's stage. All ranks of the plan construct and call theirs together."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        *,
        rank: int,
        options: RunOptions,
        folder: RunFolder,
        source: TokenSource,
        device: torch.device | None = None,
        status: StatusWriter | None = None,
        on_step: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        """``on_step`` is called on every rank after each step."""
        self.plan = plan
        self.spec = spec
        self.rank = rank
        self.options = options
        self.folder = folder
        self.device = device or torch.device("cpu")
        self.on_step = on_step
        place = plan.ranks[rank]
        stages = plan.pipelines[place.pipeline].stages
        stage = stages[place.stage]
        self.journal = Journal(place=place, status=status, events_path=folder.events_of(rank))
        self.journal.begin("build")
        segments = sync_segments(plan, is_tied=spec.tied)
        self.groups = create_groups(
            plan,
            segments,
            rank=rank,
            timeout=timedelta(seconds=options.start_timeout_s),
        )
        self.pacer = Pacer(stage_pace(plan, pipeline=place.pipeline, stage=place.stage))
        boundary = TORCH_DTYPES[plan.dtype]
        self.module = StageModule(
            spec,
            stage.blocks,
            StageOptions(
                seed=options.seed,
                device=self.device,
                recompute=stage.recompute,
                dtype=TORCH_DTYPES[precision.rank_dtype(plan, rank)],
                boundary=boundary,
                loss_chunk=options.loss_chunk,
                tensor=self.groups.tensor,
            ),
        )
        self.parameters = tuple(self.module.owned_parameters())
        buckets, stores = make_buckets(
            self.parameters,
            BucketPlan(
                segments=segments,
                bucket_bytes=bucket_limit(options.grad_sync, options.bucket_bytes),
                is_sharded=plan.sharded_optimizer,
            ),
            spec=spec,
            rank=rank,
            groups=self.groups,
        )
        self.sync = GradientSync(
            self.parameters,
            buckets=buckets,
            stores=stores,
            mode=options.grad_sync,
            dtype=TORCH_DTYPES[options.reduce_dtype],
            num_micro_batches=plan.pipelines[place.pipeline].micro_batches,
            rank=rank,
            journal=self.journal,
            block_is_done=self.pacer.end_block_backward,
        )
        self.pipeline = PipelineRunner(
            self.module,
            plan=plan,
            spec=spec,
            rank=rank,
            groups=self.groups,
            device=self.device,
            boundary=boundary,
            journal=self.journal,
            pacer=self.pacer,
        )
        is_mixed = len(precision.used_dtypes(plan)) > 1
        self.optimizer = Optimizer(
            self.parameters,
            buckets,
            options,
            rank=rank,
            masters=self.module.take_masters(),
            dtype=torch.float32 if is_mixed else boundary,
        )
        self.loss_scale = LossScale(is_used=precision.scales_loss(plan))
        self.reader = BatchReader(
            source,
            plan=plan,
            pipeline=place.pipeline,
            is_first=place.stage == 0,
            is_last=place.stage == len(stages) - 1,
            seed=options.seed,
            device=self.device,
        )
        self._data_digest = source.digest
        self.step = 0
        """Optimizer steps taken."""
        self._saved_step: int | None = None
        self._longest_step_s = 0.0
        self.stop_requested = False
        """Whether this rank itself was asked to stop."""
        if options.resume:
            self._resume()
        self._checkpoints = checkpoint.CheckpointWriter(
            folder,
            group=self.groups.checkpoint,
            keep=options.keep,
            resumed_from=self._saved_step,
        )
        is_first_of_last = rank == plan.ranks_of(place.pipeline, len(stages) - 1)[0]
        self._logs = self._open_logs(reads_samples=is_first_of_last)

    def request_stop(self) -> None:
        """Stop all ranks after the step in progress; safe in a signal handler."""
        self.stop_requested = True

    def train(self) -> bool:
        """Train until the last step, or until any rank is asked to stop; save at the end.

        Returns:
            Whether the training was stopped before its last step.
        """
        stop = False
        every = self.options.checkpoint_every
        while self.step < self.options.steps and not stop:
            agreed = self.train_step()
            stop = agreed.stop
            if self._checkpoints.is_busy and (agreed.num_failed or not agreed.num_writing):
                # Nobody waits here for long: every rank has written, or one has failed for all.
                self._finish_saving()
            if every and self.step % every == 0 and self.step < self.options.steps and not stop:
                self._start_saving()
        self._finish_saving()
        if self._saved_step != self.step:
            self.save()
        self._close_logs()
        return self.step < self.options.steps

    def train_step(self) -> Agreement:
        """One optimizer step on one global batch."""
        start_s = time.time()
        self.journal.enter("training", step=self.step + 1)
        batch = self.reader.read(self.step)
        self.sync.begin()
        loss = self.pipeline.run(batch, scale=self.loss_scale.value)
        self.sync.finish()
        agreed = self._agree(loss)
        if agreed.is_finite:
            self._update(agreed.grad_norm)
        self.loss_scale.update(is_finite=agreed.is_finite)
        self.journal.end_step(start_s, memory_bytes=_peak_memory_bytes(self.device))
        metrics = StepMetrics(
            step=self.step + 1,
            loss=agreed.loss,
            grad_norm=agreed.grad_norm,
            lr=learning_rate(self.options, self.step),
            tokens=batch.num_valid,
            step_time_s=time.time() - start_s,
            skipped=not agreed.is_finite,
        )
        self._logs.write(metrics, batch.samples)
        self.journal.flush()
        self._note_duration(metrics.step_time_s)
        self.step += 1
        if self.on_step is not None:
            self.on_step(metrics)
        return agreed

    def _agree(self, loss: torch.Tensor) -> Agreement:
        """Sum norm, loss and wishes to stop over all ranks; the step's only other collective.

        A norm or loss that is not finite on one rank makes the sum so on every rank, and the sum is
        the same, bit by bit, everywhere: so all ranks clip, skip and stop alike.
        """
        self.journal.begin("AGREE", waits=True)
        stop = self.stop_requested or (self.rank == 0 and self.folder.stop.exists())
        votes = torch.tensor(
            [float(stop), *self._checkpoints.votes()], dtype=torch.float64, device=self.device
        )
        totals = torch.cat([torch.stack([self.sync.norm_squared(), loss]), votes])
        dist.all_reduce(totals)
        norm_squared, total_loss, num_stops, num_writing, num_failed = totals.tolist()
        return Agreement(
            loss=total_loss,
            grad_norm=norm_squared**0.5 / self.loss_scale.value,
            stop=num_stops > 0,
            num_writing=int(num_writing),
            num_failed=int(num_failed),
        )

    def _update(self, grad_norm: float) -> None:
        self.journal.begin("OPTIMIZER")
        start_s = time.time()
        self.pacer.begin()
        clip, factor = self.options.clip, 1 / self.loss_scale.value
        if clip is not None and grad_norm > clip:
            factor *= clip / (grad_norm + _CLIP_EPSILON)
        if factor != 1:
            self.sync.scale(factor)
        self.optimizer.step(self.step)
        self.pacer.end_optimizer(self.optimizer.num_parameters)
        self.journal.span("OPTIMIZER", start_s)

    # --- Checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the steps so far; on return it is complete."""
        with self._saving("CHECKPOINT"):
            self._checkpoints.save(self._checkpoint_info(), optimizer=self.optimizer)
        self._saved_step = self.step

    def _start_saving(self) -> None:
        """Begin a checkpoint of the steps so far, and go on training while it is written."""
        self._finish_saving()
        with self._saving("CHECKPOINT"):
            self._checkpoints.start(self._checkpoint_info(), optimizer=self.optimizer)
        self._saved_step = self.step

    def _finish_saving(self) -> None:
        """Wait for the checkpoint in the background, if there is one; raises what it failed of."""
        if not self._checkpoints.is_busy:
            return
        with self._saving("CHECKPOINT_WAIT"):
            written = self._checkpoints.finish()
        if written is not None:
            self.journal.span("CHECKPOINT_WRITE", *written)

    @contextlib.contextmanager
    def _saving(self, operation: str) -> Iterator[None]:
        """What stalls training for a checkpoint: told to the launcher, and a span."""
        self.journal.enter("saving")
        self.journal.begin(operation, waits=True)
        start_s = time.time()
        # A disk may be much slower than a step.
        self.groups.set_timeout(timedelta(seconds=self.options.start_timeout_s))
        yield
        self._limit_waits()
        self.journal.span(operation, start_s)
        self.journal.flush()

    def _checkpoint_info(self) -> checkpoints.CheckpointInfo:
        info = checkpoints.CheckpointInfo.of(
            step=self.step,
            plan=self.plan,
            spec=self.spec,
            options=self.options,
            data_digest=self._data_digest,
        )
        if not self.loss_scale.is_used:
            return info
        scale = self.loss_scale
        return info.model_copy(
            update={"loss_scale": scale.value, "num_finite_steps": scale.num_finite}
        )

    def _resume(self) -> None:
        """Go on from a checkpoint that is known to be intact; from the start where there is none.

        The launcher has looked for it; without a launcher rank 0 does.
        """
        self.journal.begin("load", waits=True)
        chosen = self.options.resume_step
        if chosen is None and self.rank == 0:
            found = checkpoints.find_intact(self.folder).info
            chosen = -1 if found is None else found.step
        step = torch.tensor(-1 if chosen is None else chosen, device=self.device)
        dist.broadcast(step, src=0)
        if step < 0:
            return
        info = checkpoints.read_info(self.folder, int(step))
        checkpoints.check_resumable(
            info,
            plan=self.plan,
            spec=self.spec,
            options=self.options,
            data_digest=self._data_digest,
            folder=self.folder,
        )
        checkpoint.load(info, folder=self.folder, optimizer=self.optimizer)
        self.loss_scale.restore(info.loss_scale, info.num_finite_steps)
        self.step = self._saved_step = info.step

    # --- Logs and limits ----------------------------------------------------------------------

    def _open_logs(self, *, reads_samples: bool) -> RunLogs:
        if self.rank == 0:
            continue_logs(self.folder, self.step)
        dist.barrier()
        reports = self.rank == reporting_rank(self.plan)
        logs_samples = reads_samples and self.options.sample_log
        return RunLogs(
            metrics=self.folder.metrics if reports else None,
            samples=self.folder.samples_of(self.rank) if logs_samples else None,
        )

    def _close_logs(self) -> None:
        if self.pacer.is_behind:
            self.journal.scalar(paces.MISSED, self.pacer.num_missed)
            self.journal.scalar(paces.WORST, self.pacer.worst_miss_s)
            self.journal.scalar("lost_pace_s", self.pacer.lost_s)
        self.journal.flush()
        self._logs.close()

    def _note_duration(self, step_time_s: float) -> None:
        if step_time_s > self._longest_step_s:
            self._longest_step_s = step_time_s
            self._limit_waits()

    def _limit_waits(self) -> None:
        """From the first step on it is known how long a rank may have to wait for others."""
        limit_s = self.options.hang_timeout_s + _SLOWEST_STEP * self._longest_step_s
        self.groups.set_timeout(timedelta(seconds=limit_s))


def _peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process held: allocated on a GPU, resident on a CPU [bytes]."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
