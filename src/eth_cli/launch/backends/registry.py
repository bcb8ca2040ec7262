"""The names of backends. A module is imported when it is first asked for, and not before."""

from __future__ import annotations

import importlib

from eth_cli.errors import ConfigError
from eth_cli.launch.backends.base import Backend

_MODULES: dict[str, str | None] = {
    "local": "eth_cli.launch.backends.local",
    "ssh": None,
    "slurm": None,
    "kubernetes": None,
}
"""Module of each backend; None: a name that is reserved and not implemented yet."""


def load_backend(name: str) -> Backend:
    """The backend of a name. Raises ConfigError for one that is unknown or not implemented."""
    if name not in _MODULES:
        raise ConfigError.single("--backend", "", f"{name!r} is unknown; use one of {_names()}")
    module = _MODULES[name]
    if module is None:
        ready = ", ".join(n for n, m in _MODULES.items() if m is not None)
        raise ConfigError.single("--backend", "", f"{name} is not implemented yet; use {ready}")
    backend: Backend = importlib.import_module(module).create()
    return backend


def _names() -> str:
    return ", ".join(_MODULES)
