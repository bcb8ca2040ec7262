"""One rank of a run, started by torchrun: ``python -m eth_cli.launch.runtime.worker RUN_DIR``.

Reads plan.json and run.json of the run folder, checks that it is the rank the plan means before it
talks to any other, and trains. To stop a run well, create the file ``RUN_DIR/stop``: all ranks
finish the step in progress, write a checkpoint and exit with 0. SIGTERM to a rank does the same,
but the launcher takes it for a failure, since nobody told the launcher; and torchrun kills ranks a
few seconds after it passed a SIGTERM on.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from eth_cli import serde
from eth_cli.env import is_debug
from eth_cli.errors import ConfigError, EthError, LaunchError
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.data.opening import open_data
from eth_cli.launch.limits import unsupported
from eth_cli.launch.runtime.trainer import Trainer
from eth_cli.launch.status import StatusWriter
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan, RankPlace, read_plan


def main(arguments: Sequence[str]) -> int:
    """Train as the rank that torchrun's environment says. Returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    (root,) = arguments
    folder = RunFolder(root)
    rank = int(os.environ["RANK"])
    status = StatusWriter(folder.status_of(rank), rank=rank)
    worker = Worker(folder, rank=rank, status=status)
    try:
        worker.run()
    except Exception as error:
        reason = reason_of(error)
        # The status holds step and operation anyway, and the launcher knows the rank's place.
        worker.fail(reason)
        if is_debug():
            traceback.print_exc()
        with contextlib.suppress(OSError):  # a full disk takes no log; the status is written
            print(f"{worker.where()}: {reason}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, EthError) else LaunchError.exit_code
    return 0


class Worker:
    """One rank, from its first look at the plan to its last word."""

    def __init__(self, folder: RunFolder, *, rank: int, status: StatusWriter) -> None:
        self._folder = folder
        self._rank = rank
        self._status = status
        self._plan: Plan | None = None
        self._trainer: Trainer | None = None

    def run(self) -> None:
        """Check, connect, train, disconnect."""
        plan = self._plan = read_plan(self._folder.plan)
        options = serde.read_json(self._folder.options, RunOptions)
        world_size = int(os.environ["WORLD_SIZE"])
        check_place(plan, options, rank=self._rank, world_size=world_size, folder=self._folder)
        spec = _spec_of(plan, file=str(self._folder.plan))
        data = open_data(options.data, seq_len=plan.seq_len, vocab_size=spec.vocab_size)
        device = _claim_device(plan.ranks[self._rank], options, file=str(self._folder.plan))
        self._say("connect", waits=True)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=options.start_timeout_s),
        )
        # After a failure the groups are left to the end of the process: closing them would wait for
        # ranks that wait for this one.
        self._say("agree on the plan", waits=True)
        agree_on_plan(plan, device=device)
        trainer = self._trainer = Trainer(
            plan,
            spec,
            rank=self._rank,
            options=options,
            folder=self._folder,
            source=data.train,
            device=device,
            status=self._status,
        )
        signal.signal(signal.SIGTERM, lambda *_: trainer.request_stop())
        stopped = trainer.train()
        dist.destroy_process_group()
        if stopped:
            reason = "was asked to stop (SIGTERM)" if trainer.stop_requested else ""
            trainer.journal.end("stopped", reason=reason)
        else:
            trainer.journal.end("done")

    def where(self) -> str:
        """Which rank this is, where it stands in the plan, and what it does."""
        where = f"rank {self._rank}"
        if self._plan is not None and self._rank < len(self._plan.ranks):
            place = self._plan.ranks[self._rank]
            where += f" ({place.device}, pipeline {place.pipeline}, stage {place.stage})"
        if self._trainer is not None:
            journal = self._trainer.journal
            where += f" failed in step {journal.step}, {journal.operation}"
        return where

    def fail(self, reason: str) -> None:
        """Leave the failure in the status file."""
        if self._trainer is not None:
            self._trainer.journal.fail(reason)
        else:
            self._status.update(
                state="failed", step=0, operation="start", waits=False, error=reason
            )

    def _say(self, operation: str, *, waits: bool) -> None:
        self._status.update(state="starting", step=0, operation=operation, waits=waits)


def reason_of(error: Exception) -> str:
    """Why a rank fails, in one line."""
    if isinstance(error, EthError):
        return str(error).splitlines()[0]
    # torch's pipeline runtime wraps an error in a long account of tensors and schedules.
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


def check_place(
    plan: Plan, options: RunOptions, *, rank: int, world_size: int, folder: RunFolder
) -> None:
    """Raise ConfigError unless this rank is one that the plan means; talks to no other rank."""
    file = str(folder.plan)
    digest = plan.digest()
    if options.plan_digest not in (None, digest):
        raise ConfigError.single(
            file,
            "",
            f"has digest {digest}, but the run was started with {options.plan_digest}; "
            "do not change a plan while it runs",
        )
    if world_size != len(plan.ranks):
        raise ConfigError.single(
            file, "pipelines", f"need {len(plan.ranks)} ranks, but {world_size} were started"
        )
    faults = unsupported(plan, file=file)
    if faults:
        raise ConfigError(faults)
    _check_machine(plan, rank, world_size=world_size, file=file)


def _check_machine(plan: Plan, rank: int, *, world_size: int, file: str) -> None:
    """Each machine must run the ranks of one node of the plan, unless one machine runs them all."""
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    first = rank - int(os.environ["LOCAL_RANK"])
    node = _node_of(plan.ranks[rank])
    planned = [place.rank for place in plan.ranks if _node_of(place) == node]
    if num_local != world_size and planned != list(range(first, first + num_local)):
        raise ConfigError.single(
            file,
            "pipelines",
            f"place ranks {planned[0]} to {planned[-1]} on node {node}, but rank {rank} was "
            f"started on a machine with ranks {first} to {first + num_local - 1}",
        )


def _node_of(place: RankPlace) -> str:
    return place.device.rpartition(":")[0]


def agree_on_plan(plan: Plan, *, device: torch.device) -> None:
    """Raise RuntimeError unless all ranks read the same plan."""
    mine = torch.frombuffer(
        bytearray(hashlib.sha256(plan.digest().encode()).digest()), dtype=torch.uint8
    ).to(device)
    all_digests = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, mine)
    others = [rank for rank, digest in enumerate(all_digests) if not torch.equal(digest, mine)]
    if others:
        raise RuntimeError(
            f"ranks {', '.join(map(str, others))} read another plan.json than rank "
            f"{dist.get_rank()}; the run folder must be the same on all nodes"
        )


def _spec_of(plan: Plan, *, file: str) -> ModelSpec:
    if plan.model_spec is None:
        raise ConfigError.single(file, "model_spec", "is missing; run the plan with --model")
    return plan.model_spec


def _claim_device(place: RankPlace, options: RunOptions, *, file: str) -> torch.device:
    """The device that the plan means, by its index on its node."""
    if options.device != "cuda":
        return torch.device("cpu")
    index = int(place.device.rpartition(":")[2])
    if index >= torch.cuda.device_count():
        raise ConfigError.single(
            file,
            "pipelines",
            f"use {place.device}, but that machine has {torch.cuda.device_count()} GPUs",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
