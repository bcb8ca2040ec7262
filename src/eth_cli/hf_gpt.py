"""Hugging Face configurations of the gpt family: GPT-2 and OPT, with Hugging Face's defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from eth_cli.hf_fields import (
    ACTIVATIONS,
    Epsilon,
    HfConfig,
    Layers,
    activation_faults,
    activation_name,
    divides,
)
from eth_cli.model import FfnWidth, ModelSpec, Positive, Width
from eth_cli.serde import Location


class Gpt2Config(HfConfig):
    vocab_size: Positive = 50257
    n_positions: Positive = 1024
    n_embd: Width = 768
    n_layer: Layers = 12
    n_head: Width = 12
    n_inner: FfnWidth | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Epsilon = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False

    required = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }

    def shape_faults(self) -> list[tuple[Location, str]]:
        return [
            *divides("n_head", self.n_head, "n_embd", self.n_embd),
            *activation_faults("activation_function", self.activation_function),
        ]

    def to_spec(self, name: str) -> ModelSpec:
        return ModelSpec(
            name=name,
            family="gpt",
            vocab_size=self.vocab_size,
            hidden_size=self.n_embd,
            num_layers=self.n_layer,
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            ffn_size=self.n_inner or 4 * self.n_embd,
            max_positions=self.n_positions,
            norm_epsilon=self.layer_norm_epsilon,
            activation=ACTIVATIONS[self.activation_function],
            tied=self.tie_word_embeddings,
            embedding_size=self.n_embd,
        )

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        return {
            "vocab_size": spec.vocab_size,
            "n_positions": spec.max_positions,
            "n_embd": spec.hidden_size,
            "n_layer": spec.num_layers,
            "n_head": spec.num_heads,
            "n_inner": spec.ffn_size,
            "activation_function": activation_name(spec.activation),
            "layer_norm_epsilon": spec.norm_epsilon,
            "tie_word_embeddings": spec.tied,
        }


class OptConfig(HfConfig):
    vocab_size: Positive = 50272
    max_position_embeddings: Positive = 2048
    hidden_size: Width = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Width = 12
    ffn_dim: FfnWidth = 3072
    word_embed_proj_dim: Width | None = None
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    remove_final_layer_norm: Annotated[bool, Field(alias="_remove_final_layer_norm")] = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    required = {"enable_bias": True, "layer_norm_elementwise_affine": True}

    def shape_faults(self) -> list[tuple[Location, str]]:
        return [
            *divides(
                "num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size
            ),
            *activation_faults("activation_function", self.activation_function),
        ]

    def to_spec(self, name: str) -> ModelSpec:
        return ModelSpec(
            name=name,
            family="gpt",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_attention_heads,
            head_dim=self.hidden_size // self.num_attention_heads,
            ffn_size=self.ffn_dim,
            max_positions=self.max_position_embeddings,
            activation=ACTIVATIONS[self.activation_function],
            tied=self.tie_word_embeddings,
            # The table has two rows for positions that no token of a full sequence has.
            position_offset=2,
            embedding_size=self.word_embed_proj_dim or self.hidden_size,
            post_norm=not self.do_layer_norm_before,
            final_norm=self.do_layer_norm_before and not self.remove_final_layer_norm,
        )

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        return {
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_positions,
            "hidden_size": spec.hidden_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "ffn_dim": spec.ffn_size,
            "word_embed_proj_dim": spec.embedding_size,
            "activation_function": activation_name(spec.activation),
            "do_layer_norm_before": not spec.post_norm,
            "_remove_final_layer_norm": not spec.post_norm and not spec.final_norm,
            "tie_word_embeddings": spec.tied,
        }
