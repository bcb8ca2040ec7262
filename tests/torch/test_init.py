"""Initial weights: a function of (seed, canonical name) only."""

from __future__ import annotations

import math

import pytest
import torch

from eth_cli.model_sources import PRESETS
from eth_cli.models.build import TIED_WEIGHT, build_block, initialise_block
from eth_cli.models.init import initial_value, parameter_seed

GPT, LLAMA = PRESETS["gpt-tiny"], PRESETS["llama-tiny"]


def weights(
    name: str, index: int, *, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    spec = PRESETS[name]
    block = build_block(spec, index, dtype=dtype)
    initialise_block(block, spec, index, seed=seed)
    return {local: p.detach().clone() for local, p in block.named_parameters()}


def test_weights_do_not_depend_on_what_else_was_built_or_drawn() -> None:
    first = weights("gpt-tiny", 3, seed=5)
    torch.manual_seed(123)
    torch.randn(7)
    weights("gpt-tiny", 2, seed=5)
    second = weights("gpt-tiny", 3, seed=5)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_building_and_filling_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    weights("llama-tiny", 0, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_blocks_and_parameters_differ() -> None:
    base = weights("llama-tiny", 1, seed=0)
    assert not torch.equal(base["mlp.up.weight"], weights("llama-tiny", 1, seed=1)["mlp.up.weight"])
    assert not torch.equal(base["mlp.up.weight"], weights("llama-tiny", 2, seed=0)["mlp.up.weight"])
    assert not torch.equal(base["mlp.up.weight"], base["mlp.gate.weight"])


def test_the_tied_head_starts_as_the_embedding_wherever_it_stands() -> None:
    head = weights("gpt-tiny", GPT.num_blocks - 1, seed=4)["weight"]
    assert torch.equal(head, weights("gpt-tiny", 0, seed=4)["token.weight"])
    untied = weights("llama-tiny", LLAMA.num_blocks - 1, seed=4)["weight"]
    assert not torch.equal(untied, weights("llama-tiny", 0, seed=4)["token.weight"])


def test_distribution() -> None:
    layer = weights("gpt-tiny", 1, seed=0)
    assert layer["mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    scaled = 0.02 / math.sqrt(2 * GPT.num_layers)
    for name in ("mlp.down.weight", "attention.out.weight"):
        assert layer[name].std().item() == pytest.approx(scaled, rel=0.05)
        assert abs(layer[name].mean().item()) < scaled / 10
    for name, value in layer.items():
        if name.endswith("bias"):
            assert not value.any()
        elif name.startswith("norm"):
            assert (value == 1).all()


def test_lower_precision_is_the_rounded_value() -> None:
    full = weights("llama-tiny", 1, seed=0)
    half = weights("llama-tiny", 1, seed=0, dtype=torch.bfloat16)
    for name, value in full.items():
        assert torch.equal(half[name], value.bfloat16()), name


def test_a_part_of_the_value_can_be_had_without_the_block() -> None:
    shape = torch.Size(GPT.parameter_shapes(0)["token.weight"])
    value = initial_value(GPT, seed=8, name=TIED_WEIGHT, shape=shape)
    assert torch.equal(value, weights("gpt-tiny", 0, seed=8)["token.weight"])


def test_the_seed_of_a_parameter_never_changes() -> None:
    # The first eight bytes of sha256("3:blocks.1.norm1.weight"): not Python's hash, which differs
    # from process to process; any other value would make old seeds train other models.
    assert parameter_seed(3, "blocks.1.norm1.weight") == 3_950_461_691_303_298_688
