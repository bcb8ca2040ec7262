"""Random small configurations over every switch of each Hugging Face family."""

from __future__ import annotations

import random
from typing import Any

SEQ_LEN = 37
VOCABULARY = 61

_SCALED: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 20,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "attention_factor": 0.7,
        "truncate": False,
    },
)


def config(model_type: str, seed: int) -> dict[str, Any]:
    """A configuration; each switch of a family is on in some of the first six seeds."""
    rng = random.Random(f"{model_type} {seed}")
    even, third = seed % 2 == 0, seed % 3 == 0
    num_heads = rng.choice([2, 4])
    head_dim = rng.choice([6, 8, 12])
    common: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": even,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    }
    if model_type == "gpt2":
        return common | {
            "n_positions": 48,
            "n_embd": num_heads * head_dim,
            "n_head": num_heads,
            "n_layer": rng.randint(1, 3),
            "n_inner": None if third else rng.choice([40, 52]),
            "activation_function": ("gelu_new", "gelu", "relu", "silu")[seed % 4],
            "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
            "reorder_and_upcast_attn": third,
        }
    if model_type == "opt":
        return common | {
            "max_position_embeddings": 48,
            "hidden_size": num_heads * head_dim,
            "num_attention_heads": num_heads,
            "num_hidden_layers": rng.randint(1, 3),
            "ffn_dim": rng.choice([40, 52]),
            "activation_function": ("relu", "gelu")[seed % 2],
            "do_layer_norm_before": not third,
            "_remove_final_layer_norm": seed % 4 == 1,
            "word_embed_proj_dim": rng.choice([10, 14]) if seed % 4 < 2 else num_heads * head_dim,
        }
    llama = common | {
        "max_position_embeddings": 64,
        "hidden_size": 24,
        "num_attention_heads": num_heads,
        "num_key_value_heads": rng.choice([1, 2, num_heads]),
        "head_dim": head_dim,
        "num_hidden_layers": rng.randint(1, 3),
        "intermediate_size": rng.choice([40, 52]),
        "hidden_act": ("silu", "gelu")[third],
        "rms_norm_eps": rng.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_theta": rng.choice([100.0, 5000.0]), "rope_type": "default"}
        | (_SCALED[seed % len(_SCALED)] or {}),
    }
    window = (SEQ_LEN + 5, SEQ_LEN, 20, 12, 5, 1)[seed % 6]
    if model_type == "llama":
        return llama | {"attention_bias": third, "mlp_bias": seed % 3 == 1}
    if model_type == "mistral":
        return llama | {"sliding_window": None if seed == 0 else window}
    qwen = {
        "use_sliding_window": seed > 1,
        "sliding_window": window,
        "max_window_layers": 0 if seed != 3 else 28,
    }
    if model_type == "qwen2":
        qwen["head_dim"] = head_dim
    else:
        qwen["attention_bias"] = third
    return llama | qwen
