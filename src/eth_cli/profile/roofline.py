"""How long arithmetic and memory traffic take on a device: the stated model of `profile.analytic`.

A block is a list of operations, each with its matrix FLOPs and the bytes that it moves through the
device's memory. An operation takes as long as the slower of the two (Williams et al. 2009,
"Roofline"); operations run one after the other, as they do on one stream in eager mode.

Left out: the time to start a kernel (some microseconds each, which dominates tiny models on real
GPUs), shapes that fill tensor cores badly, clock limits by power or heat, and collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MATMUL_EFFICIENCY = 0.7
"""Part of the data-sheet peak that matrix products of transformer layers reach on real GPUs: vendor
libraries measure 0.6 to 0.9. Attention reaches less, about 0.5, but is counted with the half of its
FLOPs that the causal mask hides, so that the same factor serves."""

MEMORY_EFFICIENCY = 0.8
"""Part of the data-sheet memory bandwidth that long element-wise kernels reach: copies measure 0.75
to 0.9."""

ADAMW_BYTES_PER_PARAMETER = {"fp32": 28, "bf16": 30, "fp16": 30}
"""Memory traffic of one fused AdamW update: fp32 weight, gradient and two moments are read (16),
weight and moments written (12); in half precision the working weight is written as well (2)."""

ADAMW_OPERATIONS_PER_PARAMETER = 14
"""Arithmetic of one AdamW update, for devices without a memory bandwidth: weight decay 1, first
moment 3, second moment 4, its root, bias correction and epsilon 3, quotient and step 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """What one operation costs, whatever the device."""

    flops: int
    """FLOPs of matrix products; 0 for everything else."""
    num_elements: int
    """Numbers that it writes."""
    num_bytes: int
    """Bytes that it reads and writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTrace:
    """What one block costs for one micro-batch, whatever the device."""

    forward: tuple[OpCost, ...]
    backward: tuple[OpCost, ...]
    activation_bytes: int
    """Saved for the backward pass; see `profile.activations` for what counts."""
    recompute_activation_bytes: int
    """The same with recomputation: the block's input."""

    @property
    def forward_flops(self) -> int:
        """Matrix FLOPs of the forward pass."""
        return sum(op.flops for op in self.forward)

    @property
    def backward_flops(self) -> int:
        """Matrix FLOPs of the backward pass."""
        return sum(op.flops for op in self.backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """What a device attains."""

    flops_per_s: float
    """Matrix FLOPs in a second."""
    bytes_per_s: float | None
    """Memory traffic in a second; None: not known, and operations without matrix FLOPs are taken
    to do one FLOP for each number that they write."""

    def time_s(self, ops: Iterable[OpCost]) -> float:
        """Time of operations that run one after the other [s]."""
        return sum(self._op_time_s(op) for op in ops)

    def _op_time_s(self, op: OpCost) -> float:
        if self.bytes_per_s is None:
            return (op.flops or op.num_elements) / self.flops_per_s
        return max(op.flops / self.flops_per_s, op.num_bytes / self.bytes_per_s)

    def optimizer_s_per_parameter(self, dtype: str) -> float:
        """Time to update one parameter by AdamW [s], trained in ``dtype``."""
        if self.bytes_per_s is None:
            return ADAMW_OPERATIONS_PER_PARAMETER / self.flops_per_s
        return ADAMW_BYTES_PER_PARAMETER[dtype] / self.bytes_per_s
