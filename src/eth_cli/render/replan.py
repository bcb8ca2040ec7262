"""What has to move from an old plan to a new one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from eth_cli.search.replan import Replanned
from eth_cli.units import format_bytes


def moves_view(found: Replanned, source: Path) -> Iterator[Text]:
    """In words: what stays, what moves, and from where."""
    moves = found.moves
    if moves is None:
        return
    if found.is_fresh:
        yield Text(f"nothing of {source} could be kept: this is the plan of a search from nothing")
    total = moves.num_kept + moves.num_moved
    if not moves.num_moved:
        yield Text(f"from {source}: all {total:,} blocks on devices stay where they are")
        return
    yield Text(
        f"from {source}: of {total:,} blocks on devices {moves.num_kept:,} stay and "
        f"{moves.num_moved:,} move, {format_bytes(moves.moved_bytes)} with their optimizer state"
    )
    if moves.num_sent:
        yield Text(
            f"  {moves.num_sent:,} from devices that hold them: {format_bytes(moves.sent_bytes)}"
        )
    if moves.num_read:
        yield Text(
            f"  {moves.num_read:,} from a checkpoint, for no device is left that holds them: "
            f"{format_bytes(moves.read_bytes)}"
        )


def moves_data(found: Replanned) -> dict[str, Any]:
    """The same as plain JSON data. There is an old plan."""
    moves = found.moves
    assert moves is not None
    return {
        "blocks_kept": moves.num_kept,
        "blocks_sent": moves.num_sent,
        "blocks_read": moves.num_read,
        "sent_bytes": moves.sent_bytes,
        "read_bytes": moves.read_bytes,
        "is_fresh_search": found.is_fresh,
    }
