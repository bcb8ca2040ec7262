"""Hugging Face configurations of the llama family, with Hugging Face's own defaults."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import Field, ValidationError

from eth_cli.faults import shown
from eth_cli.hf_fields import (
    ACTIVATIONS,
    Epsilon,
    HfConfig,
    Layers,
    activation_faults,
    activation_name,
    divides,
)
from eth_cli.model import FfnWidth, ModelSpec, Positive, RopeScaling, Width
from eth_cli.serde import FieldError, Location

_MOST = sys.float_info.max
_SCALED = ("linear", "dynamic", "llama3", "yarn")
_NAMES = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
"""Our names of the figures of scaled rotary positions, by Hugging Face's."""
_READ_BESIDE = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mscale", "mscale_all_dim"),
}


class LlamaConfig(HfConfig):
    """Llama 2 and 3."""

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

    required = {"partial_rotary_factor": 1.0}
    qk_norm: ClassVar[bool] = False

    def shape_faults(self) -> list[tuple[Location, str]]:
        faults = activation_faults("hidden_act", self.hidden_act)
        heads = self.num_attention_heads
        faults += divides(
            "num_key_value_heads", self.num_key_value_heads or heads, "num_attention_heads", heads
        )
        if self.head_dim is None:
            faults += divides("num_attention_heads", heads, "hidden_size", self.hidden_size)
        if not faults and self._head_dim % 2:
            faults.append((("head_dim",), f"{self._head_dim} must be even for rotary positions"))
        return faults + self._rope_faults()

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    # --- Rotary positions ---------------------------------------------------------------------

    @property
    def _rope(self) -> tuple[str, dict[str, Any]]:
        """The field that says how positions are scaled, and what it says."""
        if self.rope_scaling:
            return "rope_scaling", self.rope_scaling
        return "rope_parameters", self.rope_parameters or {}

    def _rope_faults(self) -> list[tuple[Location, str]]:
        faults: list[tuple[Location, str]] = []
        field, given = self._rope
        kind = given.get("rope_type", given.get("type", "default"))
        theta = given.get("rope_theta", 1.0)
        if not _is_number(theta) or theta <= 0:
            message = f"must be a finite number above 0, not {shown(theta)}"
            faults.append(((field, "rope_theta"), message))
        part = given.get("partial_rotary_factor", 1.0)
        if part != 1.0:
            message = f"{shown(part)} is a feature that is not built; only 1.0 is"
            faults.append(((field, "partial_rotary_factor"), message))
        if kind == "default":
            return faults
        if kind not in _SCALED:
            faults.append(
                (
                    (field,),
                    f"rotary positions of type {shown(kind)} are not built; "
                    f"default, {', '.join(_SCALED)} are",
                )
            )
            return faults
        for key in ("mscale", "mscale_all_dim"):
            if given.get(key) is not None and not _is_number(given[key]):
                faults.append(((field, key), f"must be a finite number, not {shown(given[key])}"))
        if faults:
            return faults
        unknown = sorted(set(given) - set(_NAMES) - _READ_BESIDE)
        faults += [((field, key), "is a feature that is not built") for key in unknown]
        try:
            self._rope_scaling()
        except ValidationError as error:
            for entry in error.errors():
                cause = entry.get("ctx", {}).get("error")
                if isinstance(cause, FieldError):
                    faults += [((field, *self._hf_names(at)), text) for at, text in cause.faults]
                else:
                    message = f"{entry['msg']}, not {shown(entry['input'])}"
                    if entry["type"] == "missing":
                        message = f"is missing; positions of type {kind} need it"
                    faults.append(((field, *self._hf_names(entry["loc"])), message))
        return faults

    @staticmethod
    def _hf_names(location: Location) -> Location:
        names = {own: name for name, own in _NAMES.items()}
        return tuple(names.get(str(part), part) for part in location)

    def _rope_scaling(self) -> RopeScaling | None:
        _, given = self._rope
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return None
        data = {own: given[name] for name, own in _NAMES.items() if given.get(name) is not None}
        if kind in ("llama3", "yarn"):
            data.setdefault("original_positions", self.max_position_embeddings)
        if kind == "yarn" and "attention_factor" not in data:
            data["attention_factor"] = _yarn_attention_factor(given)
        return RopeScaling(type=kind, **data)

    # --- The model ----------------------------------------------------------------------------

    def attention_window(self) -> int | None:
        """Tokens that the model's attention reaches back; None: all."""
        return None

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether query, key and value projections have biases, and whether the output has."""
        return self.attention_bias, self.attention_bias

    def to_spec(self, name: str) -> ModelSpec:
        qkv_bias, out_bias = self.biases
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
            activation=ACTIVATIONS[self.hidden_act],
            tied=self.tie_word_embeddings,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            rope_theta=float(self._rope[1].get("rope_theta", self.rope_theta)),
            rope_scaling=self._rope_scaling(),
            embedding_size=self.hidden_size,
        )

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
        if spec.rope_scaling is not None:
            figures = spec.rope_scaling.model_dump(exclude_none=True)
            rope["rope_type"] = spec.rope_scaling.type
            names = {"factor"}
            if spec.rope_scaling.type in ("llama3", "yarn"):
                names |= {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
            if spec.rope_scaling.type == "yarn":
                names |= {"beta_fast", "beta_slow", "attention_factor", "truncate"}
            rope |= {n: figures[_NAMES[n]] for n in sorted(names) if _NAMES[n] in figures}
        return {
            "vocab_size": spec.vocab_size,
            "max_position_embeddings": spec.max_positions,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.ffn_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "hidden_act": activation_name(spec.activation),
            "rms_norm_eps": spec.norm_epsilon,
            # Older readers know these two, newer ones rope_parameters.
            "rope_theta": spec.rope_theta,
            "rope_scaling": None if spec.rope_scaling is None else rope,
            "rope_parameters": rope,
            "attention_bias": spec.qkv_bias,
            "mlp_bias": spec.mlp_bias,
            "tie_word_embeddings": spec.tied,
        }


def _yarn_attention_factor(given: Mapping[str, float]) -> float:
    """What cosines and sines are multiplied by where the file does not say (YaRN, section 3.4)."""
    factor, scale, all_dim = (given.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    if not _is_number(factor) or factor <= 1:
        return 1.0
    growth = 0.1 * math.log(factor)
    if scale and all_dim:
        return (scale * growth + 1) / (all_dim * growth + 1)
    return growth + 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


class MistralConfig(LlamaConfig):
    """Mistral: every layer with a sliding window, unless it is null."""

    intermediate_size: FfnWidth = 14336
    num_key_value_heads: Width | None = 8
    max_position_embeddings: Positive = 4096 * 32
    sliding_window: Positive | None = 4096

    required = {"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False}

    def attention_window(self) -> int | None:
        return self.sliding_window

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields_of(spec), "sliding_window": spec.attention_window}


class Qwen2Config(LlamaConfig):
    """Qwen2 and 2.5."""

    vocab_size: Positive = 151936
    intermediate_size: FfnWidth = 22016
    num_key_value_heads: Width | None = 32
    max_position_embeddings: Positive = 32768
    use_sliding_window: bool = False
    sliding_window: Positive | None = 4096
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[str] | None = None

    required = {"partial_rotary_factor": 1.0, "mlp_bias": False, "attention_bias": False}

    @property
    def biases(self) -> tuple[bool, bool]:
        return True, False

    def shape_faults(self) -> list[tuple[Location, str]]:
        faults = super().shape_faults()
        if self.layer_types is not None:
            known = {"full_attention", "sliding_attention"}
            if len(self.layer_types) != self.num_hidden_layers:
                message = f"names {len(self.layer_types)} layers, but num_hidden_layers is "
                faults.append((("layer_types",), message + str(self.num_hidden_layers)))
            for i, layer in enumerate(self.layer_types):
                if layer not in known:
                    message = f"unknown type {shown(layer)}; known are {', '.join(sorted(known))}"
                    faults.append((("layer_types", i), message))
            if "sliding_attention" in self.layer_types and not self._window:
                message = "has sliding layers, but use_sliding_window and sliding_window set none"
                faults.append((("layer_types",), message))
        if not faults and 0 < self._num_sliding < self.num_hidden_layers:
            field = "layer_types" if self.layer_types is not None else "max_window_layers"
            message = (
                f"gives {self._num_sliding} of {self.num_hidden_layers} layers a sliding window; "
                "only models in which all layers or none have one are built"
            )
            faults.append(((field,), message))
        return faults

    @property
    def _window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    @property
    def _num_sliding(self) -> int:
        if self.layer_types is not None:
            return self.layer_types.count("sliding_attention")
        return max(0, self.num_hidden_layers - self.max_window_layers) if self._window else 0

    def attention_window(self) -> int | None:
        return self._window if self._num_sliding else None

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        fields = {k: v for k, v in super().fields_of(spec).items() if k != "attention_bias"}
        return {
            **fields,
            "use_sliding_window": spec.attention_window is not None,
            "sliding_window": spec.attention_window,
            "max_window_layers": 0 if spec.attention_window else spec.num_layers,
        }


class Qwen3Config(Qwen2Config):
    """Qwen3: norms of queries and keys."""

    head_dim: Width | None = 128

    required = {"partial_rotary_factor": 1.0, "mlp_bias": False}
    qk_norm: ClassVar[bool] = True

    @property
    def biases(self) -> tuple[bool, bool]:
        return self.attention_bias, self.attention_bias

    @classmethod
    def fields_of(cls, spec: ModelSpec) -> dict[str, Any]:
        return {**super().fields_of(spec), "attention_bias": spec.qkv_bias}
