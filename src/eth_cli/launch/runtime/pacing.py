"""Emulated devices: a CPU process that takes exactly as long as the profile says.

Real work is done at once; then the process sleeps until the moment at which the emulated device
would be done. What happens next (sends, gradient sync) so happens at the right time. Nothing here
needs torch.

Left out: an emulated device does not slow down what another process does on the same cores. Where
real work takes longer than the pace, the pace cannot be kept; this is counted, and said once when
it matters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from eth_cli.model import EMBEDDING, HEAD, TRANSFORMER
from eth_cli.plan import Pacing, Plan

logger = logging.getLogger(__name__)

_BACK_TO_BACK_S = 1e-3
"""An action that begins so soon after the last one did not wait for another rank [s].

What Python does in between takes about half of it on a busy machine; a wait so short is hidden."""
_TOLERANCE_S = 1e-3
"""What torch and Python do beside the blocks may take so long [s]; only more is lost time."""
_NOTABLE_PART = 0.02
"""Lost time is worth a warning from this part of the paced time on."""
_JUDGE_AFTER_S = 1.0
"""Paced time before which nothing is said of the pace: first actions are slow anyway [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePace:
    """Times that a stage's device must take."""

    blocks: tuple[int, int]
    """Half-open range of the stage's blocks."""
    forward_s: tuple[float, ...]
    """Forward of each block for one micro-batch, the head's loss included [s]."""
    backward_s: tuple[float, ...]
    """Backward of each block for one micro-batch, recomputation included [s]."""
    optimizer_s_per_parameter: float
    """Update of one parameter [s]."""


def stage_pace(plan: Plan, *, pipeline: int, stage: int) -> StagePace | None:
    """The pace of a stage; None when its devices are real or the plan carries no times.

    Raises:
        LookupError: the device is emulated, but the plan lacks one of its times.
    """
    if plan.pacing is None or plan.cluster is None:
        return None
    place = plan.pipelines[pipeline].stages[stage]
    device_type = plan.cluster.devices[place.devices[0]].type
    if not plan.cluster.device_types[device_type].emulated:
        return None
    start, stop = place.blocks
    times = [
        _block_times(
            plan.pacing,
            device_type,
            _kind(block, plan.num_blocks),
            tensor_parallel=place.tensor_parallel,
            micro_batch_size=plan.pipelines[pipeline].micro_batch_size,
        )
        for block in range(start, stop)
    ]
    optimizers = {o.device: o.optimizer_s_per_parameter for o in plan.pacing.optimizers}
    return StagePace(
        blocks=place.blocks,
        forward_s=tuple(forward for forward, _ in times),
        backward_s=tuple(
            backward + (forward if place.recompute else 0.0) for forward, backward in times
        ),
        optimizer_s_per_parameter=optimizers.get(device_type, 0.0),
    )


def _kind(block: int, num_blocks: int) -> str:
    if block == 0:
        return EMBEDDING
    return HEAD if block == num_blocks - 1 else TRANSFORMER


def _block_times(
    pacing: Pacing, device_type: str, kind: str, *, tensor_parallel: int, micro_batch_size: int
) -> tuple[float, float]:
    wanted = (device_type, kind, tensor_parallel, micro_batch_size)
    for entry in pacing.blocks:
        if wanted == (entry.device, entry.block, entry.tensor_parallel, entry.micro_batch_size):
            return entry.forward_s, entry.backward_s
    raise LookupError(
        f"no time of the emulated {device_type} for the {kind} block at tensor_parallel "
        f"{tensor_parallel}, micro_batch_size {micro_batch_size}"
    )


def missing_paces(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """Pipeline, stage and what is missing, for each emulated stage that cannot be paced."""
    for i, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages)):
            try:
                stage_pace(plan, pipeline=i, stage=s)
            except LookupError as error:
                yield i, s, str(error.args[0])


class Pacer:
    """Holds one rank to its pace; without a pace it does nothing.

    Deadlines are absolute within an action, and an action that follows the last one without a wait
    begins at that one's deadline: so the inaccuracy of sleeping does not add up, however busy the
    machine is. Time lost to real work is not made up for, since that would hide it.
    """

    def __init__(self, pace: StagePace | None) -> None:
        self._pace = pace
        self._start = 0.0
        self._deadline = 0.0
        self._returned = -1.0
        self._overslept_s = 0.0
        self._has_warned = False
        self.paced_s = 0.0
        """Time that all actions should have taken [s]."""
        self.lost_s = 0.0
        """Time that they took longer, because real work did [s]."""
        self.num_missed = 0
        """Actions that took longer."""
        self.worst_miss_s = 0.0
        """By how much, at most [s]."""

    @property
    def is_behind(self) -> bool:
        """Whether so much time was lost that measured steps cannot be trusted."""
        return self.lost_s > _NOTABLE_PART * self.paced_s

    def begin(self) -> None:
        """An action begins: everything it needs is here."""
        if self._pace is None:
            return
        now = time.monotonic()
        back_to_back = now - self._returned < _BACK_TO_BACK_S
        self._start = self._deadline if back_to_back else now
        self._overslept_s = now - self._start

    def end_forward(self) -> None:
        """The real forward is done; return when the emulated one is."""
        if self._pace is not None:
            self._end("forward", sum(self._pace.forward_s))

    def end_block_backward(self, block: int) -> None:
        """A block's real backward is done; return when the emulated one is."""
        if self._pace is not None:
            first = block - self._pace.blocks[0]
            self._sleep_until(self._start + sum(self._pace.backward_s[first:]))

    def end_backward(self) -> None:
        """The real backward of all blocks is done; return when the emulated one is."""
        if self._pace is not None:
            self._end("backward", sum(self._pace.backward_s))

    def end_optimizer(self, num_parameters: int) -> None:
        """The real update is done; return when the emulated one is."""
        if self._pace is not None:
            self._end("optimizer", num_parameters * self._pace.optimizer_s_per_parameter)

    def _end(self, what: str, pace_s: float) -> None:
        self._deadline = self._start + pace_s
        lost_s = time.monotonic() - self._deadline - self._overslept_s
        self.paced_s += pace_s
        if lost_s > _TOLERANCE_S:
            self.num_missed += 1
            self.lost_s += lost_s
            self.worst_miss_s = max(self.worst_miss_s, lost_s)
            self._deadline += lost_s
            self._warn_once(what, pace_s, lost_s)
        self._sleep_until(self._deadline)
        self._returned = time.monotonic()

    def _sleep_until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
            self._overslept_s = time.monotonic() - deadline

    def _warn_once(self, what: str, pace_s: float, lost_s: float) -> None:
        if self.is_behind and self.paced_s > _JUDGE_AFTER_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the pace of this emulated device cannot be kept: %.0f %% of the time is lost, %s "
                "just took %.1f ms instead of %.1f ms; emulate slower devices, or fewer of them "
                "on this machine",
                100 * self.lost_s / self.paced_s,
                what,
                (lost_s + pace_s) * 1e3,
                pace_s * 1e3,
            )
