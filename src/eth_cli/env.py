"""Names of the environment variables that `eth` reads; `eth --help` shows them."""

from __future__ import annotations

import os
from typing import Final


class EnvVars:
    """Every variable, by what it is for."""

    DEBUG: Final = "ETH_DEBUG"
    """Set to 1: errors show their traceback."""
    NO_COLOR: Final = "NO_COLOR"
    """Set to anything: output has no colours (read by rich, see no-color.org)."""


def is_debug() -> bool:
    """Whether errors should show their traceback."""
    return os.environ.get(EnvVars.DEBUG, "") not in ("", "0")


def start_no_blas_threads() -> None:
    """Have NumPy, if loaded later, start no threads: a search has no product of large matrices.

    They take as long to start as a third of NumPy's loading. Whoever set the variable knows better.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
