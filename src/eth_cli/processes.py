"""Trees of processes: started with a mark, found again whoever their parents are, ended whole.

Finding relies on /proc and so on Linux; elsewhere only the root of a tree is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

_MARKER = "ETH_PROCESS_TREE"
"""Environment variable that every process of one tree inherits, whoever its parent is now."""
_POLL_S = 0.05
_COLLECT_S = 1.0
"""Time that a process gets to collect its killed children [s]."""
_GIVE_UP_S = 10.0
"""Time after which what survives SIGKILL is left behind [s]."""


class ProcessTree(subprocess.Popen[bytes]):
    """A process, with a mark by which all its descendants are found, even orphaned ones."""

    marker: str


def start(command: Sequence[str], *, env: Mapping[str, str], output: str | Path) -> ProcessTree:
    """Start a command in a session of its own, so that a terminal's Ctrl-C does not reach it.

    Args:
        command: the program and its arguments.
        env: what to add to the present environment.
        output: file that what the command prints is appended to.
    """
    marker = uuid.uuid4().hex
    with open(output, "ab") as file:
        process = ProcessTree(
            command,
            env={**os.environ, **env, _MARKER: marker},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.marker = marker
    return process


def stop_process_tree(process: subprocess.Popen[bytes], *, grace_s: float) -> None:
    """End a process and everything that it started, and wait until all of it is gone.

    It is asked first (SIGTERM), and killed when anything is left after ``grace_s`` seconds.
    Descendants are found by parenthood, and those of a `ProcessTree` also by their mark, which
    finds them when their parent has died or they began a session of their own.
    """
    marker = getattr(process, "marker", None)
    known = _descendants(process.pid, marker)
    if process.poll() is None and grace_s > 0:
        process.terminate()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and (process.poll() is None or _alive(known)):
            time.sleep(_POLL_S)
    # Its descendants are killed before itself, so that it can still collect them: whoever becomes
    # their parent otherwise may not. And again until none is left, for those that they start.
    root_s = time.monotonic() + (_COLLECT_S if _alive(known) else 0.0)
    give_up_s = time.monotonic() + _GIVE_UP_S
    while True:
        known |= _descendants(process.pid, marker)
        left = _alive(known)
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        now = time.monotonic()
        if process.poll() is None:
            if now >= root_s:
                process.kill()
        elif not left:
            return
        if now > give_up_s:
            # Only a process inside the kernel (a dead disk, a lost GPU) survives SIGKILL so long.
            return
        time.sleep(_POLL_S)


Process = tuple[int, int]
"""A process id and its start time in clock ticks: ids alone are used again."""


def _processes() -> dict[Process, int]:
    """Every live process with its parent's id; empty where there is no /proc."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command, in parentheses, may itself hold spaces and parentheses.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in ("Z", "X"):
                found[int(entry.name), int(fields[19])] = int(fields[1])
    return found


def _descendants(root: int, marker: str | None) -> set[Process]:
    processes = _processes()
    result: set[Process] = set()
    parents = {root}
    while parents:
        children = {p for p, parent in processes.items() if parent in parents} - result
        result |= children
        parents = {pid for pid, _ in children}
    if marker is not None:
        wanted = f"{_MARKER}={marker}".encode()
        for process in processes:
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{process[0]}/environ").read_bytes().split(b"\0"):
                    result.add(process)
    return {process for process in result if process[0] not in (root, os.getpid())}


def _alive(processes: set[Process]) -> set[Process]:
    return processes & set(_processes()) if processes else set()


def children_of(pid: int) -> tuple[int, ...]:
    """The live children of a process, ascending."""
    return tuple(sorted(child for (child, _), parent in _processes().items() if parent == pid))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens (Linux).

    Strictly: when the parent's thread that started it ends.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
