"""The checkpoints of a run as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from eth_cli import units
from eth_cli.launch.checkpoints import State
from eth_cli.render.tables import new_table


def checkpoints_view(states: Sequence[State]) -> RenderableType:
    """A line for each, oldest first."""
    if not states:
        return Text("no checkpoint")
    table = new_table(
        left=(), right=("step", "next sample", "size"), last=("plan", "state"), droppable=("plan",)
    )
    for state in states:
        info = state.info
        table.add_row(
            f"{state.step:,}",
            "" if info is None else f"{info.next_sample:,}",
            "" if info is None else units.format_bytes(state.num_bytes),
            "" if info is None else info.plan_digest.removeprefix("sha256:")[:12],
            "complete" if state.fault is None else f"damaged: {state.fault}",
        )
    return table
