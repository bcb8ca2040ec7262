"""What torchrun starts on each rank: ``python -m eth_cli.worker_entry [--log-dir=D] MODULE ARGS``.

Runs MODULE as ``python -m MODULE ARGS`` would, after three preparations that must hold even when
MODULE dies while it is imported: the rank ends when torchrun ends, what it prints goes to its own
log file, and an exception that ends it is told to torchrun in the way torchrun asks for
(TORCHELASTIC_ERROR_FILE). Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

from eth_cli.processes import die_with_parent

_LOG_OPTION = "--log-dir="


def main(arguments: list[str]) -> None:
    """Prepare, then become the module. Exceptions of the module pass through."""
    die_with_parent()
    if arguments and arguments[0].startswith(_LOG_OPTION):
        _redirect_output(Path(arguments[0].removeprefix(_LOG_OPTION)))
        arguments = arguments[1:]
    module, *rest = arguments
    sys.argv = [module, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        _tell_torchrun(error)
        raise


def _redirect_output(log_dir: Path) -> None:
    log = log_dir / f"rank-{os.environ['RANK']}.log"
    # On the descriptors, so that what C++ code prints (a crash, a gloo abort) arrives there too.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _tell_torchrun(error: Exception) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    lines = str(error).splitlines() or [""]
    now = time.time()
    record = {
        "message": {
            "message": f"{type(error).__name__}: {lines[0]}"[:500],
            "extraInfo": {"py_callstack": traceback.format_exc(), "timestamp": str(int(now))},
        },
        # Ours: torchrun keeps whole seconds only, which do not tell who was first.
        "time_s": now,
    }
    with contextlib.suppress(OSError):  # a full disk; the exception itself goes on
        Path(path).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
