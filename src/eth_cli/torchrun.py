"""Start a Python module on several local ranks under torchrun, and stop all of it again.

``python -m eth_cli.torchrun OPTIONS`` is torchrun (`torch.distributed.run`, same options) with two
additions: it dies with whoever started it, and it writes down how each failed rank ended
(`read_exits`). Each rank starts through `eth_cli.worker_entry`, which dies with torchrun and sends
what it prints to ``LOG_DIR/rank-N.log``. Used by `launch.backends` and `profile.measure`; torch is
imported only inside torchrun's own process, never here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eth_cli.processes import (
    ProcessTree,
    children_of,
    die_with_parent,
    start,
    stop_process_tree,
)

__all__ = [
    "Death",
    "ProcessTree",
    "RankExit",
    "argv",
    "clear_exits",
    "rank_pids",
    "read_deaths",
    "read_exits",
    "start",
    "stop_process_tree",
    "worker_env",
]

_NOTICE_S = 0.01
"""Time between two looks at a child that has ended and is not collected yet [s]."""


def argv(
    *, num_ranks: int, module: str, args: Sequence[str], log_dir: str | Path | None = None
) -> list[str]:
    """The command that runs ``python -m module args`` on ``num_ranks`` ranks of this machine.

    Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.
    The port is a free one, so any number of such commands run side by side. With ``log_dir`` each
    rank's output goes to ``log_dir/rank-N.log``; without, to the output of the command.
    """
    command = [
        sys.executable,
        "-m",
        "eth_cli.torchrun",
        "--standalone",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={num_ranks}",
        "--max-restarts=0",
        "--shutdown-timeout=5",
    ]
    if log_dir is not None:
        command.append(f"--log-dir={_scratch(log_dir)}")
    command += ["--module", "eth_cli.worker_entry"]
    if log_dir is not None:
        command.append(f"--log-dir={log_dir}")
    return [*command, module, *args]


def worker_env() -> dict[str, str]:
    """What the environment of `argv`'s command needs beside the present one. Holds no secrets."""
    env = {
        # Ranks share the cores of this machine; more threads than cores only slow each other.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # `python -m` puts the present folder first on the path, where a user's file that is named
        # like a library would be imported in its place.
        "PYTHONSAFEPATH": "1",
        # Workers report what matters themselves; torch warns of harmless things in every log.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    # All ranks are on this machine. Without a choice gloo resolves the host name, which fails or
    # is slow on machines whose name is not in DNS.
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        names = [name for _, name in socket.if_nameindex()]
        loopback = next((name for name in ("lo", "lo0") if name in names), None)
        if loopback is not None:
            env["GLOO_SOCKET_IFNAME"] = loopback
    return env


def rank_pids(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """The process of each rank that a running `argv` command has started, as far as it has."""
    found = {}
    for pid in children_of(process.pid):
        with contextlib.suppress(OSError, ValueError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            values = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            # Both: a RANK alone may come from the environment that this program was called in.
            if b"TORCHELASTIC_RUN_ID" in values and b"RANK" in values:
                found[int(values[b"RANK"])] = pid
    return found


# --- How ranks ended ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How a rank ended that did not end well."""

    rank: int
    pid: int
    code: int
    """Exit code; a negative one is the signal that killed it."""
    error: str = ""
    """The exception that ended it, in one line; empty when it did not get to tell."""
    time_s: float | None = None
    """When it raised that exception [s since the epoch]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of a child of torchrun, good or bad."""

    pid: int
    code: int
    """Exit code; a negative one is the signal that killed it."""


def read_exits(log_dir: str | Path) -> tuple[RankExit, ...]:
    """How the failed ranks ended; empty while any of them runs, and when none failed.

    A rank that torchrun stopped because another one had failed stands there with code -15.
    """
    try:
        data = json.loads(_exits_path(log_dir).read_text(encoding="utf-8"))
        return tuple(RankExit(**entry) for entry in data)
    except (OSError, ValueError, TypeError):
        return ()


def read_deaths(log_dir: str | Path) -> tuple[Death, ...]:
    """Which ranks have ended so far, in order, as far as it was noticed in time.

    torchrun itself tells only when all ranks have ended (`read_exits`), which takes up to a minute
    when one of them does not react.
    """
    try:
        lines = _deaths_path(log_dir).read_text(encoding="utf-8").splitlines()
        return tuple(Death(**json.loads(line)) for line in lines)
    except (OSError, ValueError, TypeError):
        return ()


def clear_exits(log_dir: str | Path) -> None:
    """Forget how an earlier run in this folder ended."""
    _exits_path(log_dir).unlink(missing_ok=True)
    _deaths_path(log_dir).unlink(missing_ok=True)


def _exits_path(log_dir: str | Path) -> Path:
    return Path(log_dir) / "exits.json"


def _deaths_path(log_dir: str | Path) -> Path:
    return Path(log_dir) / "deaths.jsonl"


def _scratch(log_dir: str | Path) -> Path:
    """Where torchrun keeps its own files while it runs."""
    return Path(log_dir) / "torchrun"


def main() -> int:
    """Be torchrun. Returns the exit code."""
    die_with_parent()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = run.parse_args(sys.argv[1:])  # type: ignore[no-untyped-call] # torch has no types here
    log_dir = None if arguments.log_dir is None else Path(arguments.log_dir).parent
    arguments.log_dir = arguments.log_dir or tempfile.mkdtemp(prefix="eth-torchrun-")
    if log_dir is not None:
        threading.Thread(target=_note_deaths, args=[_deaths_path(log_dir)], daemon=True).start()
    try:
        run.run(arguments)  # type: ignore[no-untyped-call] # torch has no types here
    except ChildFailedError as error:
        if log_dir is not None:
            exits = [
                {
                    "rank": rank,
                    "pid": failure.pid,
                    "code": failure.exitcode,
                    **_raised(failure.error_file_data),
                }
                for rank, failure in sorted(error.failures.items())
            ]
            path = _exits_path(log_dir)
            aside = path.with_suffix(".tmp")
            with contextlib.suppress(OSError):  # a full disk: the exit code still tells of failure
                aside.write_text(json.dumps(exits), encoding="utf-8")
                os.replace(aside, path)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        shutil.rmtree(arguments.log_dir, ignore_errors=True)
    return 0


def _note_deaths(path: Path) -> None:
    """Write down each child's end as it happens, and leave it to torchrun to collect.

    torchrun collects ten times a second; a child that it collects within the moment that this
    thread needs to wake up is missed.
    """
    known: set[int] = set()
    with open(path, "a", encoding="utf-8", buffering=1) as file:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:
                ended = None  # no child yet, or no more
            if ended is not None and ended.si_pid not in known:
                known.add(ended.si_pid)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                file.write(json.dumps({"pid": ended.si_pid, "code": code}) + "\n")
            time.sleep(_NOTICE_S)  # until it is collected, the same child is told again


def _raised(record: Mapping[str, object]) -> dict[str, object]:
    """What `eth_cli.worker_entry` left of the exception that ended a rank, if it did."""
    message = record.get("message")
    if not isinstance(message, dict):
        return {}
    return {"error": message["message"], "time_s": record["time_s"]}


if __name__ == "__main__":
    sys.exit(main())
