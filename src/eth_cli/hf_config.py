"""Read Hugging Face configurations of the families that `eth_cli.models` builds.

Each model type has a record with the fields that shape the computation and Hugging Face's own
defaults; other fields (tokens, dropout, dtype, ...) do not and are passed over. A feature that the
blocks cannot reproduce is refused, never dropped.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.faults import shown
from eth_cli.model import FfnWidth, ModelSpec, Positive, Width
from eth_cli.serde import FieldError, Location, Record

Epsilon = Annotated[float, Field(gt=0)]
Layers = Annotated[int, Field(gt=0, le=99_998)]
MOST = sys.float_info.max
Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _activation_faults(field: str, name: str) -> list[tuple[Location, str]]:
    if name in _ACTIVATIONS:
        return []
    return [((field,), f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")]


class _Config(Record):
    """Base of the records: unknown fields are passed over, unlike in our own files."""

    model_config = ConfigDict(extra="ignore")

    required: ClassVar[Mapping[str, Any]] = {}
    """Fields that must have one value, because the blocks can do no other."""

    @model_validator(mode="after")
    def _check(self) -> _Config:
        faults: list[tuple[Location, str]] = [
            (
                (field,),
                f"{shown(getattr(self, field))} is a feature that is not built; "
                f"only {shown(value)} is",
            )
            for field, value in self.required.items()
            if getattr(self, field) != value
        ]
        faults += self.shape_faults()
        if faults:
            raise FieldError(faults)
        return self

    @abstractmethod
    def shape_faults(self) -> list[tuple[Location, str]]:
        """Everything wrong with how the fields go together."""

    @abstractmethod
    def to_spec(self, name: str) -> ModelSpec:
        """The model that the configuration describes."""


class _Gpt2(_Config):
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
            *_divides("n_head", self.n_head, "n_embd", self.n_embd),
            *_activation_faults("activation_function", self.activation_function),
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
            activation=_ACTIVATIONS[self.activation_function],
            tied=self.tie_word_embeddings,
            embedding_size=self.n_embd,
        )


class _Opt(_Config):
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
            *_divides(
                "num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size
            ),
            *_activation_faults("activation_function", self.activation_function),
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
            activation=_ACTIVATIONS[self.activation_function],
            tied=self.tie_word_embeddings,
            # The table has two rows for positions that no token of a full sequence has.
            position_offset=2,
            embedding_size=self.word_embed_proj_dim or self.hidden_size,
            post_norm=not self.do_layer_norm_before,
            final_norm=self.do_layer_norm_before and not self.remove_final_layer_norm,
        )


class _Llama(_Config):
    vocab_size: Positive = 32000
    max_position_embeddings: Positive = 2048
    hidden_size: Width = 4096
    intermediate_size: FfnWidth = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Width = 32
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    """Newer files: rope_theta and rope_scaling in one."""
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    required = {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    qkv_bias: ClassVar[bool] = False

    def shape_faults(self) -> list[tuple[Location, str]]:
        faults = _activation_faults("hidden_act", self.hidden_act)
        heads = self.num_attention_heads
        faults += _divides(
            "num_key_value_heads", self.num_key_value_heads or heads, "num_attention_heads", heads
        )
        if self.head_dim is None:
            faults += _divides("num_attention_heads", heads, "hidden_size", self.hidden_size)
        if not faults and self._head_dim % 2:
            faults.append((("head_dim",), f"{self._head_dim} must be even for rotary positions"))
        for field in ("rope_scaling", "rope_parameters"):
            scaling = getattr(self, field) or {}
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind != "default":
                faults.append(
                    (
                        (field,),
                        f"rotary positions of type {shown(kind)} are not built; only unscaled ones "
                        f'are ("default"), so {field} must be null',
                    )
                )
        theta = (self.rope_parameters or {}).get("rope_theta", 1.0)
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta <= MOST:
            faults.append(
                (
                    ("rope_parameters", "rope_theta"),
                    f"must be a finite number above 0, not {shown(theta)}",
                )
            )
        return faults

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def attention_window(self) -> int | None:
        """Tokens that the model's attention reaches back; None: all."""
        return None

    def to_spec(self, name: str) -> ModelSpec:
        return ModelSpec(
            name=name,
            family="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self._head_dim,
            ffn_size=self.intermediate_size,
            max_positions=self.max_position_embeddings,
            attention_window=self.attention_window(),
            norm_epsilon=self.rms_norm_eps,
            activation=_ACTIVATIONS[self.hidden_act],
            tied=self.tie_word_embeddings,
            qkv_bias=self.qkv_bias,
            rope_theta=float((self.rope_parameters or {}).get("rope_theta", self.rope_theta)),
            embedding_size=self.hidden_size,
        )


class _Mistral(_Llama):
    intermediate_size: FfnWidth = 14336
    num_key_value_heads: Width | None = 8
    max_position_embeddings: Positive = 4096 * 32
    sliding_window: Positive | None = 4096

    def attention_window(self) -> int | None:
        return self.sliding_window


class _Qwen2(_Llama):
    vocab_size: Positive = 151936
    intermediate_size: FfnWidth = 22016
    num_key_value_heads: Width | None = 32
    max_position_embeddings: Positive = 32768
    use_sliding_window: bool = False
    sliding_window: Positive | None = 4096
    qkv_bias: ClassVar[bool] = True

    def attention_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None


MODEL_TYPES: Mapping[str, type[_Config]] = {
    "gpt2": _Gpt2,
    "opt": _Opt,
    "llama": _Llama,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
}
"""Known values of ``model_type``."""

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
"""Known entries of ``architectures``, with the model_type that each belongs to."""


def parse_config(data: Mapping[str, Any], *, file: str, name: str) -> ModelSpec:
    """The model of a configuration.

    Args:
        data: what the file holds.
        file: its path, for messages.
        name: what to call the model where the file does not say.

    Raises:
        ConfigError: unknown model type or architecture, a faulty field, or a feature not built.
    """
    model_type = data.get("model_type")
    known = ", ".join(MODEL_TYPES)
    if model_type is None:
        raise ConfigError.single(
            file,
            "model_type",
            f"is missing; known types are {known}. A file of this project's own fields has family",
        )
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ConfigError.single(
            file, "model_type", f"unknown type {shown(model_type)}; known types are {known}"
        )
    _check_architectures(data.get("architectures"), model_type, file)
    config = serde.validate(MODEL_TYPES[model_type], dict(data), file)
    given = data.get("_name_or_path")
    try:
        return config.to_spec(given if isinstance(given, str) and given else name)
    except ValidationError as error:  # Fields that are each possible make an impossible model.
        raise serde.config_error(error, ModelSpec, file) from None


def _check_architectures(value: Any, model_type: str, file: str) -> None:
    """Refuse a head other than the language model's, such as a classifier."""
    names = value if isinstance(value, list) else [] if value is None else [value]
    known = [name for name, owner in ARCHITECTURES.items() if owner == model_type]
    for i, name in enumerate(names):
        if name not in known:
            raise ConfigError.single(
                file,
                f"architectures[{i}]",
                f"unknown architecture {shown(name)}; known of type {model_type}: "
                f"{', '.join(known)}",
            )


def _divides(field: str, part: int, whole_field: str, whole: int) -> list[tuple[Location, str]]:
    if whole % part == 0:
        return []
    return [((field,), f"{part} does not divide {whole_field} {whole}")]
