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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from eth_cli import serde
from eth_cli.errors import EthError, LaunchError
from eth_cli.launch.checkpoints import CheckpointInfo, files_of
from eth_cli.launch.config import CHECKPOINT_MARKER, RunFolder
from eth_cli.launch.runtime.optim import Optimizer
from eth_cli.launch.runtime.shards import BoxLoadPlanner, BoxSavePlanner

_FULL_BYTES = 2**16
"""A disk with less space than this is full."""


def save(
    info: CheckpointInfo,
    *,
    folder: RunFolder,
    optimizer: Optimizer,
) -> None:
    """Write a checkpoint; all ranks call this together.

    On return it is complete on disk, for every rank.

    Raises:
        LaunchError: it cannot be written. What was written of it is removed; earlier ones are not
            touched.
    """
    final = folder.checkpoint_of(info.step)
    aside = final.with_name(f".{final.name}.tmp")
    try:
        if dist.get_rank() == 0:
            for leftover in (final, *folder.checkpoints.glob(".step-*.tmp")):
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir(parents=True)
        dist.barrier()
        save_state(optimizer.saved_state(), storage_writer=_Writer(aside), planner=BoxSavePlanner())
        if dist.get_rank() == 0:
            whole = info.model_copy(update={"files": files_of(aside)})
            serde.write_json(aside / CHECKPOINT_MARKER, whole)
            _sync_folder(aside)
            os.replace(aside, final)
            _sync_folder(folder.checkpoints)
    except (CheckpointException, OSError, EthError) as error:
        reason = _reason(error)
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise LaunchError(
            f"{final} cannot be written: {reason}; earlier checkpoints are untouched, "
            "go on from them with --resume"
        ) from error
    dist.barrier()


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
