"""What one rank does: told to the launcher before it happens, to the event file afterwards.

The launcher reads the status to tell a hang from slow work; `eth report` reads the events. Both
formats are owned elsewhere (`eth_cli.launch.status`, `eth_cli.events`).
"""

from __future__ import annotations

import time
from pathlib import Path

from eth_cli.events import Event, Scalar, Span, write_events
from eth_cli.launch.status import StatusWriter
from eth_cli.plan import RankPlace


class Journal:
    """Status and events of one rank."""

    def __init__(
        self, *, place: RankPlace, status: StatusWriter | None, events_path: Path | None
    ) -> None:
        self._place = place
        self._status = status
        self._events_path = events_path
        self._events: list[Event] = []
        self._state = "starting"
        self._peak_memory_bytes: int | None = None
        self.step = 0
        """Optimizer step in progress, from 1; 0 before training."""
        self.operation = "start"
        """What this rank does now, as in its status."""

    def enter(self, state: str, *, step: int | None = None) -> None:
        """A new state of the rank's life; see `eth_cli.launch.status.Status.state`."""
        self._state = state
        if step is not None:
            self.step = step

    def begin(self, operation: str, *, waits: bool = False) -> None:
        """An operation begins; ``waits`` when it may wait for other ranks."""
        self.operation = operation
        if self._status is not None:
            self._status.update(state=self._state, step=self.step, operation=operation, waits=waits)

    def end(self, state: str, *, reason: str = "") -> None:
        """The rank ends well, ``done`` or ``stopped``; ``reason``: why, where it was told so."""
        self._state, self.operation = state, "end"
        if self._status is not None:
            self._status.update(
                state=state, step=self.step, operation="end", waits=False, error=reason
            )

    def fail(self, error: str) -> None:
        """The rank ends with an error, in the operation that it said last."""
        if self._status is not None:
            self._status.update(
                state="failed",
                step=self.step,
                operation=self.operation,
                waits=False,
                error=error,
            )

    def span(
        self,
        name: str,
        start_s: float,
        stop_s: float | None = None,
        *,
        micro_batch: int | None = None,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Something took from ``start_s`` until ``stop_s`` (default: now) [s since the epoch]."""
        self._events.append(
            Span(
                rank=self._place.rank,
                name=name,
                start_s=start_s,
                stop_s=time.time() if stop_s is None else stop_s,
                step=self.step,
                pipeline=self._place.pipeline,
                stage=self._place.stage,
                micro_batch=micro_batch,
                blocks=blocks,
            )
        )

    def end_step(self, start_s: float, *, memory_bytes: int) -> None:
        """A step that began at ``start_s`` is over [s since the epoch].

        ``memory_bytes``: most that this rank has held so far. An event tells of it when it grew.
        """
        self.span("STEP", start_s)
        duration_s = time.time() - start_s
        computed_s = sum(
            event.duration_s
            for event in self._events
            if isinstance(event, Span) and event.name in ("F", "B")
        )
        if memory_bytes > (self._peak_memory_bytes or 0):
            self._peak_memory_bytes = memory_bytes
            self.scalar("peak_memory_bytes", memory_bytes)
        if self._status is not None:
            self._status.note(
                memory_bytes=self._peak_memory_bytes,
                busy_share=computed_s / duration_s if duration_s > 0 else None,
            )

    def scalar(self, name: str, value: float) -> None:
        """A number measured on this rank; its name says the unit."""
        self._events.append(Scalar(rank=self._place.rank, name=name, value=value, step=self.step))

    def flush(self) -> None:
        """Append the events so far to the rank's file."""
        events, self._events = self._events, []
        if self._events_path is not None:
            write_events(self._events_path, events)
