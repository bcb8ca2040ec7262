"""What ranks tell at the end of a run of emulated devices that could not keep their pace."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from eth_cli.events import Scalar, from_json

MISSED = "missed_paces_count"
"""Scalar: actions of a rank that took longer than the device it plays would; written only where
so much time was lost by it that it matters."""
WORST = "worst_missed_pace_s"
"""Scalar: by how much at most."""

_TAIL_BYTES = 2**16
"""End of an events file that holds its last scalars, which are written when a run ends."""


def missed_paces(scalars: Iterable[Scalar]) -> str | None:
    """A line on all ranks that were too slow for the device that they play; None without any."""
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for scalar in scalars:
        by_name[scalar.name][scalar.rank] = scalar.value
    counts = {rank: n for rank, n in by_name[MISSED].items() if n}
    if not counts:
        return None
    worst = by_name[WORST]
    slowest = max(counts, key=lambda rank: (worst.get(rank, 0.0), -rank))
    at_worst = f"at worst by {worst.get(slowest, 0.0) * 1e3:.1f} ms"
    if len(counts) == 1:
        who = f"rank {slowest} could not keep its pace {_times(counts[slowest])}, {at_worst}"
    else:
        who = (
            f"{len(counts)} ranks could not keep their pace, {_times(sum(counts.values()))} in "
            f"all, {at_worst} (rank {slowest})"
        )
    return f"{who}: this machine is too slow for it, or was busy"


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:.0f} times"


def last_scalars(path: Path, *, after_step: int) -> list[Scalar]:
    """Scalars of steps after ``after_step`` at the end of an events file.

    What cannot be read is left out: a run that went well does not fail for it.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            event = from_json(line)
        except ValueError:
            continue  # the first line of the tail is cut
        if isinstance(event, Scalar) and (event.step or 0) > after_step:
            found.append(event)
    return found
