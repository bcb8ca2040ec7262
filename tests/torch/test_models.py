"""Blocks as torch modules: shapes, causality, attention and positions against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from eth_cli.model import ModelSpec
from eth_cli.model_sources import PRESETS
from eth_cli.models.build import build_block, canonical_name, initialise_block, tie
from eth_cli.models.layers import Attention, rotary_table, rotate

VOCABULARY, POSITIONS = 61, 24


def make_spec(**changes: Any) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": "small",
        "family": "gpt",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "ffn_size": 72,
        "max_positions": POSITIONS,
        "embedding_size": 32,
        "activation": "gelu",
        "tied": True,
    }
    return ModelSpec(**fields | changes)


SPECS = {
    "gpt": make_spec(),
    "opt-350m style": make_spec(
        activation="relu",
        embedding_size=20,
        post_norm=True,
        final_norm=False,
        position_offset=2,
    ),
    "llama": make_spec(family="llama", activation="silu", tied=False),
    "qwen style": make_spec(
        family="llama", activation="silu", tied=False, num_kv_heads=2, qkv_bias=True, head_dim=12
    ),
}


def build(spec: ModelSpec, *, seed: int = 0) -> list[nn.Module]:
    """All blocks with their initial weights, the head tied where the model says so."""
    blocks = []
    for index in range(spec.num_blocks):
        block = build_block(spec, index, dtype=torch.float32)
        initialise_block(block, spec, index, seed=seed)
        blocks.append(block)
    if spec.tied:
        tie(blocks[0], blocks[-1])
    return blocks


def run(blocks: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    x = tokens
    for block in blocks:
        x = block(x)
    return x


def tokens_of(num_samples: int, length: int) -> torch.Tensor:
    return torch.randint(
        VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(7)
    )


@pytest.fixture(params=SPECS, ids=lambda name: name.replace(" ", "-"))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


def test_parameters_are_those_that_the_arithmetic_says(spec: ModelSpec) -> None:
    for index in range(spec.num_blocks):
        block = build_block(spec, index, dtype=torch.float32)
        shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
        assert shapes == spec.parameter_shapes(index)
        assert list(shapes) == list(spec.parameter_shapes(index))
        assert not list(block.buffers())


@pytest.mark.parametrize("name", [n for n in PRESETS if not n.endswith("tiny")])
def test_blocks_of_real_models_are_built_on_meta_with_the_published_parameters(name: str) -> None:
    spec = PRESETS[name]
    for index in (0, 1, spec.num_blocks - 1):
        block = build_block(spec, index, dtype=torch.bfloat16, device="meta")
        parameters = list(block.parameters())
        assert {p.device.type for p in parameters} == {"meta"}
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        assert sum(p.numel() for p in parameters) == spec.block_parameters(index)


def test_shapes_from_tokens_to_logits(spec: ModelSpec) -> None:
    blocks = build(spec)
    x = tokens_of(2, 11)
    for index, block in enumerate(blocks):
        x = block(x)
        last = VOCABULARY if index == spec.num_blocks - 1 else spec.hidden_size
        assert x.shape == (2, 11, last)
        assert x.isfinite().all()


def test_no_position_sees_later_tokens(spec: ModelSpec) -> None:
    blocks = build(spec)
    tokens = tokens_of(2, 12)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCABULARY
    before, after = run(blocks, tokens), run(blocks, changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_earlier_tokens_matter_and_so_does_their_order(spec: ModelSpec) -> None:
    # Larger weights than the initial ones, so that the layers weigh against the residual stream.
    blocks = build(spec)
    for block in blocks[1:-1]:
        for parameter in block.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(8)
    tokens = tokens_of(1, 9)
    swapped = tokens.clone()
    swapped[0, 1], swapped[0, 4] = tokens[0, 4], tokens[0, 1]
    assert tokens[0, 1] != tokens[0, 4]
    difference = run(blocks, tokens)[0, -1] - run(blocks, swapped)[0, -1]
    assert difference.abs().max() > 1e-4


def test_samples_of_a_micro_batch_do_not_mix(spec: ModelSpec) -> None:
    blocks = build(spec)
    tokens = tokens_of(3, 10)
    together = run(blocks, tokens)
    for sample in range(3):
        torch.testing.assert_close(run(blocks, tokens[sample : sample + 1])[0], together[sample])


def test_every_parameter_gets_a_gradient(spec: ModelSpec) -> None:
    blocks = build(spec)
    run(blocks, tokens_of(2, POSITIONS)).square().sum().backward()  # type: ignore[no-untyped-call] # torch's
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            assert parameter.grad is not None, (index, name)
            assert parameter.grad.abs().sum() > 0, (index, name)


def naive_attention(module: Attention, x: torch.Tensor) -> torch.Tensor:
    """Attention head by head, with an explicit mask and softmax."""
    num_samples, length, _ = x.shape
    size = module.head_dim
    projected = module.qkv(x)  # (B, S, (N + 2K) D)
    heads = [projected[..., i * size : (i + 1) * size] for i in range(projected.shape[-1] // size)]
    queries = heads[: module.num_heads]
    keys = heads[module.num_heads : module.num_heads + module.num_kv_heads]
    values = heads[module.num_heads + module.num_kv_heads :]
    if module.rope_theta is not None:
        table = rotary_table(length, size, theta=module.rope_theta, dtype=x.dtype, device=x.device)
        queries = [rotate(q[:, :, None], *table)[:, :, 0] for q in queries]
        keys = [rotate(k[:, :, None], *table)[:, :, 0] for k in keys]
    mask = torch.ones(length, length).tril().bool()
    group = module.num_heads // module.num_kv_heads
    results = []
    for i, query in enumerate(queries):
        scores = query @ keys[i // group].transpose(1, 2) / math.sqrt(size)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        results.append(weights @ values[i // group])
    result: torch.Tensor = module.out(torch.cat(results, dim=-1))
    assert result.shape == (num_samples, length, x.shape[-1])
    return result


def test_attention_equals_the_plain_formula(spec: ModelSpec) -> None:
    torch.manual_seed(3)
    module = Attention(spec, dtype=torch.float32, device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 13, spec.hidden_size)
    torch.testing.assert_close(module(x), naive_attention(module, x), rtol=1e-4, atol=1e-5)


def test_rotary_products_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 16, generator=generator, dtype=torch.float64).unbind()
    table = rotary_table(40, 16, theta=10000.0, dtype=torch.float64, device=torch.device("cpu"))

    def at_all_positions(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.expand(1, 40, 1, 16), *table)[0, :, 0]  # (40, 16)

    products = at_all_positions(query) @ at_all_positions(key).T  # (40, 40)
    for distance in (0, 1, 5, 21):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    # Rotations keep lengths, and position 0 is not turned.
    turned = at_all_positions(query)
    torch.testing.assert_close(turned.norm(dim=-1), query.norm().expand(40), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(turned[0], query)
    assert (products.diagonal(-1)[0] - products.diagonal(-5)[0]).abs() > 1e-3


def test_rotary_angles_by_hand() -> None:
    cos, sin = rotary_table(3, 4, theta=100.0, dtype=torch.float32, device=torch.device("cpu"))
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_positions_start_behind_the_offset() -> None:
    spec = SPECS["opt-350m style"]
    embedding = build(spec)[0]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    difference = embedding(tokens)[0, 3] - embedding(tokens)[0, 1]
    rows = embedding.get_parameter("position.weight")
    assert rows.shape == (POSITIONS + 2, 32)
    torch.testing.assert_close(difference, rows[5] - rows[3])


def test_norms_stand_where_the_model_has_them() -> None:
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(5)) * 3 + 1
    post = build(SPECS["opt-350m style"])[1](x)
    torch.testing.assert_close(post.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-5)
    torch.testing.assert_close(post.std(-1, correction=0), torch.ones(2, 5), rtol=1e-4, atol=0)
    # Before the sub-layers: the residual stream passes, and the initial layer adds little to it.
    pre = build(SPECS["gpt"])[1](x)
    assert (pre - x).norm() < 0.2 * x.norm()


def test_a_tied_head_uses_the_embeddings_weight_itself() -> None:
    blocks = build(SPECS["gpt"])
    assert blocks[-1].get_parameter("weight") is blocks[0].get_parameter("token.weight")
    run(blocks, tokens_of(1, 6)).sum().backward()  # type: ignore[no-untyped-call] # torch's
    gradient = blocks[0].get_parameter("token.weight").grad
    assert gradient is not None
    # Rows of tokens that do not occur get a gradient too, through the head.
    unused = sorted(set(range(VOCABULARY)) - set(tokens_of(1, 6).flatten().tolist()))
    assert (gradient[unused].abs().sum(-1) > 0).all()


def test_weights_of_other_shapes_cannot_be_tied() -> None:
    embedding = build(SPECS["gpt"])[0]
    head = build(SPECS["opt-350m style"])[-1]
    with pytest.raises(ValueError, match=r"\(61, 32\).*\(61, 20\)"):
        tie(embedding, head)


def test_canonical_names() -> None:
    tied, untied = SPECS["gpt"], SPECS["llama"]
    assert canonical_name(tied, 3, "attention.qkv.weight") == "blocks.3.attention.qkv.weight"
    assert canonical_name(tied, 4, "weight") == canonical_name(tied, 0, "token.weight")
    assert canonical_name(tied, 4, "norm.weight") == "blocks.4.norm.weight"
    assert canonical_name(untied, 4, "weight") == "blocks.4.weight"


def test_half_precision_blocks_compute_in_half_precision(spec: ModelSpec) -> None:
    for index in range(spec.num_blocks):
        block = build_block(spec, index, dtype=torch.bfloat16)
        initialise_block(block, spec, index, seed=0)
        x = tokens_of(1, 5) if index == 0 else torch.ones(1, 5, 32, dtype=torch.bfloat16)
        assert block(x).dtype == torch.bfloat16
