"""Checkpoints by parameter name, so that a run goes on under any plan.

A checkpoint is a folder ``step-NNNNNN`` that `torch.distributed.checkpoint` wrote, with
``complete.json`` beside the tensors: what was trained, and how far. It is written under another
name, flushed to disk and renamed, so that a folder of this name is a whole one; one without a
readable ``complete.json`` is ignored. Each parameter is saved once, by its lowest owner.

The tensors are read without running anything that the files say: torch loads them with
``weights_only``, and the index is unpickled with the few classes that an index needs.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from eth_cli import serde
from eth_cli.errors import ConfigError, Fault
from eth_cli.launch.config import CHECKPOINT_MARKER as MARKER
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.runtime.optim import Optimizer
from eth_cli.launch.runtime.stage import OwnedParameter
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.serde import Record


class CheckpointInfo(Record):
    """What a checkpoint is of; the contents of ``complete.json``."""

    step: int
    """Optimizer steps taken."""
    next_sample: int
    """Global position of the first sample that was not trained on yet."""
    seed: int
    seq_len: int
    global_batch_size: int
    model_digest: str
    plan_digest: str
    """The plan that it was written under; another one may go on from it."""

    @classmethod
    def of(cls, *, step: int, plan: Plan, spec: ModelSpec, options: RunOptions) -> CheckpointInfo:
        """What a checkpoint of this run after ``step`` steps is of."""
        return cls(
            step=step,
            next_sample=step * plan.global_batch_size,
            seed=options.seed,
            seq_len=plan.seq_len,
            global_batch_size=plan.global_batch_size,
            model_digest=serde.digest(serde.to_data(spec)),
            plan_digest=plan.digest(),
        )


def find_newest(folder: RunFolder) -> CheckpointInfo | None:
    """The newest complete checkpoint of a run; None without one. Incomplete ones are ignored."""
    found = []
    for path in folder.checkpoints.glob("step-*"):
        match = re.fullmatch(r"step-(\d{6,})", path.name)
        if match is None:
            continue
        try:
            info = serde.read_json(path / MARKER, CheckpointInfo)
        except ConfigError:
            continue
        if info.step == int(match[1]):
            found.append(info)
    return max(found, key=lambda info: info.step, default=None)


def check_resumable(
    info: CheckpointInfo, *, plan: Plan, spec: ModelSpec, options: RunOptions, folder: RunFolder
) -> None:
    """Raise ConfigError unless this run would have come to the checkpoint itself."""
    here = CheckpointInfo.of(step=info.step, plan=plan, spec=spec, options=options)
    names = {
        "model_digest": "model",
        "seq_len": "seq_len",
        "global_batch_size": "global_batch_size",
        "seed": "seed",
    }
    path = str(folder.checkpoint_of(info.step) / MARKER)
    faults = [
        Fault(
            file=path,
            field=field,
            message=f"was trained with {name} {getattr(info, field)}, but this run has "
            f"{getattr(here, field)}; use the same {name}, or another --out to start afresh",
        )
        for field, name in names.items()
        if getattr(info, field) != getattr(here, field)
    ]
    if info.step > options.steps:
        faults.append(
            Fault(
                file=path,
                field="step",
                message=f"is {info.step}, past the {options.steps} steps of this run; "
                "give more --steps",
            )
        )
    if faults:
        raise ConfigError(faults)


def save(
    info: CheckpointInfo,
    *,
    folder: RunFolder,
    parameters: Sequence[OwnedParameter],
    optimizer: Optimizer,
) -> None:
    """Write a checkpoint; all ranks call this together, each with the parameters it saves.

    On return it is complete on disk, for every rank.
    """
    final = folder.checkpoint_of(info.step)
    aside = final.with_name(f".{final.name}.tmp")
    if dist.get_rank() == 0:
        for leftover in (final, *folder.checkpoints.glob(".step-*.tmp")):
            shutil.rmtree(leftover, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    save_state(_state(parameters, optimizer), storage_writer=FileSystemWriter(aside))
    if dist.get_rank() == 0:
        serde.write_json(aside / MARKER, info)
        _sync_folder(aside)
        os.replace(aside, final)
        _sync_folder(folder.checkpoints)
    dist.barrier()


def load(
    info: CheckpointInfo,
    *,
    folder: RunFolder,
    parameters: Sequence[OwnedParameter],
    optimizer: Optimizer,
) -> None:
    """Read this rank's parameters and their moments in place; all ranks call this together."""
    path = folder.checkpoint_of(info.step)
    load_state(_state(parameters, optimizer), storage_reader=_Reader(path))


def _state(parameters: Iterable[OwnedParameter], optimizer: Optimizer) -> dict[str, Any]:
    """The live tensors by name: ``weight.<name>``, ``exp_avg.<name>``, ..."""
    state: dict[str, Any] = {}
    for owned in parameters:
        state[f"weight.{owned.name}"] = owned.parameter.detach()
        for key, tensor in optimizer.state_of(owned).items():
            state[f"{key}.{owned.name}"] = tensor
    return state


def _sync_folder(path: Path) -> None:
    """Flush a folder's list of names to disk, without which a rename may be lost."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
