"""Who failed first: the rank to name when several have ended. Pure.

When a rank dies, its partners lose their connections and fail within milliseconds, and torchrun
ends the rest with SIGTERM; most of what is reported of a run are consequences.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_CONSEQUENCES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was",
    "broken pipe",
    "socket",
    "remote worker",
    "timed out",
    "timeout",
)
"""Parts of what torch says on a rank whose partner is gone."""

NEVER = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """What is known of the end of one rank."""

    rank: int
    error: str = ""
    """What it told of its failure; empty when it had no time to."""
    error_s: float = NEVER
    """When it failed, as it told [s since the epoch]."""
    code: int | None = None
    """Exit code as torchrun reports it, negative for a signal; None: not reported."""
    dead_s: float = NEVER
    """When its process was seen to be gone, on any clock that is the same for all ranks [s]."""


class _Blame(IntEnum):
    """The order of blame: a lower one explains the higher ones."""

    SIGNAL = 0
    """Killed by a signal, such as SIGKILL or SIGSEGV."""
    ERROR = 1
    """Failed with an error of its own."""
    SILENT = 2
    """Ended without a word."""
    CONSEQUENCE = 3
    """Lost a connection; torch also aborts (SIGABRT) over that."""
    ENDED = 4
    """Ended by torchrun (SIGTERM) because another rank had failed."""


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first; None when none has ended.

    Kinds of failure come in the order of `_Blame`; within a kind the earliest one.
    """
    return min(ends, key=lambda end: (_blame(end), end.error_s, end.dead_s, end.rank), default=None)


def is_tired_of_waiting(error: str) -> bool:
    """Whether an error says that a rank waited too long for another one, which may live on."""
    return "timed out" in error.lower() or "timeout" in error.lower()


def _blame(end: RankEnd) -> _Blame:
    if any(part in end.error.lower() for part in _CONSEQUENCES):
        return _Blame.CONSEQUENCE
    if end.error:
        return _Blame.ERROR
    if end.code is None or end.code >= 0:
        return _Blame.SILENT
    if -end.code == signal.SIGABRT:
        return _Blame.CONSEQUENCE
    return _Blame.ENDED if -end.code == signal.SIGTERM else _Blame.SIGNAL


def cause_of(end: RankEnd) -> str:
    """What happened to a rank, as the end of a sentence that starts with it."""
    if end.error:
        return f"failed: {end.error}"
    if end.code is None:
        return "died"
    if end.code == -signal.SIGKILL:
        return "was killed by SIGKILL (by hand, or by the system when memory ran out)"
    return f"was {how(end.code)}" if end.code < 0 else f"ended {how(end.code)}"


def how(code: int) -> str:
    """An exit code for people: ``with exit code 3``, ``killed by SIGSEGV``."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
