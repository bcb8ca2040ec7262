"""Changed clusters beside the one given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from eth_cli.render.money import cost_data, money, tokens_per_dollar
from eth_cli.render.tables import new_table, titled
from eth_cli.search.what_if import Outcome
from eth_cli.units import format_seconds


def what_if_view(outcomes: Sequence[Outcome]) -> Iterator[RenderableType]:
    """One row for each change."""
    is_priced = any(o.cost_now is not None or o.cost_then is not None for o in outcomes)
    priced = ("an hour", "tokens/$", "was") if is_priced else ()
    table = new_table(
        left=("change",),
        right=("devices", "step now", "step then", "speed-up", *priced),
        last=("",),
        droppable=("was", "devices"),
    )
    for outcome in outcomes:
        then = outcome.cost_then
        table.add_row(
            changes_text(outcome),
            str(outcome.num_devices),
            _seconds(outcome.now_s),
            _seconds(outcome.then_s),
            "-" if outcome.speed_up is None else f"{outcome.speed_up:.2f} x",
            *(
                (
                    "-" if then is None else money(then.per_hour),
                    "-" if then is None else tokens_per_dollar(then),
                    "-" if outcome.cost_now is None else tokens_per_dollar(outcome.cost_now),
                )
                if is_priced
                else ()
            ),
            _note(outcome),
        )
    yield titled("what if", table)


def changes_text(outcome: Outcome) -> str:
    """``+4xL4,-2xT4``."""
    return ",".join(map(str, outcome.changes))


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else format_seconds(time_s)


def _note(outcome: Outcome) -> str:
    if outcome.report is None:
        return outcome.why_none
    if outcome.now_s == outcome.then_s:
        return "no faster plan found"
    used = len(outcome.report.plan.ranks)
    idle = outcome.num_devices - used
    return f"{idle} of {outcome.num_devices} devices unused" if idle else ""


def what_if_data(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The same as plain JSON data."""
    return [
        {
            "change": changes_text(outcome),
            "num_devices": outcome.num_devices,
            "num_devices_used": None if outcome.report is None else len(outcome.report.plan.ranks),
            "step_time_s_now": outcome.now_s,
            "step_time_s_then": outcome.then_s,
            "speed_up": outcome.speed_up,
            "cost_now": cost_data(outcome.cost_now),
            "cost_then": cost_data(outcome.cost_then),
            "why_none": outcome.why_none,
        }
        for outcome in outcomes
    ]
