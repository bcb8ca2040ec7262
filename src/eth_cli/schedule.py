"""A pipeline's order of actions as data; the same lists are simulated and executed.

An action prints as ``2F0`` (stage 2, forward, micro-batch 0) or ``1SEND_B3`` and parses back, so
tests, events, errors and pictures share one form. Nothing here knows durations or devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """What a stage does with one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    """Hand the activation to the next stage; never blocks the sender."""
    RECV_FORWARD = "RECV_F"
    """Post the receive of the activation from the previous stage; the forward waits for it."""
    SEND_BACKWARD = "SEND_B"
    """Hand the gradient to the previous stage; never blocks the sender."""
    RECV_BACKWARD = "RECV_B"
    """Post the receive of the gradient from the next stage; the backward waits for it."""

    @property
    def is_compute(self) -> bool:
        """Whether the device computes (rather than sends or receives)."""
        return self in (Op.FORWARD, Op.BACKWARD)


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d+)")


class Action(NamedTuple):
    """One step of one stage's list."""

    stage: int
    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.micro_batch}"

    @classmethod
    def from_str(cls, text: str) -> Action:
        """The action that prints as ``text``. Raises ValueError."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action such as 2F0 or 1SEND_B3")
        return cls(int(match[1]), Op(match[2]), int(match[3]))


StageOrder = tuple[Action, ...]
"""What one stage does, in order."""
PipelineOrder = tuple[StageOrder, ...]
"""Every stage's order, by stage index."""


def num_in_flight(stage: int, *, num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches whose activations a stage holds at the peak under `one_f_one_b`.

    A stage runs ahead of the last one by its distance to it: ``min(m, P - s)``.
    """
    return min(num_micro_batches, num_stages - stage)


def one_f_one_b(num_stages: int, num_micro_batches: int) -> PipelineOrder:
    """One-forward-one-backward (PipeDream-flush), compute actions only.

    Stage s runs ``min(m, P - s) - 1`` forwards ahead, then alternates a forward and a backward,
    then drains. Any number of micro-batches >= 1 works, also fewer than stages.
    """
    order = []
    for stage in range(num_stages):
        ahead = num_in_flight(stage, num_stages=num_stages, num_micro_batches=num_micro_batches) - 1
        actions = [Action(stage, Op.FORWARD, m) for m in range(ahead)]
        for m in range(num_micro_batches):
            if m + ahead < num_micro_batches:
                actions.append(Action(stage, Op.FORWARD, m + ahead))
            actions.append(Action(stage, Op.BACKWARD, m))
        order.append(tuple(actions))
    return tuple(order)


def with_communication(order: PipelineOrder) -> PipelineOrder:
    """Add sends and receives to compute-only orders.

    A send follows the compute action that produced its tensor. A receive is posted as soon as its
    sender has sent, in the sender's order, which keeps every pair of neighbours in the same order
    (no deadlock, on any backend) and lets transfers run under compute.

    Raises:
        ValueError: the orders wait for each other for ever.
    """
    num_stages = len(order)
    lowered: list[list[Action]] = [[] for _ in order]
    received: list[set[Action]] = [set() for _ in order]
    position = [0] * num_stages

    def ready(action: Action) -> bool:
        s = action.stage
        if action.op is Op.FORWARD:
            return s == 0 or Action(s, Op.RECV_FORWARD, action.micro_batch) in received[s]
        last = s == num_stages - 1
        return last or Action(s, Op.RECV_BACKWARD, action.micro_batch) in received[s]

    def post(send: Action, receive: Action) -> None:
        lowered[send.stage].append(send)
        lowered[receive.stage].append(receive)
        received[receive.stage].add(receive)

    while any(p < len(actions) for p, actions in zip(position, order, strict=True)):
        progress = False
        for s, actions in enumerate(order):
            if position[s] == len(actions) or not ready(actions[position[s]]):
                continue
            action = actions[position[s]]
            lowered[s].append(action)
            m = action.micro_batch
            if action.op is Op.FORWARD and s + 1 < num_stages:
                post(Action(s, Op.SEND_FORWARD, m), Action(s + 1, Op.RECV_FORWARD, m))
            elif action.op is Op.BACKWARD and s > 0:
                post(Action(s, Op.SEND_BACKWARD, m), Action(s - 1, Op.RECV_BACKWARD, m))
            position[s] += 1
            progress = True
        if not progress:
            stuck = [str(a[p]) for p, a in zip(position, order, strict=True) if p < len(a)]
            raise ValueError(f"the schedule can never run: {', '.join(stuck)} wait for each other")
    return tuple(tuple(actions) for actions in lowered)


def pipeline_order(num_stages: int, num_micro_batches: int) -> PipelineOrder:
    """The orders that the runtime executes and the simulator times: 1F1B with communication."""
    return with_communication(one_f_one_b(num_stages, num_micro_batches))


def validate(order: Sequence[Sequence[Action]], *, num_micro_batches: int) -> None:
    """Check that every stage runs each micro-batch forward and then backward exactly once.

    Raises:
        ValueError: naming the first action that is wrong.
    """
    for stage, actions in enumerate(order):
        seen: set[Action] = set()
        for action in actions:
            if action.stage != stage or not 0 <= action.micro_batch < num_micro_batches:
                raise ValueError(f"{action} does not belong in the order of stage {stage}")
            if action in seen:
                raise ValueError(f"{action} stands twice in the order of stage {stage}")
            forward = Action(stage, Op.FORWARD, action.micro_batch)
            if action.op is Op.BACKWARD and forward not in seen:
                raise ValueError(f"{action} stands before {forward}")
            seen.add(action)
        num_compute = sum(action.op.is_compute for action in actions)
        if num_compute != 2 * num_micro_batches:
            raise ValueError(
                f"stage {stage} has {num_compute} compute actions; "
                f"{num_micro_batches} micro-batches need {2 * num_micro_batches}"
            )
