"""What each worker is doing right now, for the launcher to watch. Owns the status files.

A worker overwrites one small memory-mapped record before each operation (about a microsecond, no
system call), so that the launcher can tell a hang from slow work, and who caused it, even after the
worker was killed. One file a rank; gone once the run has ended well.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_SIZE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The last thing a rank said that it does."""

    rank: int
    pid: int
    state: str
    """starting, training, saving, done, stopped (asked to stop, and did so well) or failed."""
    step: int
    """Optimizer step in progress, from 1; 0 before training."""
    operation: str
    """An action such as ``2F0``, or SYNC, OPTIMIZER, CHECKPOINT, ..."""
    waits: bool
    """Whether the operation waits for other ranks (then this rank is not the cause of a hang)."""
    time_s: float
    """When the operation began [s since the epoch]."""
    error: str = ""
    """Message of the failure that ended the rank; of a stopped one: who asked it to."""
    memory_bytes: int | None = None
    """Most memory that the rank has held; None before its first step is done."""
    busy_share: float | None = None
    """Part of its last step that it computed, forwards and backwards; None before that."""


class StatusWriter:
    """Writes a rank's status."""

    def __init__(self, path: str | Path, *, rank: int) -> None:
        self._rank = rank
        self._memory_bytes: int | None = None
        self._busy_share: float | None = None
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written, not only sized: a page that a full disk has no room for kills who writes to it.
        path.write_bytes(b"\0" * _SIZE)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self.update(state="starting", step=0, operation="start", waits=False)

    def note(self, *, memory_bytes: int | None, busy_share: float | None) -> None:
        """What the next updates say of memory and of the last step."""
        self._memory_bytes, self._busy_share = memory_bytes, busy_share

    def update(
        self, *, state: str, step: int, operation: str, waits: bool, error: str = ""
    ) -> None:
        """Replace the status."""
        status = Status(
            rank=self._rank,
            pid=os.getpid(),
            state=state,
            step=step,
            operation=operation,
            waits=waits,
            time_s=time.time(),
            error=error[:500],
            memory_bytes=self._memory_bytes,
            busy_share=self._busy_share,
        )
        data = _encode(status)
        while len(data) >= _SIZE and status.error:
            # Escapes make some letters six bytes long; a record cut short could not be read.
            status = replace(status, error=status.error[: len(status.error) * 3 // 4])
            data = _encode(status)
        self._map[: len(data) + 1] = data + b"\0"


def _encode(status: Status) -> bytes:
    return json.dumps(asdict(status), separators=(",", ":"), ensure_ascii=False).encode(
        errors="replace"
    )


def read_status(path: str | Path) -> Status | None:
    """The status of a rank; None when there is none yet or it is being written."""
    try:
        data = Path(path).read_bytes()
        return Status(**json.loads(data[: data.index(b"\0")]))
    except (OSError, ValueError, TypeError):
        return None
