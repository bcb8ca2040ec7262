"""Where a `ModelSpec` comes from: a preset, a Hugging Face configuration, or a YAML of its fields.

Presets have the shapes of the published models; tests hold their parameter counts to the published
ones. What Hugging Face configurations say is read in `eth_cli.hf_config`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eth_cli import hf_config, serde
from eth_cli.errors import ConfigError
from eth_cli.faults import did_you_mean
from eth_cli.model import ModelSpec, RopeScaling

OPTION = "--model"
"""The command-line option that faults of a model's name are reported under."""


def _gpt2(
    name: str, *, hidden_size: int, num_layers: int, num_heads: int, **other: Any
) -> ModelSpec:
    shape: dict[str, Any] = {
        "vocab_size": 50257,
        "max_positions": 1024,
        "activation": "gelu_tanh",
        "ffn_size": 4 * hidden_size,
        "embedding_size": hidden_size,
    }
    return ModelSpec(
        name=name,
        family="gpt",
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        tied=True,
        **shape | other,
    )


def _opt(
    name: str, *, hidden_size: int, num_layers: int, num_heads: int, **other: Any
) -> ModelSpec:
    opt = {"vocab_size": 50272, "max_positions": 2048, "activation": "relu", "position_offset": 2}
    return _gpt2(
        name,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        **opt | other,
    )


def _llama(name: str, *, hidden_size: int, num_heads: int, **other: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "num_kv_heads": num_heads,
        "activation": "silu",
        "tied": False,
        "norm_epsilon": 1e-5,
    }
    return ModelSpec(
        name=name,
        family="llama",
        hidden_size=hidden_size,
        num_heads=num_heads,
        embedding_size=hidden_size,
        **{"head_dim": hidden_size // num_heads} | shape | other,
    )


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "max_positions": 4096}
_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_positions": 8192,
    "rope_theta": 500000.0,
    "num_kv_heads": 8,
}

_LLAMA3_1: dict[str, Any] = {
    **_LLAMA3,
    "max_positions": 131072,
    "rope_scaling": RopeScaling(
        type="llama3",
        factor=8.0,
        original_positions=8192,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
    ),
}
_QWEN: dict[str, Any] = {"rope_theta": 1e6, "norm_epsilon": 1e-6}
_QWEN3: dict[str, Any] = {
    **_QWEN,
    "vocab_size": 151936,
    "max_positions": 40960,
    "head_dim": 128,
    "num_kv_heads": 8,
    "qk_norm": True,
}

_ALL = (
    # Two tiny ones for tests and for emulated clusters; their vocabulary is that of bytes.
    _gpt2(
        "gpt-tiny",
        hidden_size=64,
        num_layers=8,
        num_heads=4,
        vocab_size=256,
        max_positions=256,
    ),
    _llama(
        "llama-tiny",
        hidden_size=64,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=176,
        vocab_size=256,
        max_positions=256,
    ),
    _gpt2("gpt2", hidden_size=768, num_layers=12, num_heads=12),
    _gpt2("gpt2-medium", hidden_size=1024, num_layers=24, num_heads=16),
    _gpt2("gpt2-large", hidden_size=1280, num_layers=36, num_heads=20),
    _gpt2("gpt2-xl", hidden_size=1600, num_layers=48, num_heads=25),
    # The one OPT with a narrow embedding, norms after the additions, and no final norm.
    _opt(
        "opt-350m",
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        embedding_size=512,
        post_norm=True,
        final_norm=False,
    ),
    _opt("opt-1.3b", hidden_size=2048, num_layers=24, num_heads=32),
    _llama("llama2-7b", hidden_size=4096, num_layers=32, num_heads=32, ffn_size=11008, **_LLAMA2),
    _llama("llama2-13b", hidden_size=5120, num_layers=40, num_heads=40, ffn_size=13824, **_LLAMA2),
    _llama(
        "llama2-70b",
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        ffn_size=28672,
        **_LLAMA2,
    ),
    _llama("llama3-8b", hidden_size=4096, num_layers=32, num_heads=32, ffn_size=14336, **_LLAMA3),
    _llama("llama3-70b", hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28672, **_LLAMA3),
    # Version 0.2: the same shape as 0.1, but without the sliding window.
    _llama(
        "mistral-7b",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        vocab_size=32000,
        max_positions=32768,
        rope_theta=1e6,
    ),
    _llama(
        "qwen2.5-7b",
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        ffn_size=18944,
        vocab_size=152064,
        max_positions=131072,
        qkv_bias=True,
        **_QWEN,
    ),
    _llama(
        "llama3.1-8b", hidden_size=4096, num_layers=32, num_heads=32, ffn_size=14336, **_LLAMA3_1
    ),
    _llama(
        "llama3.2-1b",
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        ffn_size=8192,
        tied=True,
        **_LLAMA3_1
        | {"rope_scaling": _LLAMA3_1["rope_scaling"].model_copy(update={"factor": 32.0})},
    ),
    _llama(
        "mistral-7b-v0.1",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_size=14336,
        vocab_size=32000,
        max_positions=32768,
        attention_window=4096,
    ),
    _llama(
        "qwen2.5-0.5b",
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        ffn_size=4864,
        vocab_size=151936,
        max_positions=32768,
        qkv_bias=True,
        tied=True,
        **_QWEN,
    ),
    _llama(
        "qwen3-0.6b",
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        ffn_size=3072,
        tied=True,
        **_QWEN3,
    ),
    _llama("qwen3-8b", hidden_size=4096, num_layers=36, num_heads=32, ffn_size=12288, **_QWEN3),
)

PRESETS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in _ALL})
"""Models known by name."""


def load_model(source: str) -> ModelSpec:
    """The model that a preset's name or a path stands for.

    A path is a Hugging Face ``config.json``, a folder that holds one, or a YAML (or JSON) file of
    `ModelSpec`'s fields; which of the two a file is follows from what it holds.

    Raises:
        ConfigError: no such preset or file, an architecture that is not built, or a faulty field.
    """
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists():
        raise ConfigError.single(
            OPTION,
            "",
            f"{source!r} is neither a preset nor a file{did_you_mean(source, PRESETS)}; "
            f"presets are {', '.join(PRESETS)}; files are a Hugging Face "
            "config.json (or its folder) or a YAML of this project's model fields",
        )
    text = serde.read_text(path)
    parse = serde.parse_json if path.suffix == ".json" else serde.parse_yaml
    data = parse(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError.single(str(path), "", "must hold a mapping of a model's fields")
    # A folder names its model better than the file name that all of them have.
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    if "family" in data:
        return serde.validate(ModelSpec, _with_usual_values(data, name=name), str(path))
    return hf_config.parse_config(data, file=str(path), name=name or "model")


def _with_usual_values(data: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """A ModelSpec's fields, with those left out that follow from the others in most models."""
    filled = dict(data)
    filled.setdefault("name", name)
    for field, usual in (("num_kv_heads", "num_heads"), ("embedding_size", "hidden_size")):
        if usual in data:
            filled.setdefault(field, data[usual])
    hidden, heads = data.get("hidden_size"), data.get("num_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0:
        filled.setdefault("head_dim", hidden // heads)
    return filled
