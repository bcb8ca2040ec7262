"""Emulated devices: a CPU process that takes exactly as long as the profile says.

Real work is done at once; then the process sleeps until the moment at which the emulated device
would be done. What happens next (sends, gradient sync) so happens at the right time. Nothing here
needs torch.

Left out: an emulated device does not slow down what another process does on the same cores. Where
real work takes longer than the pace, the pace cannot be kept; this is counted and said once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from eth_cli.model import EMBEDDING, HEAD, TRANSFORMER
from eth_cli.plan import Pacing, Plan

logger = logging.getLogger(__name__)

_BACK_TO_BACK_S = 5e-4
"""An action that begins so soon after the last one did not wait for another rank [s]."""
_TOLERANCE_S = 1e-3
"""Sleeping ends up to so much late on a busy machine; only more counts as a missed pace [s]."""


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
    begins at that one's deadline, so that the inaccuracy of sleeping does not add up.
    """

    def __init__(self, pace: StagePace | None) -> None:
        self._pace = pace
        self._start = 0.0
        self._deadline = 0.0
        self._returned = -1.0
        self.num_missed = 0
        """Actions whose real work took longer than their pace."""
        self.worst_miss_s = 0.0
        """By how much, at most [s]."""

    def begin(self) -> None:
        """An action begins: everything it needs is here."""
        if self._pace is None:
            return
        now = time.monotonic()
        back_to_back = now - self._returned < _BACK_TO_BACK_S
        self._start = self._deadline if back_to_back else now

    def end_forward(self) -> None:
        """The real forward is done; return when the emulated one is."""
        if self._pace is not None:
            self._end("forward", sum(self._pace.forward_s))

    def end_block_backward(self, block: int) -> None:
        """A block's real backward is done; return when the emulated one is."""
        if self._pace is not None:
            first = block - self._pace.blocks[0]
            _sleep_until(self._start + sum(self._pace.backward_s[first:]))

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
        late_s = time.monotonic() - self._deadline
        if late_s > _TOLERANCE_S:
            if self.num_missed == 0:
                logger.warning(
                    "the pace of this emulated device cannot be kept: %s took %.1f ms instead of "
                    "%.1f ms; emulate slower devices or use fewer of them on this machine",
                    what,
                    (late_s + pace_s) * 1e3,
                    pace_s * 1e3,
                )
            self.num_missed += 1
            self.worst_miss_s = max(self.worst_miss_s, late_s)
            # Time that was lost is not made up for: that would hide it in the next action.
            self._deadline += late_s
        _sleep_until(self._deadline)
        self._returned = time.monotonic()


def _sleep_until(deadline: float) -> None:
    left = deadline - time.monotonic()
    if left > 0:
        time.sleep(left)
