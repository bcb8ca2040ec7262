"""Where a process of ``eth`` (or ``python -m eth_cli``) starts, before anything else is loaded.

Loading takes a good part of a second. Ctrl-C in that time, or after the last line, ends the
process quietly; in between, commands clean up after themselves (`eth_cli.cli`).
"""

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process."""
    # A shell has background jobs of scripts ignore Ctrl-C; that is left as it is.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _end)
    _open_closed_streams()
    # Loading makes some hundred thousand objects that stay; looking through them for garbage
    # every seven hundred, and all of them at the end, takes a quarter of a short command's time.
    gc.set_threshold(100_000, 20, 20)
    from eth_cli import cli

    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, cli.CTRL_C)
        cli.main()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        if is_interruptible:
            signal.signal(signal.SIGINT, _end)
        gc.freeze()


def _end(signal_number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _open_closed_streams() -> None:
    """What nobody listens to (``eth ... >&-``) goes nowhere, instead of into the next file opened.

    The system gives a new file the lowest free number, and 1 and 2 are where C code prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets this very number
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    main()
