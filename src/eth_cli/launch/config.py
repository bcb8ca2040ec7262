"""Options of a run and the layout of its folder; shared by launcher and workers. Owns run.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from eth_cli.buckets import BUCKET_BYTES
from eth_cli.serde import Record

Positive = Annotated[int, Field(ge=1)]

CHECKPOINT_MARKER = "complete.json"
"""File in a checkpoint that makes it a whole one, and says what it is of."""


class DataPath(Record):
    """One source of training data."""

    path: str
    """A file, a folder, or the prefix of Megatron's two files."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its part of what is trained on, to the other sources' weights; None: by its size."""


class DataOptions(Record):
    """What is trained on."""

    paths: tuple[DataPath, ...] = ()
    """None: the text that ships with Python."""
    tokenizer: str | None = None
    """A tokenizer.json, or its folder; ``bytes`` or None: text is used byte by byte."""
    text_field: str = "text"
    """Where a record of JSONL holds its text."""
    ignore_borders: bool = False
    """Whether the first token of a document is never a label."""
    cache: str | None = None
    """Folder of the token cache; None: the user's."""

    def absolute(self) -> DataOptions:
        """The same with paths that hold wherever a worker runs."""
        return self.model_copy(
            update={
                "paths": tuple(
                    entry.model_copy(update={"path": _absolute(entry.path)}) for entry in self.paths
                ),
                "tokenizer": self.tokenizer
                if self.tokenizer in (None, "bytes")
                else _absolute(self.tokenizer),
                "cache": None if self.cache is None else _absolute(self.cache),
            }
        )


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


class RunOptions(Record):
    """Everything a worker needs beside the plan. Defaults are resolved here, once."""

    data: DataOptions = DataOptions()
    steps: Positive
    """Optimizer steps in all, those before a resume included."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    final_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate after the last step, as a part of the peak (cosine schedule)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """On matrices only, as usual: not on norms and biases."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; None: no clipping."""
    grad_sync: Literal["block", "layer", "whole"] = "block"
    """block: gradients are summed in buckets, as soon as the backward is done with one. For
    measurement: layer sums each block by itself, whole sums nothing before the end of the backward.
    """
    bucket_bytes: Positive = BUCKET_BYTES
    """Most fp32 gradients in a bucket, for each stage that sums it [bytes]; a block that has more
    is one by itself."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed in between ranks; they are accumulated in fp32 anyway."""
    loss_chunk: Annotated[int, Field(ge=0)] = 0
    """Tokens whose logits exist at a time; 0: those of a whole micro-batch."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: Positive | None = None
    """Complete checkpoints that stay, the newest ones; None: all."""
    resume: bool = False
    """Whether to go on from the newest intact checkpoint of the run folder."""
    resume_step: Annotated[int, Field(ge=0)] | None = None
    """Step of the checkpoint that the launcher found to be intact; workers then do not look."""
    sample_log: bool = False
    """Whether each rank that reads samples logs their ids (samples/rank-N.jsonl)."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 20.0
    """A rank that shows no progress for so long, beyond what the plan predicts, has hung."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time for all workers to start, build and agree."""
    device: str = "cpu"
    """cpu or cuda: what workers compute on."""
    plan_digest: str | None = None
    """Digest of the plan that the launcher checked; a worker that finds another one stops."""


class RunFolder:
    """Paths in a run folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.plan = self.root / "plan.json"
        self.options = self.root / "run.json"
        self.profile = self.root / "profile.json"
        """A copy of the profile that the plan was made with, where the launcher was given it."""
        self.lock = self.root / ".lock"
        """Held by the launcher while it runs, so that no two runs share a folder."""
        self.metrics = self.root / "metrics.jsonl"
        self.events = self.root / "events"
        self.checkpoints = self.root / "checkpoints"
        self.logs = self.root / "logs"
        self.status = self.root / "status"
        self.samples = self.root / "samples"
        self.stop = self.root / "stop"
        """While this file exists, workers stop after the step in progress, with a checkpoint."""

    def events_of(self, rank: int) -> Path:
        """Event file of a rank."""
        return self.events / f"rank-{rank}.jsonl"

    def log_of(self, rank: int) -> Path:
        """Log file of a rank."""
        return self.logs / f"rank-{rank}.log"

    def status_of(self, rank: int) -> Path:
        """Status file of a rank; see `eth_cli.launch.status`."""
        return self.status / f"rank-{rank}"

    def samples_of(self, rank: int) -> Path:
        """Log of the samples that a rank's pipeline trained on; see `RunOptions.sample_log`."""
        return self.samples / f"rank-{rank}.jsonl"

    def checkpoint_of(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` optimizer steps."""
        return self.checkpoints / f"step-{step:06d}"

    def marker_of(self, step: int) -> Path:
        """The `CHECKPOINT_MARKER` of the checkpoint after ``step`` optimizer steps."""
        return self.checkpoint_of(step) / CHECKPOINT_MARKER
