"""Measuring real blocks in this process: the right blocks, memory and statistics."""

from __future__ import annotations

import pytest
import torch

from eth_cli.model_sources import PRESETS
from eth_cli.profile import compute
from eth_cli.profile.activations import trace_block
from eth_cli.profile.compute import Sample, measure_block, measure_optimizer, process_bytes
from eth_cli.profile.measurement import BlockMeasurement
from eth_cli.profile.network import monotone

CPU = torch.device("cpu")
GPT = PRESETS["gpt-tiny"]


def measure(index: int, *, micro_batch_size: int = 2, seq_len: int = 64) -> BlockMeasurement:
    return measure_block(
        GPT, index, dtype="fp32", micro_batch_size=micro_batch_size, seq_len=seq_len, device=CPU
    )


@pytest.fixture(autouse=True)
def _few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "MAX_ENTRY_S", 0.05)


def test_median_and_interquartile_range_by_hand() -> None:
    sample = Sample.of([5.0, 1.0, 2.0, 4.0, 100.0])
    assert sample == Sample(median_s=4.0, spread_s=3.0)


@pytest.mark.parametrize("index", [0, 1, 9])
def test_activations_are_those_counted_without_data(index: int) -> None:
    found = measure(index)
    expected = trace_block(GPT, index, dtype="fp32", micro_batch_size=2, seq_len=64)
    assert found.block == GPT.block_kind(index)
    assert found.activation_bytes == expected.activation_bytes
    assert found.recompute_activation_bytes == expected.recompute_activation_bytes
    assert found.working_bytes == 0
    assert found.forward_s > 0
    assert found.backward_s > 0


def test_more_work_takes_longer() -> None:
    small = [measure(1, micro_batch_size=1, seq_len=32) for _ in range(5)]
    large = measure(1, micro_batch_size=8, seq_len=128)
    # 32 times the arithmetic and more. Other processes can hold up each measurement, not all five.
    assert large.forward_s > 3 * min(found.forward_s for found in small)
    assert large.backward_s > 3 * min(found.backward_s for found in small)


def test_repetitions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "MAX_ENTRY_S", 0.0)
    assert len(compute._repeat(lambda: 1)) == compute.MIN_REPEATS
    monkeypatch.setattr(compute, "MAX_ENTRY_S", 30.0)
    assert len(compute._repeat(lambda: 1)) == compute.MAX_REPEATS


def test_optimizer_time_is_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_optimizer(GPT, device=CPU) > 0
    monkeypatch.setattr(compute, "_repeat", lambda run: [3.0, 5.0, 4.0])
    assert measure_optimizer(GPT, device=CPU) == 4.0 / GPT.block_parameters(1)


def test_process_bytes_see_what_the_process_holds() -> None:
    before = process_bytes(CPU)
    held = torch.ones(64 * 2**20 // 4)
    grown = process_bytes(CPU) - before
    assert before > 50 * 2**20
    assert 0.8 * held.nbytes < grown < 2 * held.nbytes


def test_times_of_messages_are_made_monotone_by_lowering_disturbed_ones() -> None:
    rows = [(1.0, 5.0), (4.0, 3.0), (16.0, 9.0), (64.0, 7.0), (256.0, 20.0)]
    assert monotone(rows) == ((1.0, 3.0), (4.0, 3.0), (16.0, 7.0), (64.0, 7.0), (256.0, 20.0))
    assert monotone(list(reversed(rows))) == monotone(rows)
