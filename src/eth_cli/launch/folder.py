"""Takes a run folder into use: the lock, what an earlier run left, and what workers read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.runtime.metrics import keep_until
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import Profile, write_profile


def prepare_folder(
    folder: RunFolder,
    plan: Plan,
    options: RunOptions,
    *,
    profile: Profile | None,
    first_step: int,
) -> None:
    """Make the folder what workers expect: plan, options, empty folders, nothing stale.

    ``profile`` is kept for reports; ``first_step`` is the step that the run goes on from.
    """
    # What an earlier run in this folder left of its last moment is not about this one.
    folder.stop.unlink(missing_ok=True)
    shutil.rmtree(folder.status, ignore_errors=True)
    _set_events_aside(folder, plan, first_step)
    # Workers do the same; but the launcher watches this file before they have come so far.
    keep_until(folder.metrics, first_step)
    for path in (folder.events, folder.checkpoints, folder.logs, folder.status):
        path.mkdir(parents=True, exist_ok=True)
    write_plan(folder.plan, plan)
    resolved = {
        "data": options.data.absolute(),
        "plan_digest": plan.digest(),
        "resume_step": first_step if options.resume else None,
    }
    serde.write_json(folder.options, options.model_copy(update=resolved))
    if profile is not None:
        write_profile(folder.profile, profile)


def _set_events_aside(folder: RunFolder, plan: Plan, first_step: int) -> None:
    """Events belong to one plan's ranks; those of another plan that was run before move away."""
    if not folder.events.is_dir():
        return
    with contextlib.suppress(ConfigError):
        if serde.read_json(folder.options, RunOptions).plan_digest == plan.digest():
            return
    aside = folder.root / f"events-until-step-{first_step:06d}"
    shutil.rmtree(aside, ignore_errors=True)
    folder.events.rename(aside)
    folder.profile.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run folder, which is created. The system lets go of it when this process ends."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError.single(
            str(folder.root), "", f"cannot be written: {error.strerror}"
        ) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError.single(
                str(folder.root), "", "is in use by another run; give another folder"
            ) from None
        yield
    finally:
        os.close(lock)
