"""One pipeline in time: runs the very action lists of `eth_cli.schedule` over given durations.

Sends never block the sender. A forward or backward starts when its device is free and its input
has arrived. A boundary carries one transfer at a time in each direction, in order. Transfers of
different boundaries are not made to wait for each other, neither of one pipeline nor of several.
Where they cross one NIC at the same moment this is too fast: equal pipelines placed by column run
in lockstep, so their transfers do meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from eth_cli.schedule import Op, pipeline_order


class ComputeStep(NamedTuple):
    """One forward or backward, in an order in which every input is known before it is used."""

    stage: int
    is_forward: bool
    micro_batch: int


@lru_cache(maxsize=256)
def compute_steps(num_stages: int, num_micro_batches: int) -> tuple[ComputeStep, ...]:
    """The compute actions of `pipeline_order` in one order that respects every dependency.

    Derived by executing the lists: a stage goes on until it needs a tensor that was not sent yet.
    """
    order = pipeline_order(num_stages, num_micro_batches)
    position = [0] * num_stages
    sent: set[tuple[int, Op, int]] = set()
    steps: list[ComputeStep] = []
    total = sum(len(actions) for actions in order)
    while sum(position) < total:
        before = sum(position)
        for stage, actions in enumerate(order):
            while position[stage] < len(actions):
                _, op, micro_batch = actions[position[stage]]
                if op is Op.FORWARD or op is Op.BACKWARD:
                    is_forward = op is Op.FORWARD
                    source = stage - 1 if is_forward else stage + 1
                    send = Op.SEND_FORWARD if is_forward else Op.SEND_BACKWARD
                    needs_input = 0 <= source < num_stages
                    if needs_input and (source, send, micro_batch) not in sent:
                        break
                    steps.append(ComputeStep(stage, is_forward, micro_batch))
                elif op is Op.SEND_FORWARD or op is Op.SEND_BACKWARD:
                    sent.add((stage, op, micro_batch))
                position[stage] += 1
        assert sum(position) > before, "the action lists wait for each other"
    return tuple(steps)


class PipelineTimes(NamedTuple):
    """Durations that a pipeline's schedule runs with, by stage and by boundary."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_forward_s: tuple[float, ...]
    """Transfer of an activation from stage s to s + 1."""
    send_backward_s: tuple[float, ...]
    """Transfer of a gradient from stage s + 1 to s."""

    def without_transfers(self) -> PipelineTimes:
        """The same computation over links that take no time."""
        zeros = (0.0,) * len(self.send_forward_s)
        return self._replace(send_forward_s=zeros, send_backward_s=zeros)


class PipelineRun(NamedTuple):
    """When a pipeline's work ends."""

    end_s: float
    """End of the last action of any stage."""
    stage_end_s: tuple[float, ...]
    """End of each stage's last backward, which is that of its last micro-batch."""
    step_starts_s: tuple[float, ...]
    """Start of every step of `compute_steps`, in that order; empty unless asked for."""


@lru_cache(maxsize=200_000)
def run_pipeline(times: PipelineTimes, num_micro_batches: int) -> PipelineRun:
    """Times of a pipeline that starts at 0, without recording its steps."""
    return _run(times, num_micro_batches, None)


def trace_pipeline(times: PipelineTimes, num_micro_batches: int) -> PipelineRun:
    """The same, with the start of every step."""
    return _run(times, num_micro_batches, [])


def _run(times: PipelineTimes, num_micro_batches: int, starts: list[float] | None) -> PipelineRun:
    num_stages = len(times.forward_s)
    last = num_stages - 1
    forward_s, backward_s = times.forward_s, times.backward_s
    send_forward_s, send_backward_s = times.send_forward_s, times.send_backward_s
    free = [0.0] * num_stages
    # When the boundary below stage s is free again, per direction.
    down_free = [0.0] * num_stages
    up_free = [0.0] * num_stages
    activation = [[0.0] * num_micro_batches for _ in range(num_stages)]
    gradient = [[0.0] * num_micro_batches for _ in range(num_stages)]
    for stage, is_forward, micro_batch in compute_steps(num_stages, num_micro_batches):
        arrived = (activation if is_forward else gradient)[stage][micro_batch]
        start = free[stage]
        if arrived > start:
            start = arrived
        if starts is not None:
            starts.append(start)
        if is_forward:
            end = start + forward_s[stage]
            if stage < last:
                sent = max(end, down_free[stage]) + send_forward_s[stage]
                down_free[stage] = activation[stage + 1][micro_batch] = sent
        else:
            end = start + backward_s[stage]
            if stage:
                sent = max(end, up_free[stage]) + send_backward_s[stage - 1]
                up_free[stage] = gradient[stage - 1][micro_batch] = sent
        free[stage] = end
    return PipelineRun(max(free), tuple(free), tuple(starts or ()))


def period_s(times: PipelineTimes) -> float:
    """Time between two micro-batches of a long 1F1B run [s].

    The action lists tie the stages r ... s of a run of neighbours in a loop that passes r - s + 1
    micro-batches a turn: the period is at least (their compute + both ways of the transfers
    between them) / (their number). The largest of these is the pace.
    """
    longest = 0.0
    for first in range(len(times.forward_s)):
        loop = 0.0
        for stage in range(first, len(times.forward_s)):
            if stage > first:
                loop += times.send_forward_s[stage - 1] + times.send_backward_s[stage - 1]
            loop += times.forward_s[stage] + times.backward_s[stage]
            longest = max(longest, loop / (stage - first + 1))
    return longest


def chain_s(times: Sequence[Sequence[float]]) -> float:
    """Time of one micro-batch through every stage and back: all durations added [s]."""
    return sum(sum(part) for part in times)


class Clock:
    """Time of a pipeline by its micro-batches: simulated at first, then on at its steady pace.

    The second part is an estimate, up to some percent off where the pace has not settled after
    twice as many micro-batches as stages. Shares are chosen by it; no plan's step time is.
    """

    def __init__(self, times: PipelineTimes) -> None:
        self.times = times
        # After twice its stages a pipeline has filled and its pace has settled, or nearly so.
        self.steady = 2 * len(times.forward_s)
        self.steady_end_s = run_pipeline(times, self.steady).end_s
        self.period_s = period_s(times)

    def __call__(self, micro_batches: int) -> float:
        if micro_batches <= self.steady:
            return run_pipeline(self.times, micro_batches).end_s
        return self.steady_end_s + (micro_batches - self.steady) * self.period_s
