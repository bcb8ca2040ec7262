"""Blocks of the gpt family: learned positions, LayerNorm, biases (GPT-2, OPT).

Shapes: B micro-batch size, S sequence length, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by

from eth_cli.model import ModelSpec
from eth_cli.models.layers import ACTIVATIONS, Attention, Embedding, Linear


class GptEmbedding(nn.Module):
    """Token and position embedding; OPT-350M's narrower one is projected to the hidden size."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.token = Embedding(spec.vocab_size, spec.embedding_size, dtype=dtype, device=device)
        self.position_offset = spec.position_offset
        self.position = Embedding(
            spec.max_positions + spec.position_offset, spec.hidden_size, dtype=dtype, device=device
        )
        self.project_in = (
            None
            if spec.embedding_size == spec.hidden_size
            else Linear(
                spec.embedding_size, spec.hidden_size, bias=False, dtype=dtype, device=device
            )
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 -> (B, S, H)."""
        x = self.token(tokens)
        if self.project_in is not None:
            x = self.project_in(x)
        start = self.position_offset
        return x + self.position.weight[start : start + tokens.shape[1]]  # type: ignore[no-any-return] # Module.__call__ has no type


class GptMlp(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.up = Linear(spec.hidden_size, spec.ffn_size, dtype=dtype, device=device)
        self.down = Linear(spec.ffn_size, spec.hidden_size, dtype=dtype, device=device)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return] # Module.__call__ has no type


class GptLayer(nn.Module):
    """One transformer layer, norms before the sub-layers or (OPT-350M) after the additions."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, epsilon = spec.hidden_size, spec.norm_epsilon
        self.norm1 = nn.LayerNorm(hidden, eps=epsilon, dtype=dtype, device=device)
        self.attention = Attention(spec, dtype=dtype, device=device)
        self.norm2 = nn.LayerNorm(hidden, eps=epsilon, dtype=dtype, device=device)
        self.mlp = GptMlp(spec, dtype=dtype, device=device)
        self.post_norm = spec.post_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        if self.post_norm:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return] # Module.__call__ has no type
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return] # Module.__call__ has no type


class GptHead(nn.Module):
    """Final norm (where the model has one), projection to the embedding's width, vocabulary."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.norm = (
            nn.LayerNorm(spec.hidden_size, eps=spec.norm_epsilon, dtype=dtype, device=device)
            if spec.final_norm
            else None
        )
        self.project_out = (
            None
            if spec.embedding_size == spec.hidden_size
            else Linear(
                spec.hidden_size, spec.embedding_size, bias=False, dtype=dtype, device=device
            )
        )
        self.weight = nn.Parameter(
            torch.empty(spec.vocab_size, spec.embedding_size, dtype=dtype, device=device)
        )

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the weight: (B, S, H) -> (B, S, width of the embedding)."""
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> logits (B, S, V)."""
        return F.linear(self.hidden(x), self.weight)
