"""Read and write Hugging Face configurations of the families that `eth_cli.models` builds.

Each model type has a record (in `hf_gpt`, `hf_llama`) with the fields that shape the computation
and Hugging Face's own defaults; other fields (tokens, dropout, dtype, ...) do not and are passed
over. A feature that the blocks cannot reproduce is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.faults import shown
from eth_cli.hf_fields import HfConfig
from eth_cli.hf_gpt import Gpt2Config, OptConfig
from eth_cli.hf_llama import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from eth_cli.model import ModelSpec

MODEL_TYPES: Mapping[str, type[HfConfig]] = {
    "gpt2": Gpt2Config,
    "opt": OptConfig,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
"""Known values of ``model_type``."""

ARCHITECTURES = {
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
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


def write_config(spec: ModelSpec, *, prefer: str | None = None) -> dict[str, Any]:
    """The configuration that describes a model, with ``model_type`` and ``architectures``.

    Of several types that can, ``prefer`` is taken, else the plainest. Raises ConfigError where none
    can.
    """
    order = sorted(MODEL_TYPES, key=lambda name: name != prefer)
    for model_type in order:
        fields = MODEL_TYPES[model_type].fields_of(spec)
        data = {"model_type": model_type, **fields}
        try:
            read = parse_config(data, file=model_type, name=spec.name)
        except ConfigError:
            continue
        if read == spec:
            architecture = next(a for a, owner in ARCHITECTURES.items() if owner == model_type)
            return {"architectures": [architecture], **data}
    raise ConfigError.single(
        f"model {spec.name}",
        "",
        "is not what any known Hugging Face type can describe: " + ", ".join(MODEL_TYPES),
    )


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
