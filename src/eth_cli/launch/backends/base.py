"""How jobs get to machines: the interface of all backends.

Describe, render, submit: a `Job` says what, ``render`` gives the exact commands without doing
anything, ``submit`` does it. `launch.backends.registry` finds them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from eth_cli.launch.job import Job
from eth_cli.torchrun import RankExit


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessView:
    """What the operating system says of a rank's process."""

    alive: bool
    stopped: bool = False
    """Whether a signal has stopped it (SIGSTOP): it will not go on by itself."""
    cpu_s: float = 0.0
    """Processor time used so far [s]: tells a process that computes from one that waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """What a backend knows of a job at one moment."""

    code: int | None = None
    """Exit code once the job has ended."""
    exits: tuple[RankExit, ...] = ()
    """How ranks failed, as far as it is known."""
    processes: Mapping[int, ProcessView] = field(default_factory=dict)
    """Of each rank; a rank whose process is not known (yet) is absent."""


class Backend(Protocol):
    """A way to run jobs. Requests and handles belong to the backend that made them."""

    def render(self, job: Job) -> Any:
        """The exact request; ``str()`` of it is what a person checks. Touches nothing.

        Raises:
            ConfigError: this backend cannot run the job.
        """

    def submit(self, request: Any) -> Any:
        """Start it and return a handle. Raises LaunchError when it cannot be started."""

    def status(self, handle: Any) -> JobView:
        """How it is now. Never waits."""

    def cancel(self, handle: Any, *, grace_s: float) -> None:
        """End it; when this returns nothing of it runs. Also after it has ended by itself."""
