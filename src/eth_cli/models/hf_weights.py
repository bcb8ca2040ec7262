"""Names of weights in Hugging Face files, and how they make up the blocks' parameters.

One table serves both directions. A parameter of ours is made of `Piece`s: tensors of the file that
stand one below the other in it (query, key and value in ``qkv``), each as it is or transposed
(GPT-2 keeps its matrices as (in, out)).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from eth_cli.model import EMBEDDING, HEAD, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor of a file, and the rows of a parameter that it fills."""

    name: str
    """In the file, with the prefix of the whole model."""
    shape: tuple[int, ...]
    """In the file."""
    rows: slice
    """Of the parameter."""
    transposed: bool = False


_BASE = {"gpt2": "transformer.", "opt": "model."}
_ENDS = {
    "gpt2": {
        "token": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
    },
    "opt": {
        "token": "model.decoder.embed_tokens",
        "position": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "norm": "model.decoder.final_layer_norm",
    },
    "llama": {"token": "model.embed_tokens", "norm": "model.norm"},
}
_LAYERS = {
    "gpt2": "transformer.h.{}.",
    "opt": "model.decoder.layers.{}.",
    "llama": "model.layers.{}.",
}
_INSIDE = {
    "gpt2": {
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
    "opt": {
        "norm1": "self_attn_layer_norm",
        "attention.qkv": "self_attn.{}_proj",
        "attention.out": "self_attn.out_proj",
        "norm2": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
    "llama": {
        "norm1": "input_layernorm",
        "attention.qkv": "self_attn.{}_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "norm2": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
}
"""Modules of files by our modules; ``{}`` is the layer's number, or q, k and v."""

HEAD_WEIGHT = "lm_head.weight"
_NO_WEIGHT = re.compile(r"(^|\.)(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
"""Tables in some files that follow from the configuration."""


def base_prefix(model_type: str) -> str:
    """What all names begin with but the head's; files of the bare model leave it out."""
    return _BASE.get(model_type, "model.")


def is_weight(name: str) -> bool:
    """Whether a tensor of a file is a weight, not a table that follows from the configuration."""
    return _NO_WEIGHT.search(name) is None


def block_pieces(spec: ModelSpec, index: int, *, model_type: str) -> dict[str, tuple[Piece, ...]]:
    """What each parameter of a block is made of, by its name in the block's module.

    A tied head is made of the embedding's tensor. Raises IndexError outside the model.
    """
    return {
        name: tuple(_pieces(spec, index, name, shape, model_type=model_type))
        for name, shape in spec.parameter_shapes(index).items()
    }


def _pieces(
    spec: ModelSpec, index: int, name: str, shape: tuple[int, ...], *, model_type: str
) -> Iterator[Piece]:
    style = model_type if model_type in _INSIDE else "llama"
    module, _, kind = name.rpartition(".")
    rows = slice(0, shape[0])
    if spec.block_kind(index) in (EMBEDDING, HEAD):
        own = HEAD_WEIGHT if not module else f"{_ENDS[style][module]}.{kind}"
        if not module and spec.tied:
            own = f"{_ENDS[style]['token']}.{kind}"
        yield Piece(name=own, shape=shape, rows=rows)
        return
    there = f"{_LAYERS[style].format(index - 1)}{_INSIDE[style][module]}.{kind}"
    if style == "gpt2":
        is_matrix = len(shape) == 2
        yield Piece(
            name=there, shape=shape[::-1] if is_matrix else shape, rows=rows, transposed=is_matrix
        )
    elif module == "attention.qkv":
        start = 0
        for letter, heads in zip(
            "qkv", (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True
        ):
            stop = start + heads * spec.head_dim
            yield Piece(
                name=there.replace("{}", letter),
                shape=(stop - start, *shape[1:]),
                rows=slice(start, stop),
            )
            start = stop
    else:
        yield Piece(name=there, shape=shape, rows=rows)


@torch.no_grad()
def fill_block(
    block: nn.Module,
    spec: ModelSpec,
    index: int,
    *,
    model_type: str,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Fill a block from a file, converted to its own dtype; ``read`` gives a tensor by its name."""
    for name, pieces in block_pieces(spec, index, model_type=model_type).items():
        parameter = block.get_parameter(name)
        for piece in pieces:
            tensor = read(piece.name)
            parameter[piece.rows].copy_(tensor.T if piece.transposed else tensor)


def tensors_of(
    parameter: torch.Tensor, pieces: tuple[Piece, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors that a parameter is made of, by their names."""
    for piece in pieces:
        part = parameter[piece.rows]
        yield piece.name, (part.T if piece.transposed else part).contiguous()
