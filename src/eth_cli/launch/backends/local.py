"""The local backend: all ranks on this machine, as one torchrun in a session of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eth_cli import torchrun
from eth_cli.errors import ConfigError, LaunchError
from eth_cli.launch.backends.base import JobView, ProcessView
from eth_cli.launch.job import Job

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRequest:
    """One command on this machine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to the present environment."""
    log_dir: Path
    num_ranks: int

    @property
    def output(self) -> Path:
        """Where torchrun's own words go; the ranks' go beside, to rank-N.log."""
        return self.log_dir / "launcher.log"

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return shlex.join(["env", *settings]) + " \\\n  " + shlex.join(self.argv)


@dataclass(kw_only=True, slots=True)
class LocalHandle:
    """A running request."""

    request: LocalRequest
    process: torchrun.ProcessTree
    pids: dict[int, int] = field(default_factory=dict)
    """Process of each rank, as far as they have been found."""


class LocalBackend:
    """Runs a job on this machine."""

    def render(self, job: Job) -> LocalRequest:
        """The torchrun command. Raises ConfigError for a job of several machines."""
        if len(job.tasks) > 1:
            names = ", ".join(node for task in job.tasks for node in task.nodes)
            raise ConfigError.single(
                "--backend",
                "",
                f"local runs on this machine only, but the plan uses {len(job.tasks)} nodes "
                f"({names}); plan for one node, or mark all device types as emulated",
            )
        log_dir = job.folder.logs
        command = torchrun.argv(
            num_ranks=job.num_ranks, module=job.module, args=job.args, log_dir=log_dir
        )
        return LocalRequest(
            argv=tuple(command),
            env=torchrun.worker_env(),
            log_dir=log_dir,
            num_ranks=job.num_ranks,
        )

    def submit(self, request: LocalRequest) -> LocalHandle:
        """Start torchrun. Raises LaunchError when the system refuses."""
        torchrun.clear_exits(request.log_dir)
        try:
            process = torchrun.start(request.argv, env=request.env, output=request.output)
        except OSError as error:
            raise LaunchError(
                f"torchrun could not be started: {error.strerror}", log_path=str(request.output)
            ) from None
        return LocalHandle(request=request, process=process)

    def status(self, handle: LocalHandle) -> JobView:
        """The ranks' processes, and how torchrun ended."""
        code = handle.process.poll()
        if len(handle.pids) < handle.request.num_ranks:
            handle.pids |= torchrun.rank_pids(handle.process)
        log_dir = handle.request.log_dir
        return JobView(
            code=code,
            exits=_exits(handle) if code is None else torchrun.read_exits(log_dir),
            processes={rank: _view(pid) for rank, pid in handle.pids.items()},
        )

    def cancel(self, handle: LocalHandle, *, grace_s: float) -> None:
        """End torchrun and all that it started."""
        torchrun.stop_process_tree(handle.process, grace_s=grace_s)


def _exits(handle: LocalHandle) -> tuple[torchrun.RankExit, ...]:
    """What is known of failed ranks before torchrun tells."""
    ranks = {pid: rank for rank, pid in handle.pids.items()}
    return tuple(
        torchrun.RankExit(rank=ranks[death.pid], pid=death.pid, code=death.code)
        for death in torchrun.read_deaths(handle.request.log_dir)
        if death.code != 0 and death.pid in ranks
    )


def create() -> LocalBackend:
    """The backend, for the registry."""
    return LocalBackend()


def _view(pid: int) -> ProcessView:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, system = int(fields[11]), int(fields[12])
        return ProcessView(
            # A zombie has ended; torchrun has only not looked yet.
            alive=fields[0] not in ("Z", "X"),
            stopped=fields[0] == "T",
            cpu_s=(user + system) / _TICKS_PER_S,
        )
    return ProcessView(alive=False)
