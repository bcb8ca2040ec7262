"""Presets, Hugging Face configurations, YAML: each gives the right model or one clear line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eth_cli import serde
from eth_cli.errors import ConfigError, Fault
from eth_cli.hf_config import MODEL_TYPES
from eth_cli.model import MAX_ELEMENTS, ModelSpec
from eth_cli.model_sources import PRESETS, load_model

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters of the published weights, a tied weight counted once."""

HF_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
HF_OPT_350M: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "activation_function": "relu",
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}
HF_LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
HF_MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
HF_QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def write(folder: Path, config: Any, *, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "num_parameters"), PUBLISHED.items())
def test_presets_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    assert load_model(name).num_parameters == num_parameters


def test_every_preset_is_published_or_tiny() -> None:
    assert set(PRESETS) - set(PUBLISHED) == {"gpt-tiny", "llama-tiny"}
    for name, spec in PRESETS.items():
        assert spec.name == name
    # The byte-level data that ships with the project needs no more.
    assert {PRESETS[name].vocab_size for name in ("gpt-tiny", "llama-tiny")} == {256}


@pytest.mark.parametrize(
    ("preset", "config"),
    [
        ("gpt2", HF_GPT2),
        ("opt-350m", HF_OPT_350M),
        ("llama3-8b", HF_LLAMA3_8B),
        ("mistral-7b", HF_MISTRAL),
        ("qwen2.5-7b", HF_QWEN),
    ],
)
def test_configurations_give_the_same_model_as_the_preset(
    preset: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    path = write(folder, config)
    expected = PRESETS[preset].model_copy(update={"name": "downloaded"})
    assert load_model(str(path)) == expected
    assert load_model(str(folder)) == expected


def test_defaults_of_left_out_fields_are_those_of_hugging_face(tmp_path: Path) -> None:
    spec = load_model(str(write(tmp_path, {"model_type": "gpt2"})))
    assert spec.num_parameters == PUBLISHED["gpt2"]
    llama = load_model(str(write(tmp_path, {"model_type": "llama"})))
    assert (llama.num_kv_heads, llama.norm_epsilon, llama.max_positions) == (32, 1e-6, 2048)
    # Mistral 0.1: a window where the file says nothing of it.
    assert load_model(str(write(tmp_path, {"model_type": "mistral"}))).attention_window == 4096


def test_the_file_may_name_the_model_and_newer_rope_fields_are_read(tmp_path: Path) -> None:
    config = {
        **HF_LLAMA3_8B,
        "_name_or_path": "org/model",
        "rope_parameters": {"rope_theta": 7000.0, "rope_type": "default"},
    }
    spec = load_model(str(write(tmp_path, config)))
    assert (spec.name, spec.rope_theta) == ("org/model", 7000.0)


def test_a_sliding_window_is_read_only_where_it_is_used(tmp_path: Path) -> None:
    def window(config: dict[str, Any]) -> int | None:
        return load_model(str(write(tmp_path, config))).attention_window

    assert window({**HF_MISTRAL, "sliding_window": 4096}) == 4096
    used = {**HF_QWEN, "use_sliding_window": True, "sliding_window": 1000}
    assert window({**used, "max_window_layers": 0}) == 1000
    assert window({**used, "max_window_layers": 28}) is None  # the first 28 of 28 have none
    assert window(HF_QWEN) is None


@pytest.mark.parametrize(
    ("base", "changes", "field", "says"),
    [
        (HF_GPT2, {"n_embd": 770}, "n_head", "12 does not divide n_embd 770"),
        (HF_GPT2, {"n_layer": 0}, "n_layer", "greater than 0"),
        (HF_GPT2, {"n_layer": -3}, "n_layer", "greater than 0"),
        (HF_GPT2, {"n_layer": "12"}, "n_layer", "whole number"),
        (HF_GPT2, {"n_layer": 12.5}, "n_layer", "whole number"),
        (HF_GPT2, {"n_layer": None}, "n_layer", "whole number"),
        (HF_GPT2, {"n_layer": 10**7}, "n_layer", "less than or equal"),
        (HF_GPT2, {"vocab_size": 10**12}, "vocab_size", "less than or equal"),
        (HF_GPT2, {"activation_function": "mish"}, "activation_function", "known are gelu"),
        (HF_GPT2, {"scale_attn_weights": False}, "scale_attn_weights", "not built"),
        (HF_GPT2, {"add_cross_attention": True}, "add_cross_attention", "not built"),
        (HF_GPT2, {"layer_norm_epsilon": 0}, "layer_norm_epsilon", "greater than 0"),
        (HF_GPT2, {"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        (HF_OPT_350M, {"enable_bias": False}, "enable_bias", "not built"),
        (HF_OPT_350M, {"num_attention_heads": 7}, "num_attention_heads", "does not divide"),
        (HF_LLAMA3_8B, {"num_key_value_heads": 5}, "num_key_value_heads", "does not divide"),
        (HF_LLAMA3_8B, {"head_dim": 33}, "head_dim", "must be even"),
        (HF_LLAMA3_8B, {"rope_theta": -1.0}, "rope_theta", "greater than 0"),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"rope_theta": "big"}},
            "rope_parameters.rope_theta",
            "above 0",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"rope_theta": 10**400}},
            "rope_parameters.rope_theta",
            "finite",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"rope_theta": float("inf")}},
            "rope_parameters.rope_theta",
            "finite",
        ),
        (HF_LLAMA3_8B, {"rope_theta": 10**400}, "rope_theta", "number"),
        (HF_LLAMA3_8B, {"head_dim": 2**20}, "head_dim", "33554432 wide; at most 16777216"),
        (HF_LLAMA3_8B, {"intermediate_size": 10**9}, "intermediate_size", "1000000000"),
        (HF_GPT2, {"n_embd": 10**9, "n_head": 1}, "n_embd", "1048576, not 1000000000"),
        (HF_GPT2, {"n_inner": 10**9}, "n_inner", "16777216, not 1000000000"),
        (HF_GPT2, {"n_layer": 10**9}, "n_layer", "99998, not 1000000000"),
        (HF_OPT_350M, {"word_embed_proj_dim": 10**9}, "word_embed_proj_dim", "1048576"),
        (HF_MISTRAL, {"hidden_size": 10**9}, "hidden_size", "1048576"),
        (HF_QWEN, {"vocab_size": 10**12}, "vocab_size", "1000000000, not 1000000000000"),
        (HF_LLAMA3_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not built"),
        (HF_LLAMA3_8B, {"hidden_act": "quick_gelu"}, "hidden_act", "unknown activation"),
        (HF_QWEN, {"hidden_size": True}, "hidden_size", "whole number"),
        (HF_MISTRAL, {"attention_bias": True}, "attention_bias", "not built"),
        (HF_QWEN, {"mlp_bias": True}, "mlp_bias", "not built"),
        (HF_LLAMA3_8B, {"quantization_config": {"bits": 4}}, "quantization_config", "not built"),
        (
            HF_LLAMA3_8B,
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_scaling",
            "default, linear, dynamic, llama3, yarn are",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor",
            "is missing",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor",
            "greater than or equal to 1, not 0.5",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor",
            "is missing",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "spread": 3}},
            "rope_parameters.spread",
            "not built",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": "1"}},
            "rope_parameters.mscale",
            "finite number",
        ),
        (
            HF_LLAMA3_8B,
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
            "not built",
        ),
        (
            HF_QWEN,
            {"use_sliding_window": True, "max_window_layers": 3},
            "max_window_layers",
            "25 of 28 layers",
        ),
        (
            HF_QWEN,
            {"layer_types": ["full_attention"] * 27},
            "layer_types",
            "names 27 layers, but num_hidden_layers is 28",
        ),
        (
            HF_QWEN,
            {"layer_types": ["full_attention"] * 27 + ["mamba"]},
            "layer_types[27]",
            'unknown type "mamba"',
        ),
        (HF_QWEN, {"model_type": "gpt9"}, "model_type", "known types are gpt2, opt, llama"),
        (HF_QWEN, {"model_type": 3}, "model_type", "unknown type 3"),
        (HF_QWEN, {"architectures": ["Qwen2ForTokenClassification"]}, "architectures[0]", "known"),
        (HF_GPT2, {"architectures": ["LlamaForCausalLM"]}, "architectures[0]", "GPT2LMHeadModel"),
    ],
)
def test_what_is_malformed_or_not_built_names_file_and_field(
    base: dict[str, Any], changes: dict[str, Any], field: str, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {**base, **changes})
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    (fault,) = caught.value.faults
    assert (fault.file, fault.field) == (str(path), field)
    assert says in fault.message
    assert "\n" not in str(fault)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_largest_fields_are_a_model_or_a_fault(model_type: str, tmp_path: Path) -> None:
    # Each field at its limit, alone and all at once: never an error of another kind.
    schema = MODEL_TYPES[model_type].model_json_schema()["properties"]
    limits = {
        key: limit
        for key, entry in schema.items()
        for option in (entry, *entry.get("anyOf", ()))
        if (limit := option.get("maximum")) is not None
    }
    assert len(limits) >= 6
    for changes in (limits, *({key: limit} for key, limit in limits.items())):
        path = write(tmp_path, {"model_type": model_type, **changes})
        spec: ModelSpec | None = None
        faults: tuple[Fault, ...] = ()
        try:
            spec = load_model(str(path))
        except ConfigError as error:
            faults = error.faults
        assert all(fault.file == str(path) and fault.field for fault in faults)
        if spec is not None:
            shapes = [spec.parameter_shapes(i) for i in (0, 1, spec.num_blocks - 1)]
            sizes = [math.prod(shape) for block in shapes for shape in block.values()]
            assert max(sizes) <= MAX_ELEMENTS
        else:
            assert faults


def test_an_impossible_model_of_possible_fields_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_spec = MODEL_TYPES["gpt2"].to_spec
    monkeypatch.setattr(MODEL_TYPES["gpt2"], "to_spec", lambda self, name: to_spec(self, ""))
    path = write(tmp_path, HF_GPT2)
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert str(caught.value) == f"{path}: name: must not be empty"


def test_all_faults_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, {**HF_GPT2, "n_layer": 0, "vocab_size": "many"})
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert {fault.field for fault in caught.value.faults} == {"n_layer", "vocab_size"}


def test_an_unknown_name_lists_the_presets() -> None:
    with pytest.raises(ConfigError) as caught:
        load_model("gpt-17")
    (fault,) = caught.value.faults
    assert fault.file == "--model"
    for name in PRESETS:
        assert name in fault.message


def test_a_file_without_model_type_lists_the_known_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type: is missing") as caught:
        load_model(str(write(tmp_path, {"hidden_size": 3})))
    for name in MODEL_TYPES:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "is empty"),
        (b"[1, 2]", "must hold a mapping"),
        (b'{"model_type": "gpt2", "n_layer": NaN}', "n_layer"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"model_type": "gpt2", "model_type": "opt"}', "twice"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        load_model(str(path))


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json: no such file"):
        load_model(str(tmp_path))


def test_yaml_of_the_projects_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "family: llama\nvocab_size: 300\nhidden_size: 48\nnum_layers: 5\nnum_heads: 6\n"
        "ffn_size: 100\nmax_positions: 64\nactivation: silu\ntied: true\n",
        encoding="utf-8",
    )
    spec = load_model(str(path))
    assert (spec.name, spec.head_dim, spec.num_kv_heads, spec.embedding_size) == ("mine", 8, 6, 48)


def test_yaml_and_json_of_every_preset_read_back_equal(tmp_path: Path) -> None:
    for spec in PRESETS.values():
        for suffix in ("json", "yaml"):
            path = tmp_path / f"model.{suffix}"
            serde.write_json(path, spec)
            assert load_model(str(path)) == spec


def test_yaml_with_an_unknown_key_names_the_valid_ones(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("family: gpt\nlayers: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    fault = next(f for f in caught.value.faults if f.field == "layers")
    assert "num_layers" in fault.message
    for field in ModelSpec.model_fields:
        if field not in ("name", "layers"):
            assert field in str(caught.value)
