"""How many checkpoints of a run stay on disk. Needs no torch."""

from __future__ import annotations

import shutil

from eth_cli.errors import ConfigError
from eth_cli.launch import checkpoints
from eth_cli.launch.config import RunFolder


class Retention:
    """Removes old checkpoints of one run once newer ones are complete."""

    def __init__(
        self, folder: RunFolder, *, keep: int | None, resumed_from: int | None = None
    ) -> None:
        """``keep``: so many complete ones stay; None: all. ``resumed_from``: a checkpoint's step.

        Checkpoints of later steps than the one that is resumed from are damaged, or it would not
        have been: they do not count as complete, unless they are written anew.
        """
        self._folder = folder
        self._keep = keep
        self._damaged = {
            step
            for step in checkpoints.steps_of(folder)
            if resumed_from is not None and step > resumed_from
        }

    def remove_old(self, newest: int) -> None:
        """Remove what is too old now that the checkpoint after step ``newest`` is complete.

        The newest complete one stays whatever happens, and so do those of later steps, which this
        run has not come to. What cannot be removed is left.
        """
        self._damaged.discard(newest)
        if self._keep is None:
            return
        num_kept = 0
        for step in sorted(checkpoints.steps_of(self._folder), reverse=True):
            if step > newest:
                continue
            if num_kept >= self._keep:
                shutil.rmtree(self._folder.checkpoint_of(step), ignore_errors=True)
            elif step == newest or self._is_complete(step):
                num_kept += 1

    def _is_complete(self, step: int) -> bool:
        if step in self._damaged:
            return False
        try:
            info = checkpoints.read_info(self._folder, step)
            checkpoints.check_sizes(self._folder.checkpoint_of(step), info.files)
        except ConfigError:
            return False
        return True
