"""Blocks of the llama family: RoPE, RMSNorm, gated feed-forward (Llama, Mistral, Qwen2, Qwen3).

Shapes: B micro-batch size, S sequence length, H hidden size, V vocabulary size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 # the name that everyone knows it by

from eth_cli.model import ModelSpec
from eth_cli.models.layers import ACTIVATIONS, Attention, Embedding, Linear


class LlamaEmbedding(nn.Module):
    """Token embedding; positions enter in the attention of each layer."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.token = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) int64 -> (B, S, H)."""
        return self.token(tokens)  # type: ignore[no-any-return] # Module.__call__ has no type


class GatedMlp(nn.Module):
    """SwiGLU: down(activation(gate(x)) * up(x)) (Shazeer 2020, "GLU Variants")."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, ffn, bias = spec.hidden_size, spec.ffn_size, spec.mlp_bias
        self.gate = Linear(hidden, ffn, bias=bias, dtype=dtype, device=device)
        self.up = Linear(hidden, ffn, bias=bias, dtype=dtype, device=device)
        self.down = Linear(ffn, hidden, bias=bias, dtype=dtype, device=device)
        self.activation = ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return] # Module.__call__ has no type


class LlamaLayer(nn.Module):
    """One transformer layer with norms before the sub-layers."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, epsilon = spec.hidden_size, spec.norm_epsilon
        self.norm1 = nn.RMSNorm(hidden, eps=epsilon, dtype=dtype, device=device)
        self.attention = Attention(spec, dtype=dtype, device=device)
        self.norm2 = nn.RMSNorm(hidden, eps=epsilon, dtype=dtype, device=device)
        self.mlp = GatedMlp(spec, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return] # Module.__call__ has no type


class LlamaHead(nn.Module):
    """Final norm and vocabulary projection."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.norm_epsilon, dtype=dtype, device=device)
        self.weight = nn.Parameter(
            torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        )

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """What is multiplied with the weight: (B, S, H) -> (B, S, H)."""
        return self.norm(x)  # type: ignore[no-any-return] # Module.__call__ has no type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> logits (B, S, V)."""
        return F.linear(self.hidden(x), self.weight)
