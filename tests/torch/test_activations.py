"""Activation bytes and operations counted without data, against hand counts and real runs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from eth_cli.model import ModelSpec, RopeScaling
from eth_cli.model_sources import PRESETS
from eth_cli.models.build import TORCH_DTYPES, build_block, initialise_block, tie
from eth_cli.profile.activations import (
    SavedActivations,
    block_input,
    head_loss,
    head_peak_bytes,
    trace_block,
)
from eth_cli.profile.roofline import OpCost

GPT, LLAMA = PRESETS["gpt-tiny"], PRESETS["llama-tiny"]
HEAD = GPT.num_blocks - 1


def trace(spec: ModelSpec, index: int, **options: Any) -> Any:
    settings: dict[str, Any] = {"dtype": "fp32", "micro_batch_size": 2, "seq_len": 100}
    return trace_block(spec, index, **settings | options)


def test_gpt_layer_by_hand() -> None:
    b, s, h, n, f = 2, 100, GPT.hidden_size, GPT.num_heads, GPT.ffn_size
    elements = (
        2 * b * s * h  # input and first norm's output
        + 3 * b * s * h  # query, key, value: one storage
        + b * s * h  # attention's output
        + b * n * s  # its log-sum-exp
        + 2 * b * s * h  # after the first addition, second norm's output
        + 2 * b * s * f  # before and after the activation
        + 2 * 2 * b * s  # mean and scale of both norms
    )
    assert trace(GPT, 1).activation_bytes == 4 * elements
    assert trace(GPT, 1).recompute_activation_bytes == 4 * b * s * h


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_llama_layer_by_hand(dtype: str, size: int) -> None:
    b, s, h, d = 2, 100, LLAMA.hidden_size, LLAMA.head_dim
    n, k, f = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.ffn_size
    elements = (
        2 * b * s * h  # input and first norm's output
        + b * s * (n + 2 * k) * d  # the projection, which the values are a part of
        + b * s * (n + k) * d  # turned queries and keys
        + 2 * s * (d // 2)  # cosines and sines
        + b * s * n * d  # attention's output
        + 2 * b * s * h  # after the first addition, second norm's output
        + 4 * b * s * f  # gate, its activation, up, their product
    )
    # In fp32 whatever the dtype: log-sum-exp, and one number a row of each norm.
    single = 4 * (b * n * s + 2 * b * s)
    assert trace(LLAMA, 1, dtype=dtype).activation_bytes == size * elements + single


def test_embedding_saves_its_token_ids_only() -> None:
    for spec in (GPT, LLAMA):
        found = trace(spec, 0)
        assert found.activation_bytes == found.recompute_activation_bytes == 8 * 2 * 100


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("fp16", 2)])
def test_head_by_hand_with_loss(dtype: str, size: int) -> None:
    b, s, h, v = 2, 100, GPT.hidden_size, GPT.vocab_size
    saved = (
        size * 2 * b * s * h  # input, norm's output
        + size * 2 * b * s  # mean and scale of the norm
        + 4 * b * s * v  # log-softmax, fp32
        + 8 * b * s  # targets
        + 4  # weight of the targets, a scalar
    )
    peak = size * b * s * v + 2 * 4 * b * s * v  # logits, and two fp32 gradients
    assert trace(GPT, HEAD, dtype=dtype).activation_bytes == saved + peak


def test_the_sum_over_a_stage_is_what_a_real_run_saves() -> None:
    tokens = torch.randint(GPT.vocab_size, (2, 100))
    blocks = []
    for index in range(GPT.num_blocks):
        block = build_block(GPT, index, dtype=torch.float32)
        initialise_block(block, GPT, index, seed=0)
        blocks.append(block)
    tie(blocks[0], blocks[-1])
    saved = SavedActivations([p for block in blocks for p in block.parameters()])
    with saved.recording():
        x = tokens
        for block in blocks:
            x = block(x)
        loss = head_loss(x, torch.zeros(2, 100, dtype=torch.int64))
    logits = x.nbytes + 2 * 4 * x.numel()
    expected = sum(trace(GPT, index).activation_bytes for index in range(GPT.num_blocks))
    assert saved.num_bytes(output=loss) == expected - logits


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "opt-350m", "qwen2.5-7b", "qwen3-0.6b"])
def test_flops_are_those_of_the_arithmetic(name: str) -> None:
    spec = PRESETS[name]
    for index in (0, 1, spec.num_blocks - 1):
        found = trace(spec, index, micro_batch_size=3)
        assert found.forward_flops == spec.forward_flops(index, micro_batch_size=3, seq_len=100)
        if index == 1:
            # Twice the matrices, and 5 products of the scores' size for the 2 of the forward.
            attention = 4 * 3 * 100 * 100 * spec.num_heads * spec.head_dim
            matrices = found.forward_flops - attention
            assert found.backward_flops == 2 * matrices + attention * 5 // 2
        else:
            assert found.backward_flops == 2 * found.forward_flops


def test_costs_grow_with_the_micro_batch() -> None:
    one, four = trace(LLAMA, 1, micro_batch_size=1), trace(LLAMA, 1, micro_batch_size=4)
    assert four.forward_flops == 4 * one.forward_flops
    tables = 4 * 2 * 100 * LLAMA.head_dim // 2
    assert four.activation_bytes - tables == 4 * (one.activation_bytes - tables)
    # Weights are read once whatever the micro-batch is.
    bytes_of_one = sum(op.num_bytes for op in one.forward)
    assert sum(op.num_bytes for op in four.forward) < 4 * bytes_of_one


def test_traffic_of_the_embedding_is_the_rows_looked_up() -> None:
    first = trace(LLAMA, 0).forward[0]
    rows = 4 * 2 * 100 * LLAMA.hidden_size
    assert first == OpCost(flops=0, num_elements=rows // 4, num_bytes=2 * rows + 8 * 2 * 100)


def test_nothing_of_the_block_is_ever_allocated() -> None:
    # 70 billion parameters in 80 layers: a layer alone has 3.4 GB, a head 2.1 GB.
    spec = PRESETS["llama3-70b"]
    found = trace(spec, 1, dtype="bf16", micro_batch_size=1, seq_len=8192)
    assert found.activation_bytes > 10**9


LLAMA_SWITCHES: dict[str, dict[str, Any]] = {
    "window": {"attention_window": 30},
    "qwen3": {"qk_norm": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "yarn": {
        "rope_scaling": RopeScaling(
            type="yarn", factor=4.0, original_positions=64, attention_factor=1.1
        )
    },
}
FAMILIES: dict[str, ModelSpec] = {
    "gpt": GPT,
    "opt-350m": GPT.model_copy(
        update={"embedding_size": 40, "post_norm": True, "final_norm": False, "position_offset": 2}
    ),
    "llama": LLAMA,
    **{name: LLAMA.model_copy(update=changes) for name, changes in LLAMA_SWITCHES.items()},
}


class Retained(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types here
    """Remembers every storage that an operation made, and tells which are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # nor here
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor)
        return output

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's
        self.made[reference.cdata] = reference, storage.nbytes()

    def num_bytes(self, *, without: set[int]) -> int:
        """Bytes of what is still there, without some storages."""
        gc.collect()
        total = 0
        for key, (reference, size) in self.made.items():
            is_gone: bool = reference.expired()  # type: ignore[no-untyped-call] # torch's
            if key not in without and not is_gone:
                total += size
        return total


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_bytes_are_what_a_cpu_keeps_for_the_backward(
    family: str, dtype: str, recompute: bool
) -> None:
    """The oracle knows nothing of autograd: what is not freed after a forward was kept for it."""
    spec = FAMILIES[family]
    for index in (0, 1, spec.num_blocks - 1):
        block = build_block(spec, index, dtype=TORCH_DTYPES[dtype])
        initialise_block(block, spec, index, seed=0)
        x = block_input(
            spec,
            index,
            dtype=TORCH_DTYPES[dtype],
            micro_batch_size=2,
            seq_len=100,
            device="cpu",
        )
        x = x.clone()  # as in a stage it is another block's output, which autograd need not hold
        with Retained() as retained:
            retained.watch(x)
            output = (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
                if recompute
                else block(x)
            )
        del x
        others = (*block.parameters(), output)
        kept = retained.num_bytes(without={t.untyped_storage()._cdata for t in others})
        trace = trace_block(
            spec, index, dtype=dtype, micro_batch_size=2, seq_len=100, kernels="cpu"
        )
        predicted = trace.recompute_activation_bytes if recompute else trace.activation_bytes
        if index == spec.num_blocks - 1 and not recompute:
            # Without the loss: log-softmax, targets and their weight, and the peak of its backward.
            logits = 2 * 100 * spec.vocab_size
            predicted -= 4 * logits + 8 * 2 * 100 + 4 + head_peak_bytes(output)
        assert abs(kept - predicted) <= 0.01 * predicted
