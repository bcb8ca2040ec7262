"""One `eth` command as a process of its own: how it ended, how long it took, how much memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one process did."""

    status: str
    """ok, infeasible, timeout, or failed (N) with the exit code."""
    wall_s: float
    memory_bytes: int
    """Peak resident memory of the process. Not below this script's own: Linux keeps the peak of the
    parent's pages that a process starts with."""
    message: str
    """The last line it wrote to stderr."""


def run(arguments: Sequence[object], *, timeout_s: float) -> Run:
    """Run eth with arguments, and measure the process."""
    command = [sys.executable, "-m", "eth_cli", *map(str, arguments)]
    expired = threading.Event()
    with tempfile.TemporaryFile() as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
        )

        def stop() -> None:
            expired.set()
            os.kill(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            # Popen.wait does not tell what the process used.
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    named = {0: "ok", 3: "infeasible"}
    outcome = named.get(process.returncode, f"failed ({process.returncode})")
    return Run(
        status="timeout" if expired.is_set() and process.returncode < 0 else outcome,
        wall_s=wall_s,
        memory_bytes=usage.ru_maxrss * 1024,
        message=lines[-1] if lines else "",
    )
