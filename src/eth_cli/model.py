"""What a model is made of, as arithmetic only: shapes, blocks, parameters, FLOPs.

A `ModelSpec` describes a decoder-only transformer of one of two families. Presets and the reading
of Hugging Face configurations live in `eth_cli.model_sources`, torch modules in `eth_cli.models`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from eth_cli.errors import ConfigError
from eth_cli.serde import FieldError, Location, Record

Positive = Annotated[int, Field(gt=0, le=10**9)]
Width = Annotated[int, Field(gt=0, le=2**20)]
"""Far above any model's, and small enough that no weight has more bytes than a number can count."""
FfnWidth = Annotated[int, Field(gt=0, le=2**24)]

MAX_ATTENTION_WIDTH = 2**24
"""Largest num_heads x head_dim."""
MAX_ELEMENTS = 2**58
"""No tensor may have more elements: 8 bytes for each are still well below 2**63."""

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one number of each dtype that a plan may train in."""

EMBEDDING = "embedding"
"""Kind of block 0: token (and position) embedding."""
TRANSFORMER = "transformer"
"""Kind of blocks 1 ... L: one transformer layer each."""
HEAD = "head"
"""Kind of the last block: final norm and vocabulary projection."""


class RopeScaling(Record):
    """How rotary positions are stretched to reach further than the model was first trained for."""

    type: Literal["linear", "dynamic", "llama3", "yarn"]
    """linear: all angles divided by factor (Chen et al. 2023). llama3: slow ones only, with a
    smooth passage (Llama 3.1). yarn: by the turns of each pair (Peng et al. 2023). dynamic: changes
    nothing up to max_positions, and longer sequences are refused."""
    factor: Annotated[float, Field(ge=1)]
    original_positions: Positive | None = None
    """Positions of the first training (llama3, yarn)."""
    low_frequency_factor: Annotated[float, Field(gt=0)] | None = None
    """llama3: pairs that turn fewer times than this within original_positions are slow."""
    high_frequency_factor: Annotated[float, Field(gt=0)] | None = None
    """llama3: those that turn more often keep their angles."""
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    """yarn: pairs that turn more often within original_positions keep their angles."""
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    """yarn: angles of those that turn fewer times are divided by factor."""
    attention_factor: Annotated[float, Field(gt=0)] = 1.0
    """yarn: cosines and sines are multiplied by this."""
    truncate: bool = True
    """yarn: whether the ends of the passage are rounded to whole pairs."""

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        needed = {
            "llama3": ("original_positions", "low_frequency_factor", "high_frequency_factor"),
            "yarn": ("original_positions",),
        }.get(self.type, ())
        faults: list[tuple[Location, str]] = [
            ((field,), f"is missing; scaling of type {self.type} needs it")
            for field in needed
            if getattr(self, field) is None
        ]
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low is not None and high is not None and high <= low:
            faults.append(
                (("high_frequency_factor",), f"{high:g} must be above low_frequency_factor {low:g}")
            )
        if faults:
            raise FieldError(faults)
        return self


class ModelSpec(Record):
    """Shape of a decoder-only transformer.

    Blocks are numbered 0 ... num_layers + 1: embedding, the layers, head.
    """

    name: Annotated[str, Field(min_length=1)]
    family: Literal["gpt", "llama"]
    """gpt: learned positions, LayerNorm, biases. llama: RoPE, RMSNorm, gated feed-forward."""
    vocab_size: Positive
    hidden_size: Width
    num_layers: Annotated[int, Field(gt=0, le=99_998)]
    num_heads: Width
    num_kv_heads: Width
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: Width
    ffn_size: FfnWidth
    """Width of the feed-forward layer."""
    max_positions: Positive
    """Longest sequence (learned positions: rows of the table, less position_offset)."""
    attention_window: Positive | None = None
    """Tokens that each token attends to, itself included; None: all before it."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"]
    tied: bool
    """Whether the head uses the token embedding's weight."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases (gpt has all biases)."""
    out_bias: bool = False
    """Whether the attention's output projection has a bias (gpt has all biases)."""
    mlp_bias: bool = False
    """Whether the feed-forward projections have biases (gpt has all biases)."""
    qk_norm: bool = False
    """Whether queries and keys are normed, each head by itself (Qwen3)."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched; None: not at all."""
    position_offset: Annotated[int, Field(ge=0)] = 0
    """Unused rows before position 0 of the learned table (OPT: 2)."""
    embedding_size: Width
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
        attended = self.num_heads * self.head_dim
        if attended > MAX_ATTENTION_WIDTH:
            faults.append(
                (
                    ("head_dim",),
                    f"{self.num_heads} heads of {self.head_dim} are {attended} wide; "
                    f"at most {MAX_ATTENTION_WIDTH} is possible",
                )
            )
        if self.family == "llama":
            faults += self._llama_faults()
        else:
            llama_only = ("attention_window", "out_bias", "mlp_bias", "qk_norm", "rope_scaling")
            faults += [
                ((field,), "is for the llama family only; leave it out")
                for field in llama_only
                if getattr(self, field)
            ]
        if faults:
            raise FieldError(faults)
        return self

    def _llama_faults(self) -> list[tuple[Location, str]]:
        faults: list[tuple[Location, str]] = []
        if self.head_dim % 2:
            faults.append((("head_dim",), f"{self.head_dim} must be even for rotary positions"))
        if self.embedding_size != self.hidden_size:
            faults.append(
                (
                    ("embedding_size",),
                    f"{self.embedding_size} must equal hidden_size {self.hidden_size} in the llama "
                    "family, which has no embedding projections",
                )
            )
        unsupported = {
            "post_norm": self.post_norm,
            "final_norm": not self.final_norm,
            "position_offset": bool(self.position_offset),
        }
        faults += [
            ((field,), "is for the gpt family only; leave it out")
            for field, given in unsupported.items()
            if given
        ]
        return faults

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

    # --- Parameters ---------------------------------------------------------------------------

    def parameter_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of a block by its name in the block's module, in module order.

        The head's ``weight`` is listed whether or not it is tied. Linear weights are (out, in).
        """
        kind = self.block_kind(index)
        if kind == EMBEDDING:
            return self._embedding_shapes()
        return self._head_shapes() if kind == HEAD else self._layer_shapes()

    def _embedding_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "token.weight": (self.vocab_size, self.embedding_size)
        }
        if self.family == "gpt":
            rows = self.max_positions + self.position_offset
            shapes["position.weight"] = (rows, self.hidden_size)
            if self.embedding_size != self.hidden_size:
                shapes["project_in.weight"] = (self.hidden_size, self.embedding_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, attended = self.hidden_size, self.num_heads * self.head_dim
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        gpt = self.family == "gpt"
        shapes: dict[str, tuple[int, ...]] = {"norm1.weight": (hidden,)}
        if gpt:
            shapes["norm1.bias"] = (hidden,)
        shapes["attention.qkv.weight"] = (qkv, hidden)
        if gpt or self.qkv_bias:
            shapes["attention.qkv.bias"] = (qkv,)
        shapes["attention.out.weight"] = (hidden, attended)
        if gpt or self.out_bias:
            shapes["attention.out.bias"] = (hidden,)
        if self.qk_norm:
            shapes["attention.q_norm.weight"] = (self.head_dim,)
            shapes["attention.k_norm.weight"] = (self.head_dim,)
        shapes["norm2.weight"] = (hidden,)
        if gpt:
            return shapes | {
                "norm2.bias": (hidden,),
                "mlp.up.weight": (self.ffn_size, hidden),
                "mlp.up.bias": (self.ffn_size,),
                "mlp.down.weight": (hidden, self.ffn_size),
                "mlp.down.bias": (hidden,),
            }
        widths = {"gate": (self.ffn_size, hidden), "up": (self.ffn_size, hidden)}
        for name, (rows, columns) in (widths | {"down": (hidden, self.ffn_size)}).items():
            shapes[f"mlp.{name}.weight"] = (rows, columns)
            if self.mlp_bias:
                shapes[f"mlp.{name}.bias"] = (rows,)
        return shapes

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.vocab_size, self.embedding_size)}
        if self.final_norm:
            shapes["norm.weight"] = (self.hidden_size,)
            if self.family == "gpt":
                shapes["norm.bias"] = (self.hidden_size,)
        if self.embedding_size != self.hidden_size:
            shapes["project_out.weight"] = (self.embedding_size, self.hidden_size)
        return shapes

    def block_parameters(self, index: int) -> int:
        """Parameters of a block; a tied weight counts in each place that uses it."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(index).values())

    @property
    def tied_parameters(self) -> int:
        """Parameters of the weight that embedding and head share; 0 where they share none."""
        return self.vocab_size * self.embedding_size if self.tied else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        ends = self.block_parameters(0) + self.block_parameters(self.num_blocks - 1)
        return ends + self.num_layers * self.block_parameters(1) - self.tied_parameters

    # --- Arithmetic work ----------------------------------------------------------------------

    def forward_flops(self, index: int, *, micro_batch_size: int, seq_len: int) -> int:
        """FLOPs of a block's matrix products in one forward pass, 2 per multiply-add.

        Every matrix that is multiplied costs 2 x elements for each token. Attention adds
        4 x seq_len x heads x head_dim for each token (scores, then their product with the values);
        the half that the causal mask hides is counted, as `torch.utils.flop_counter` does.
        With a sliding window scores are computed in chunks, see `window_chunks`.
        Look-ups, norms and activations are memory traffic, not arithmetic, and count nothing.
        """
        shapes = self.parameter_shapes(index)
        if self.block_kind(index) == EMBEDDING:
            shapes = {n: s for n, s in shapes.items() if n.startswith("project_in")}
        flops = 2 * sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
        total = seq_len * flops
        if self.block_kind(index) == TRANSFORMER:
            num_chunks, length = window_chunks(seq_len, self.attention_window)
            scores = (2 * num_chunks - 1) * length**2
            total += 4 * scores * self.num_heads * self.head_dim
        return micro_batch_size * total


def window_chunks(seq_len: int, window: int | None) -> tuple[int, int]:
    """Number and length of the chunks that attention with a sliding window works in [tokens].

    Chunks are at least as long as the window, so that each attends to itself and the one before it
    only; the first attends to itself. They cover ``seq_len`` with fewer than one token a chunk left
    over. Without a window, or with one that nothing lies outside of, there is one.
    """
    num_chunks = 1 if window is None or seq_len < window else seq_len // window
    return num_chunks, -(-seq_len // num_chunks)


def check_seq_len(spec: ModelSpec, seq_len: int, *, file: str, field: str = "") -> None:
    """Raise ConfigError unless the model takes sequences of this length [tokens]."""
    if seq_len > spec.max_positions:
        raise ConfigError.single(
            file,
            field,
            f"{seq_len} tokens are too many: model {spec.name} has {spec.max_positions} positions "
            f"(max_positions); use at most {spec.max_positions}",
        )


def check_micro_batch_size(spec: ModelSpec, size: int, *, seq_len: int, file: str) -> None:
    """Raise ConfigError if a micro-batch of so many samples has tensors beyond all counting."""
    widest = max(spec.vocab_size, spec.ffn_size, 3 * spec.num_heads * spec.head_dim)
    elements = size * seq_len * max(widest, spec.num_heads * seq_len)
    if elements > MAX_ELEMENTS:
        raise ConfigError.single(
            file,
            "",
            f"{size} samples of {seq_len} tokens make a tensor of {elements} elements in model "
            f"{spec.name}; at most {MAX_ELEMENTS} are possible",
        )
