"""Costs in words: dollars, as the prices of a cluster file are."""

from __future__ import annotations

from rich.text import Text

from eth_cli.search.economics import Cost


def money(amount: float) -> str:
    """An amount with as many digits as it takes: ``$29.36``, ``$0.00124``."""
    return f"${amount:,.2f}" if amount >= 0.1 or amount == 0 else f"${amount:.3g}"


def tokens_per_dollar(cost: Cost) -> str:
    """Tokens for a dollar: ``1.25 M``."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if cost.tokens_per_dollar >= factor:
            return f"{cost.tokens_per_dollar / factor:#.3g} {unit}"
    return f"{cost.tokens_per_dollar:.3g}"


def cost_line(cost: Cost) -> Text:
    """What training by a plan costs."""
    return Text(
        f"costs {money(cost.per_hour)} an hour, {money(cost.per_step)} a step: "
        f"{tokens_per_dollar(cost)} tokens per dollar"
    )


def cost_data(cost: Cost | None) -> dict[str, float] | None:
    """The same as plain JSON data."""
    if cost is None:
        return None
    return {
        "per_hour": cost.per_hour,
        "per_step": cost.per_step,
        "tokens_per_dollar": cost.tokens_per_dollar,
    }
