"""Processes that stay for a whole test session and play the ranks of many plans.

Starting a process that imports torch takes seconds, a plan of a tiny model milliseconds; so a few
processes start once and join a fresh process group (over a file, no port) for each job. Every wait
has a limit: a rank that does not answer is killed with all others, and the next job starts anew.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_RANKS = 6
"""Ranks that the pool can play at once."""

Job = Callable[..., Any]
"""A module-level function ``job(rank, *args)``; what it returns is sent back."""


class RanksFailedError(Exception):
    """Some ranks raised, died or did not answer."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        """What went wrong, by rank."""
        super().__init__(
            "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
        )


class RankPool:
    """Processes waiting for jobs."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is for the files over which groups meet."""
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = folder
        self._num_jobs = 0

    def run(self, job: Job, *args: Any, num_ranks: int, timeout_s: float = 60.0) -> list[Any]:
        """Run ``job(rank, *args)`` on the first ranks, in a process group of just these.

        Raises:
            RanksFailedError: with the traceback of every rank that did not return.
        """
        self._start()
        self._num_jobs += 1
        rendezvous = self._folder / f"job-{self._num_jobs}"
        for pipe in self._pipes[:num_ranks]:
            pipe.send((job, args, num_ranks, str(rendezvous), timeout_s))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        for rank, pipe in enumerate(self._pipes[:num_ranks]):
            # Once a rank has failed the others only wait for it; they get a moment to tell.
            left = 3.0 if errors else deadline - time.monotonic()
            try:
                if not pipe.poll(max(0.0, left)):
                    errors[rank] = f"no answer within {timeout_s:g} s"
                    continue
                ok, value = pipe.recv()
            except (EOFError, ConnectionError):
                errors[rank] = "died"
                continue
            (results if ok else errors)[rank] = value
        if errors:
            self.stop()
            raise RanksFailedError(errors)
        return [results[rank] for rank in range(num_ranks)]

    def _start(self) -> None:
        if self._processes:
            return
        for rank in range(NUM_RANKS):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()


def _serve(rank: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, args, num_ranks, rendezvous, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _in_group(rank, num_ranks, rendezvous, timeout_s, job, args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_group(
    rank: int, num_ranks: int, rendezvous: str, timeout_s: float, job: Job, args: Any
) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        return job(rank, *args)
    finally:
        dist.destroy_process_group()
