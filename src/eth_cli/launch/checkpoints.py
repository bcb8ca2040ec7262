"""Checkpoints on disk, without their tensors: what each is of, and whether it is intact.

A checkpoint is a folder ``step-NNNNNN`` with ``complete.json`` beside the files of the tensors,
which `eth_cli.launch.runtime.checkpoint` writes and reads. It is written under another name,
flushed to disk and renamed, so that a folder of this name was a whole one once. ``complete.json``
holds size and SHA-256 of each other file, so that damage done later is found before anything is
loaded.
Nothing here needs torch. Owns ``complete.json``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from eth_cli import serde
from eth_cli.errors import ConfigError, Fault
from eth_cli.launch.config import CHECKPOINT_MARKER, RunFolder, RunOptions
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan
from eth_cli.serde import Record

_THREADS = 8
"""Files that are hashed at once: each at 1 to 2 GB/s, while disks of one machine give less."""


class SavedFile(Record):
    """A file of a checkpoint as it was written."""

    name: str
    bytes: int
    sha256: str


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
    data_digest: str
    """Of the tokens that are trained on, wherever they are kept."""
    planned_steps: int
    """Steps in all of the run that wrote it, which its learning rates follow from."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None where it was not scaled."""
    num_finite_steps: int = 0
    """Finite steps since the loss scale changed."""
    files: tuple[SavedFile, ...] = ()
    """Every file of the checkpoint but this one."""

    @classmethod
    def of(
        cls, *, step: int, plan: Plan, spec: ModelSpec, options: RunOptions, data_digest: str
    ) -> CheckpointInfo:
        """What a checkpoint of this run after ``step`` steps is of, before its files are known."""
        return cls(
            step=step,
            next_sample=step * plan.global_batch_size,
            seed=options.seed,
            seq_len=plan.seq_len,
            global_batch_size=plan.global_batch_size,
            model_digest=serde.digest(serde.to_data(spec)),
            plan_digest=plan.digest(),
            data_digest=data_digest,
            planned_steps=options.steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The newest intact checkpoint of a run."""

    info: CheckpointInfo | None
    """None without one."""
    damaged: tuple[Fault, ...]
    """What is wrong with each newer one, newest first."""


def find_intact(folder: RunFolder) -> Found:
    """The newest checkpoint whose files are as they were written.

    Reads the files of that checkpoint, and of damaged newer ones: a second for one to a few GB.
    """
    damaged: list[Fault] = []
    for step in sorted(steps_of(folder), reverse=True):
        state = examine(folder, step, contents=True)
        if state.fault is None:
            return Found(info=state.info, damaged=tuple(damaged))
        damaged.append(state.fault)
    return Found(info=None, damaged=tuple(damaged))


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What is known of one checkpoint."""

    step: int
    info: CheckpointInfo | None
    """None where it does not tell what it is of."""
    fault: Fault | None
    """What is wrong with it."""

    @property
    def num_bytes(self) -> int:
        """Size of all its files, as they were written [bytes]."""
        return 0 if self.info is None else sum(saved.bytes for saved in self.info.files)


def examine(folder: RunFolder, step: int, *, contents: bool) -> State:
    """Look at the checkpoint after ``step`` steps, at names and sizes or at all its bytes."""
    info = None
    try:
        info = read_info(folder, step)
        check = _check_files if contents else check_sizes
        check(folder.checkpoint_of(step), info.files)
    except ConfigError as error:
        return State(step=step, info=info, fault=error.faults[0])
    return State(step=step, info=info, fault=None)


def examine_all(folder: RunFolder, *, contents: bool) -> tuple[State, ...]:
    """Every checkpoint of a run, oldest first."""
    return tuple(examine(folder, step, contents=contents) for step in sorted(steps_of(folder)))


def steps_of(folder: RunFolder) -> Iterator[int]:
    """Steps of the checkpoints of a run, intact or not, in no order."""
    for path in folder.checkpoints.glob("step-*"):
        if match := re.fullmatch(r"step-(\d{6,})", path.name):
            yield int(match[1])


def read_info(folder: RunFolder, step: int) -> CheckpointInfo:
    """What the checkpoint after ``step`` steps is of. Raises ConfigError where it does not tell."""
    path = folder.marker_of(step)
    info = serde.read_json(path, CheckpointInfo)
    if info.step != step:
        raise ConfigError.single(str(path), "step", f"is {info.step}, but its folder says {step}")
    return info


def files_of(path: Path) -> tuple[SavedFile, ...]:
    """Every file of a checkpoint's folder but ``complete.json``, by name.

    They have just been written, so reading them again comes from memory: hashing takes a small part
    of the time that writing and flushing them took. Raises OSError.
    """
    names = sorted(p.name for p in path.iterdir() if p.name != CHECKPOINT_MARKER)
    with ThreadPoolExecutor(_THREADS) as pool:
        return tuple(pool.map(lambda name: _saved(path / name), names))


def _saved(path: Path) -> SavedFile:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SavedFile(name=path.name, bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def _check_files(path: Path, files: tuple[SavedFile, ...]) -> None:
    """Raise ConfigError with the first file that is not as it was written."""
    # All sizes first: they cost nothing, and tell of most damage.
    check_sizes(path, files)
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda saved: _check_contents(path / saved.name, saved), files):
            pass


def check_sizes(path: Path, files: tuple[SavedFile, ...]) -> None:
    """Raise ConfigError with the first file of a checkpoint's folder that has another size."""
    for saved in files:
        try:
            size = (path / saved.name).stat().st_size
        except FileNotFoundError:
            _refuse(path / saved.name, "is gone")
        except OSError as error:
            _refuse(path / saved.name, f"cannot be read: {error.strerror}")
        if size != saved.bytes:
            _refuse(path / saved.name, f"has {size} bytes instead of {saved.bytes}")


def _check_contents(path: Path, saved: SavedFile) -> None:
    try:
        found = _saved(path)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    if found != saved:
        _refuse(path, "does not hold what was written (its SHA-256 differs)")


def _refuse(path: Path, message: str) -> NoReturn:
    raise ConfigError.single(str(path), "", message)


def check_resumable(
    info: CheckpointInfo,
    *,
    plan: Plan,
    spec: ModelSpec,
    options: RunOptions,
    data_digest: str,
    folder: RunFolder,
) -> None:
    """Raise ConfigError unless this run would have come to the checkpoint itself."""
    here = CheckpointInfo.of(
        step=info.step, plan=plan, spec=spec, options=options, data_digest=data_digest
    )
    names = {
        "model_digest": "model",
        "seq_len": "seq_len",
        "global_batch_size": "global_batch_size",
        "seed": "seed",
        "data_digest": "data",
    }
    path = str(folder.marker_of(info.step))
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
