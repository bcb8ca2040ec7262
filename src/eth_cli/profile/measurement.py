"""What `profile.measure` asks of its workers and what each rank answers, as files of one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from eth_cli.model import ModelSpec
from eth_cli.profile.table import Dtype
from eth_cli.serde import Record

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]
NumBytes = Annotated[int, Field(ge=0)]

MESSAGE_BYTES = tuple(2**exponent for exponent in range(10, 25, 2))
"""Sizes of messages that links are measured with: 1 KiB to 16 MiB, in steps of 4."""


class Request(Record):
    """What to measure."""

    spec: ModelSpec
    seq_len: Positive
    dtype: Dtype
    micro_batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)]
    device: Literal["cpu", "cuda"]
    num_compute_ranks: Annotated[int, Field(ge=0)]
    """Ranks that time blocks, all at the same moment as in training; the others wait."""


class BlockMeasurement(Record):
    """One block kind at one micro-batch size, on one rank."""

    block: str
    micro_batch_size: Positive
    forward_s: PositiveSeconds
    """Median of the repetitions [s]; so for the backward."""
    backward_s: PositiveSeconds
    forward_spread_s: Annotated[float, Field(ge=0)]
    """Interquartile range of the repetitions [s]; so for the backward."""
    backward_spread_s: Annotated[float, Field(ge=0)]
    activation_bytes: NumBytes
    recompute_activation_bytes: NumBytes
    working_bytes: NumBytes
    """What forward and backward need at their peak beyond weights, gradients and activations."""


class RankMeasurement(Record):
    """Everything that one rank measured."""

    blocks: tuple[BlockMeasurement, ...] = ()
    optimizer_s_per_parameter: PositiveSeconds | None = None
    process_bytes: NumBytes = 0
    """Memory of the process before it held any block, and the largest working_bytes."""
    link_table: tuple[tuple[Annotated[float, Field(gt=0)], PositiveSeconds], ...] | None = None
    """[bytes, seconds] of one transfer between ranks 0 and 1, on rank 0."""


class Folder:
    """Paths in the folder that workers and their starter share."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.request = self.root / "request.json"
        self.progress = self.root / "progress.txt"
        """A line for each thing that rank 0 has measured."""
        self.logs = self.root / "logs"
        self.launcher_log = self.root / "launcher.log"

    def result_of(self, rank: int) -> Path:
        """What a rank measured."""
        return self.root / f"result-{rank}.json"

    def log_of(self, rank: int) -> Path:
        """What a rank printed."""
        return self.logs / f"rank-{rank}.log"
