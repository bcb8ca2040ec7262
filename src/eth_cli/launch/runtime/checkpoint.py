"""Tensors of checkpoints, by parameter name, so that a run goes on under any plan.

`torch.distributed.checkpoint` writes and reads them; what else a checkpoint consists of, and when
it is a whole one, is told in `eth_cli.launch.checkpoints`. Each parameter is saved once, by its
lowest owner.

The tensors are read without running anything that the files say: torch loads them with
``weights_only``, and the index is unpickled with the few classes that an index needs.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from eth_cli import serde
from eth_cli.errors import EthError, LaunchError
from eth_cli.launch.checkpoints import CheckpointInfo, files_of
from eth_cli.launch.config import CHECKPOINT_MARKER, RunFolder
from eth_cli.launch.retention import Retention
from eth_cli.launch.runtime.optim import Optimizer
from eth_cli.launch.runtime.shards import BoxLoadPlanner, BoxSavePlanner

_FULL_BYTES = 2**16
"""A disk with less space than this is full."""


class CheckpointWriter:
    """Writes a run's checkpoints, one after the other; all ranks use theirs together.

    `start` copies what is to be saved to buffers of the host, and a thread writes these while
    training goes on: `votes` tell all ranks, with what they exchange in each step anyway, whether
    anybody still writes or has failed. The buffers stay for the next checkpoint; a checkpoint that
    nothing goes on after (`save`) is written from the tensors themselves and takes none.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        group: dist.ProcessGroup,
        keep: int | None = None,
        resumed_from: int | None = None,
    ) -> None:
        """``group`` is of all ranks, talks between hosts, and is used by nobody else."""
        self._folder = folder
        self._group = group
        self._retention = Retention(folder, keep=keep, resumed_from=resumed_from)
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._written: tuple[float, float] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint was started that `finish` was not called for yet."""
        return self._thread is not None

    def votes(self) -> tuple[float, float]:
        """1 or 0 for each: this rank still writes; writing has failed. Summed over all ranks."""
        writes = self._thread is not None and self._thread.is_alive()
        return float(writes), float(not writes and self._error is not None)

    def start(self, info: CheckpointInfo, *, optimizer: Optimizer) -> None:
        """Begin to write a checkpoint; on return the parameters may be changed.

        Waits for the one before. Raises LaunchError where that one could not be written.
        """
        self.finish()
        state = self._on_host(optimizer.saved_state())
        # Not joined when the process ends otherwise: it may wait for ranks that are gone.
        self._thread = threading.Thread(
            target=self._write_apart, args=(info, state), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finish(self) -> tuple[float, float] | None:
        """Wait until the checkpoint that was started is complete on disk, for every rank.

        Returns:
            When it was written, start and stop [s since the epoch]; None where none was started.

        Raises:
            LaunchError: it cannot be written. What was written of it is removed; earlier ones are
                not touched.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._written

    def save(self, info: CheckpointInfo, *, optimizer: Optimizer) -> None:
        """Write a checkpoint; on return it is complete on disk, for every rank.

        Raises:
            LaunchError: as `finish`.
        """
        self.finish()
        self._write(info, optimizer.saved_state())

    def _on_host(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._stager.state_dict_cache is None and not torch.cuda.is_available():
            # The stager pins the buffers that it makes to keep; without a GPU nothing can be.
            self._stager.state_dict_cache = BlockingAsyncStager().stage(state)
        return self._stager.stage(state)

    def _write_apart(self, info: CheckpointInfo, state: dict[str, Any]) -> None:
        start_s = time.time()
        try:
            self._write(info, state)
        except Exception as error:
            self._error = error
        self._written = start_s, time.time()

    def _write(self, info: CheckpointInfo, state: dict[str, Any]) -> None:
        final = self._folder.checkpoint_of(info.step)
        aside = final.with_name(f".{final.name}.tmp")
        try:
            self._on_first_rank(lambda: self._make_room(final, aside))
            save_state(
                state,
                storage_writer=_Writer(aside),
                planner=BoxSavePlanner(),
                process_group=self._group,
            )
            self._on_first_rank(lambda: self._complete(info, final, aside))
        except (CheckpointException, OSError, EthError, _RemoteError) as error:
            reason = _reason(error)
            if dist.get_rank() == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise LaunchError(
                f"{final} cannot be written: {reason}; earlier checkpoints are untouched, "
                "go on from them with --resume"
            ) from error

    def _make_room(self, final: Path, aside: Path) -> None:
        for leftover in (final, *self._folder.checkpoints.glob(".step-*.tmp")):
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)

    def _complete(self, info: CheckpointInfo, final: Path, aside: Path) -> None:
        whole = info.model_copy(update={"files": files_of(aside)})
        serde.write_json(aside / CHECKPOINT_MARKER, whole)
        _sync_folder(aside)
        os.replace(aside, final)
        _sync_folder(self._folder.checkpoints)
        self._retention.remove_old(info.step)

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; all ranks go on after it, and fail if it fails."""
        outcome: list[str | None] = [None]
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                action()
            except (OSError, EthError) as error:
                outcome, failure = [_reason(error)], error
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if failure is not None:
            raise failure
        if outcome[0] is not None:
            raise _RemoteError(f"the remote worker 0 failed: {outcome[0]}")


class _RemoteError(Exception):
    """Another rank has failed; the message says which one, and why."""


def load(
    info: CheckpointInfo,
    *,
    folder: RunFolder,
    optimizer: Optimizer,
) -> None:
    """Read what this rank updates, and its parameters, in place; all ranks call this together.

    Raises:
        LaunchError: it cannot be read.
    """
    path = folder.checkpoint_of(info.step)
    try:
        load_state(optimizer.loaded_state(), storage_reader=_Reader(path), planner=BoxLoadPlanner())
        optimizer.publish()
    except (CheckpointException, OSError, EthError) as error:
        raise LaunchError(
            f"{path} cannot be loaded: {_reason(error)}; "
            "move this folder away to go on from an older checkpoint"
        ) from error


def _reason(error: BaseException) -> str:
    """Why saving or loading failed, in one line.

    torch raises the same exception on every rank, with the failures of all ranks in it. It is no
    `Exception`, and must not be let through: who catches those would miss it.
    """
    prefix = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        if rank != dist.get_rank():
            # As in the messages of lost connections, this is not the rank to blame.
            prefix = f"the remote worker {rank} failed: "
    if isinstance(error, _RemoteError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return prefix + error.strerror
    lines = str(error).splitlines() or [""]
    return f"{prefix}{type(error).__name__}: {lines[0]}"


def _sync_folder(path: Path) -> None:
    """Flush a folder's list of names to disk, without which a rename may be lost."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Writer(FileSystemWriter):
    """Writes torch's checkpoints; torch's own does not tell when it is the disk that is full."""

    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except Exception as error:
            if shutil.disk_usage(self.path).free < _FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


class _Reader(FileSystemReader):
    """Reads torch's checkpoints, but unpickles their index with known classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata  # type: ignore[no-any-return] # pickle has no types


class _IndexUnpickler(pickle.Unpickler):
    """Refuses everything that an index of tensors does not need."""

    _ALLOWED = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "Path")
        if (module, name) in self._ALLOWED or is_dtype or is_path:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's index asks for {module}.{name}")
