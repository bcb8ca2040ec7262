"""A model's blocks as torch modules, built one at a time; profiled and trained from here alike.

Blocks come without weights: `initialise_block` or a checkpoint fills them. The head returns logits;
the loss is the caller's.
"""

from __future__ import annotations

import torch
from torch import nn

from eth_cli.model import EMBEDDING, HEAD, ModelSpec
from eth_cli.models.gpt import GptEmbedding, GptHead, GptLayer
from eth_cli.models.init import initial_value
from eth_cli.models.llama import LlamaEmbedding, LlamaHead, LlamaLayer

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""torch's name of each dtype that a plan may train in."""

TIED_WEIGHT = "blocks.0.token.weight"
"""Canonical name of the weight that embedding and head share in a tied model."""


def build_block(
    spec: ModelSpec, index: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> nn.Module:
    """One block of the model, its weights not yet filled.

    Embedding: (B, S) int64 -> (B, S, H). Transformer: (B, S, H) -> (B, S, H).
    Head: (B, S, H) -> logits (B, S, V); its ``weight`` is its own even in a tied model, see `tie`.
    Raises IndexError outside the model.
    """
    kind = spec.block_kind(index)
    gpt = spec.family == "gpt"
    block: type[nn.Module]
    if kind == EMBEDDING:
        block = GptEmbedding if gpt else LlamaEmbedding
    elif kind == HEAD:
        block = GptHead if gpt else LlamaHead
    else:
        block = GptLayer if gpt else LlamaLayer
    return block(spec, dtype=dtype, device=device)


def canonical_name(spec: ModelSpec, index: int, local_name: str) -> str:
    """Name of a parameter in the whole model, such as ``blocks.3.attention.qkv.weight``.

    ``local_name`` is its name in the block's module. The tied head's weight has the name of the
    embedding's, because they are one parameter.
    """
    if spec.tied and local_name == "weight" and spec.block_kind(index) == HEAD:
        return TIED_WEIGHT
    return f"blocks.{index}.{local_name}"


@torch.no_grad()
def initialise_block(module: nn.Module, spec: ModelSpec, index: int, *, seed: int) -> None:
    """Fill a block's weights; each depends on (seed, canonical name) only."""
    for local_name, parameter in module.named_parameters():
        name = canonical_name(spec, index, local_name)
        parameter.copy_(initial_value(spec, seed=seed, name=name, shape=parameter.shape))


def tie(embedding: nn.Module, head: nn.Module) -> None:
    """Let the head of a tied model use the embedding's own weight, where one stage holds both."""
    token = embedding.get_submodule("token").get_parameter("weight")
    own = head.get_parameter("weight")
    if token.shape != own.shape:
        raise ValueError(
            f"the embedding's weight has shape {tuple(token.shape)}, the head's {tuple(own.shape)}"
        )
    head.register_parameter("weight", token)
