"""What a model is made of, as arithmetic only: shapes, blocks, parameters, FLOPs.

A `ModelSpec` describes a decoder-only transformer of one of two families. Presets and the reading
of Hugging Face configurations live in `eth_cli.model_sources`, torch modules in `eth_cli.models`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eth_cli.serde import FieldError, Location, Record

Positive = Annotated[int, Field(gt=0)]

EMBEDDING = "embedding"
"""Kind of block 0: token (and position) embedding."""
TRANSFORMER = "transformer"
"""Kind of blocks 1 ... L: one transformer layer each."""
HEAD = "head"
"""Kind of the last block: final norm and vocabulary projection."""


class ModelSpec(Record):
    """Shape of a decoder-only transformer.

    Blocks are numbered 0 ... num_layers + 1: embedding, the layers, head.
    """

    name: str
    family: Literal["gpt", "llama"]
    """gpt: learned positions, LayerNorm, biases. llama: RoPE, RMSNorm, gated feed-forward."""
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: Positive
    ffn_size: Positive
    """Width of the feed-forward layer."""
    max_positions: Positive
    """Longest sequence (learned positions: rows of the table, less position_offset)."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"]
    tied: bool
    """Whether the head uses the token embedding's weight."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases (gpt has all biases)."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    position_offset: Annotated[int, Field(ge=0)] = 0
    """Unused rows before position 0 of the learned table (OPT: 2)."""
    embedding_size: Positive
    """Width of the token embedding; other than hidden_size adds projections (OPT-350M)."""
    post_norm: bool = False
    """Norm after each residual addition instead of before each sub-layer (OPT-350M)."""
    final_norm: bool = True
    """Whether the head starts with a norm."""

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        faults: list[tuple[Location, str]] = []
        if self.num_heads % self.num_kv_heads:
            faults.append(
                (
                    ("num_kv_heads",),
                    f"{self.num_kv_heads} does not divide num_heads {self.num_heads}",
                )
            )
        if self.family == "llama" and self.head_dim % 2:
            faults.append((("head_dim",), f"{self.head_dim} must be even for rotary positions"))
        if faults:
            raise FieldError(faults)
        return self

    @property
    def num_blocks(self) -> int:
        """Blocks of the model: embedding + layers + head."""
        return self.num_layers + 2

    def block_kind(self, index: int) -> str:
        """Kind of a block. Raises IndexError outside the model."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of a model with {self.num_blocks} blocks")
        if index == 0:
            return EMBEDDING
        return HEAD if index == self.num_blocks - 1 else TRANSFORMER

    def boundary_bytes_per_sample(self, seq_len: int, bytes_per_element: int) -> int:
        """Bytes between two blocks for one sample: seq_len x hidden_size elements."""
        return seq_len * self.hidden_size * bytes_per_element
