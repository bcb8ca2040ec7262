"""Arithmetic of models: shapes, parameters, FLOPs, limits."""

from __future__ import annotations

from typing import Any

import pytest

from eth_cli.errors import ConfigError
from eth_cli.model import (
    EMBEDDING,
    HEAD,
    MAX_ELEMENTS,
    TRANSFORMER,
    ModelSpec,
    check_micro_batch_size,
    check_seq_len,
    window_chunks,
)
from eth_cli.serde import FieldError


def make_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "small",
        "family": "gpt",
        "vocab_size": 97,
        "hidden_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 6,
        "ffn_size": 80,
        "max_positions": 50,
        "embedding_size": 24,
        "activation": "gelu",
        "tied": True,
    }
    return ModelSpec(**fields | changes)


def make_llama(**changes: Any) -> ModelSpec:
    return make_spec(
        **{"family": "llama", "activation": "silu", "tied": False, "num_kv_heads": 2} | changes
    )


def test_blocks_are_embedding_layers_head() -> None:
    spec = make_spec()
    kinds = [spec.block_kind(index) for index in range(spec.num_blocks)]
    assert kinds == [EMBEDDING, TRANSFORMER, TRANSFORMER, TRANSFORMER, HEAD]
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            spec.block_kind(outside)


def test_gpt_parameters_by_hand() -> None:
    spec = make_spec()
    assert spec.block_parameters(0) == 97 * 24 + 50 * 24
    attention = 24 * 72 + 72 + 24 * 24 + 24
    mlp = 24 * 80 + 80 + 80 * 24 + 24
    assert spec.block_parameters(1) == attention + mlp + 4 * 24
    assert spec.block_parameters(4) == 97 * 24 + 2 * 24


def test_llama_parameters_by_hand() -> None:
    spec = make_llama()
    assert spec.block_parameters(0) == 97 * 24
    # 4 query heads, 2 key heads and 2 value heads of 6.
    attention = 24 * (4 + 2 + 2) * 6 + 24 * 24
    assert spec.block_parameters(1) == attention + 3 * 24 * 80 + 2 * 24
    assert spec.block_parameters(4) == 97 * 24 + 24
    with_bias = make_llama(qkv_bias=True)
    assert with_bias.block_parameters(1) - spec.block_parameters(1) == (4 + 2 + 2) * 6


def test_projections_of_a_narrow_embedding() -> None:
    spec = make_spec(embedding_size=16, post_norm=True, final_norm=False, position_offset=2)
    assert spec.block_parameters(0) == 97 * 16 + 52 * 24 + 16 * 24
    assert spec.block_parameters(4) == 97 * 16 + 16 * 24


def test_a_tied_weight_counts_once_in_the_model_and_in_each_block() -> None:
    tied, untied = make_spec(), make_spec(tied=False)
    blocks = sum(tied.block_parameters(index) for index in range(tied.num_blocks))
    assert tied.tied_parameters == 97 * 24
    assert tied.num_parameters == blocks - 97 * 24
    assert untied.num_parameters == blocks
    assert untied.tied_parameters == 0


def test_forward_flops_by_hand() -> None:
    spec = make_llama()
    tokens = 3 * 10
    matrices = 24 * 48 + 24 * 24 + 3 * 24 * 80
    scores_and_values = 2 * 2 * 10 * 24
    assert spec.forward_flops(0, micro_batch_size=3, seq_len=10) == 0
    assert spec.forward_flops(2, micro_batch_size=3, seq_len=10) == tokens * (
        2 * matrices + scores_and_values
    )
    assert spec.forward_flops(4, micro_batch_size=3, seq_len=10) == tokens * 2 * 97 * 24


def test_boundary_is_one_activation() -> None:
    assert make_spec().boundary_bytes_per_sample(10, 2) == 10 * 24 * 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"family": "llama", "head_dim": 5}, "head_dim"),
        ({"family": "llama", "embedding_size": 12}, "embedding_size"),
        ({"family": "llama", "post_norm": True}, "post_norm"),
        ({"family": "llama", "final_norm": False}, "final_norm"),
        ({"family": "llama", "position_offset": 2}, "position_offset"),
    ],
)
def test_what_no_block_can_be_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 # its cause is looked at below
        make_spec(**changes)
    causes = [detail["ctx"]["error"] for detail in caught.value.errors()]  # type: ignore[attr-defined] # pydantic's
    assert any(
        (field,) == at
        for cause in causes
        if isinstance(cause, FieldError)
        for at, _ in cause.faults
    )


def test_sequences_longer_than_the_model_are_refused_with_both_numbers() -> None:
    check_seq_len(make_spec(), 50, file="--seq-len")
    with pytest.raises(ConfigError, match=r"--seq-len: 51 tokens .* 50 positions"):
        check_seq_len(make_spec(), 51, file="--seq-len")


def test_chunks_of_a_window_cover_the_sequence_and_are_no_shorter_than_it() -> None:
    for seq_len, window in ((7, None), (7, 9), (7, 7), (20, 7), (21, 7), (22, 7), (50, 1), (13, 7)):
        num_chunks, length = window_chunks(seq_len, window)
        assert num_chunks * length - seq_len in range(num_chunks)
        assert num_chunks == 1 or window is None or length >= window
    assert window_chunks(20, 7) == (2, 10)
    spec = make_llama(attention_window=7)
    full = make_llama()
    # Of 2 chunks of 10 the first attends to 10, the second to 20 keys; without a window 20 x 20.
    saved = full.forward_flops(1, micro_batch_size=3, seq_len=20) - spec.forward_flops(
        1, micro_batch_size=3, seq_len=20
    )
    assert saved == 3 * 4 * (20 * 20 - 10 * 10 - 10 * 20) * 4 * 6


def test_micro_batches_beyond_all_counting_are_refused_with_both_numbers() -> None:
    spec = make_spec()
    check_micro_batch_size(spec, 10**9, seq_len=50, file="--micro-batch-sizes")
    with pytest.raises(ConfigError, match=rf"^--micro-batch-sizes: .* at most {MAX_ELEMENTS}"):
        check_micro_batch_size(spec, 10**9, seq_len=10**9, file="--micro-batch-sizes")
