"""GPU types with their data-sheet figures; data only.

Memory is the marketed size; peaks are dense (no structured sparsity) tensor-core figures where the
type has them, with fp32 the plain (non-TF32) rate. A dtype that is absent has no hardware support.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuType:
    """Data-sheet figures of one GPU type."""

    memory_bytes: int
    """Memory [bytes]."""
    peak_flops: MappingProxyType[str, float]
    """Dense peak by dtype [FLOP/s]."""
    memory_bandwidth_bytes_per_s: float
    """Memory bandwidth [bytes/s]."""
    intra_node_bytes_per_s: float
    """NVLink or PCIe to another GPU of the node, one direction [bytes/s]."""
    compute_capability: float
    """CUDA compute capability."""
    source: str
    """Title of the data sheet or white paper the figures are from."""


INTRA_NODE_LATENCY_S: Final = 5e-6
"""Latency assumed of a link inside a node whose bandwidth comes from this catalogue [s]."""

GPU_TYPES: Final[dict[str, GpuType]] = {}
