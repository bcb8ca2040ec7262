"""One pipeline in time: the compute order of `eth_cli.schedule` over given durations.

Sends never block the sender. A forward or backward starts when its device is free and its input
has arrived. A boundary carries one transfer at a time in each direction, in order. Transfers of
different boundaries do not wait for each other; that they share NICs is in the durations given
(`cost.CostModel.plan_times`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_ULPS: Final = 4 * 2.0**-52
"""Rounding, relative to a time, within which two states count as one shifted in time."""


class ComputeStep(NamedTuple):
    """One forward or backward, in an order in which every input is known before it is used."""

    stage: int
    is_forward: bool
    micro_batch: int


@lru_cache(maxsize=256)
def compute_steps(num_stages: int, num_micro_batches: int) -> tuple[ComputeStep, ...]:
    """The compute actions of `pipeline_order` in one order that respects every dependency.

    First every stage's forwards before its first backward. Then rounds, from the last stage up:
    stage s runs the backward of micro-batch j, then its next forward, that of j + P - s. Its
    activation left stage s - 1 in the round before; its gradient left stage s + 1 in this one.
    """
    steps = [
        ComputeStep(stage, True, micro_batch)
        for stage in range(num_stages)
        for micro_batch in range(min(num_micro_batches, num_stages - stage))
    ]
    for micro_batch in range(num_micro_batches):
        for stage in reversed(range(num_stages)):
            steps.append(ComputeStep(stage, False, micro_batch))
            if micro_batch + num_stages - stage < num_micro_batches:
                steps.append(ComputeStep(stage, True, micro_batch + num_stages - stage))
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
    """Times of a pipeline that starts at 0, without its steps; equal to `trace_pipeline`'s.

    Equal to rounding: once all states of a round are those of an earlier round, later by one
    time, all that follows repeats (the system is linear in max and plus), and whole periods are
    skipped. Until then, and in the last rounds, every step is run.
    """
    num_stages = len(times.forward_s)
    state = _fill(times, num_micro_batches)
    # Rounds in which every stage still has a forward to run; only these are alike.
    full = max(0, num_micro_batches - num_stages)
    history: list[tuple[float, ...]] = []
    done = 0
    while done < full:
        _round(times, state, num_stages)
        done += 1
        now = (*state.free, *state.down, *state.up)
        period, shift = _repeats(now, history)
        skipped = (full - done) // period if period else 0
        if period:
            state.delay(skipped * shift)
            for _ in range(full - done - skipped * period):
                _round(times, state, num_stages)
            break
        history.append(now)
        if len(history) > num_stages:
            del history[0]
    for micro_batch in range(full, num_micro_batches):
        # The first stages have no forward left: stage s has while micro_batch + P - s < m.
        _round(times, state, max(0, num_micro_batches - micro_batch - 1))
    return PipelineRun(max(state.free), tuple(state.free), ())


class _State:
    """Where every stage and boundary stands between two rounds of `compute_steps` [s]."""

    def __init__(self, num_stages: int) -> None:
        self.free = [0.0] * num_stages
        # Arrival of the last activation sent down from a stage, and of the gradient sent up.
        self.down = [0.0] * num_stages
        self.up = [0.0] * num_stages

    def delay(self, time_s: float) -> None:
        """Move all of it by some time."""
        self.free = [t + time_s for t in self.free]
        self.down = [t + time_s for t in self.down]
        self.up = [t + time_s for t in self.up]


def _fill(times: PipelineTimes, num_micro_batches: int) -> _State:
    """State after every stage's forwards before its first backward."""
    num_stages = len(times.forward_s)
    state = _State(num_stages)
    arrived = [0.0] * num_micro_batches
    for stage in range(num_stages):
        free = sent = 0.0
        send_s = times.send_forward_s[stage] if stage < num_stages - 1 else 0.0
        for i in range(min(num_micro_batches, num_stages - stage)):
            free = max(free, arrived[i]) + times.forward_s[stage]
            sent = arrived[i] = max(free, sent) + send_s
        state.free[stage], state.down[stage] = free, sent
    return state


def _round(times: PipelineTimes, state: _State, num_forwards: int) -> None:
    """One backward of every stage, each of the last ``num_forwards`` stages then a forward."""
    forward_s, backward_s, send_forward_s, send_backward_s = times
    free, down, up = state.free, state.down, state.up
    num_stages = len(free)
    last = num_stages - 1
    first_with_forward = num_stages - num_forwards
    gradient = 0.0
    for stage in range(last, -1, -1):
        end = free[stage]
        if gradient > end:
            end = gradient
        end += backward_s[stage]
        if stage:
            sent = up[stage]
            if end > sent:
                sent = end
            gradient = up[stage] = sent + send_backward_s[stage - 1]
        if stage >= first_with_forward:
            if stage and down[stage - 1] > end:
                end = down[stage - 1]
            end += forward_s[stage]
            if stage < last:
                sent = down[stage]
                if end > sent:
                    sent = end
                down[stage] = sent + send_forward_s[stage]
        free[stage] = end


def _repeats(now: tuple[float, ...], history: list[tuple[float, ...]]) -> tuple[int, float]:
    """After how many rounds the state repeated and by how much later [s]; (0, 0.0): not yet."""
    # The last stage's boundary down and the first's up do not exist: they stay at their times.
    num_stages = len(now) // 3
    parts = [i for i in range(len(now)) if i not in (2 * num_stages - 1, 2 * num_stages)]
    near = _ULPS * max(now)
    for period, before in enumerate(reversed(history), 1):
        shift = now[0] - before[0]
        if all(abs(now[i] - before[i] - shift) <= near for i in parts):
            return period, shift
    return 0, 0.0


def trace_pipeline(times: PipelineTimes, num_micro_batches: int) -> PipelineRun:
    """The same with the start of every step, each of them run."""
    num_stages = len(times.forward_s)
    last = num_stages - 1
    starts: list[float] = []
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
    return PipelineRun(max(free), tuple(free), tuple(starts))


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

    def most_within(self, limit_s: float, most: int) -> int:
        """Most micro-batches, of ``most``, that end within a time; without a search if settled."""
        if limit_s >= self.steady_end_s:
            more = int((limit_s - self.steady_end_s) / self.period_s)
            return min(most, self.steady + more)
        return most_within(self, limit_s, min(most, self.steady))


def most_within(time_s: Callable[[int], float], limit_s: float, most: int) -> int:
    """Most micro-batches, of ``most``, whose time is within a limit; times must not fall."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if time_s(middle) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
