"""Every failure that a user may see, with its exit code.

A message has three parts: what is wrong (both numbers), where (file and field), what to do.
Errors carry data, so that callers and tests read fields instead of prose. Nothing here prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong with one input."""

    file: str
    """Path of the file, or the name of the command-line option, that holds the fault."""
    field: str
    """Where in the file, as ``nodes[0].devices[1].type``; empty for the file as a whole."""
    message: str
    """What is wrong and what to do, without the place."""

    def __str__(self) -> str:
        place = f"{self.file}: {self.field}" if self.field else self.file
        return f"{place}: {self.message}"


class EthError(Exception):
    """Base of all errors that end a command; ``exit_code`` is the process's exit status."""

    exit_code = 1


class ConfigError(EthError):
    """Bad usage or input (exit code 2). Holds every fault found, not only the first."""

    exit_code = 2

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(str(fault) for fault in self.faults))

    @classmethod
    def single(cls, file: str, field: str, message: str) -> ConfigError:
        """An error with one fault."""
        return cls([Fault(file=file, field=field, message=message)])


class InfeasibleError(EthError):
    """No plan exists (exit code 3)."""

    exit_code = 3

    def __init__(self, message: str, *, binding: str, suggestion: str) -> None:
        self.binding = binding
        """The constraint that cannot be met, with both numbers."""
        self.suggestion = suggestion
        """The nearest change that would make it feasible."""
        super().__init__(message)


class SearchStoppedError(EthError):
    """A search was stopped before it had found a plan (exit code 130, as after Ctrl-C)."""

    exit_code = 130


class LaunchError(EthError):
    """A launch or a run failed (exit code 4). Names who failed, where and in which operation."""

    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        device: str | None = None,
        pipeline: int | None = None,
        stage: int | None = None,
        step: int | None = None,
        operation: str | None = None,
        log_path: str | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self.pipeline = pipeline
        self.stage = stage
        self.step = step
        self.operation = operation
        self.log_path = log_path
        super().__init__(message)
