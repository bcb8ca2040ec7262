"""Time and memory of real blocks on this machine's CPU or GPU; runs in a worker of `measure`.

A measurement is warmed up, repeated, and told as the median and the interquartile range, so that a
disturbed repetition shows in the spread and not in the value. Gradients are there from the start:
in training all micro-batches but the first of a step add to them.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from eth_cli.model import HEAD, ModelSpec
from eth_cli.models.build import TORCH_DTYPES, build_block, initialise_block
from eth_cli.profile.activations import (
    SavedActivations,
    block_input,
    head_loss,
    head_peak_bytes,
)
from eth_cli.profile.measurement import BlockMeasurement

Result = TypeVar("Result")

NUM_WARM_UPS = 2
MIN_REPEATS, MAX_REPEATS = 3, 30
MAX_ENTRY_S = 0.5
"""No repetition begins after so long, except to reach MIN_REPEATS [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Repeated measurements of one thing."""

    median_s: float
    spread_s: float
    """Interquartile range [s]."""

    @classmethod
    def of(cls, times_s: list[float]) -> Sample:
        """Median and spread of at least two times."""
        low, middle, high = statistics.quantiles(times_s, n=4, method="inclusive")
        return cls(median_s=middle, spread_s=high - low)


def measure_block(
    spec: ModelSpec,
    index: int,
    *,
    dtype: str,
    micro_batch_size: int,
    seq_len: int,
    device: torch.device,
) -> BlockMeasurement:
    """Time and memory of one block for one micro-batch, the head with its loss."""
    torch_dtype = TORCH_DTYPES[dtype]
    block = build_block(spec, index, dtype=torch_dtype, device=device)
    initialise_block(block, spec, index, seed=0)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = block_input(
        spec,
        index,
        dtype=torch_dtype,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        device=device,
    )
    _fill(x, spec)
    targets = torch.zeros(micro_batch_size, seq_len, dtype=torch.int64, device=device)
    is_head = spec.block_kind(index) == HEAD

    def run() -> tuple[float, float]:
        x.grad = None
        start = _now(device)
        output = block(x)
        result = head_loss(output, targets) if is_head else output
        middle = _now(device)
        result.backward(torch.ones_like(result))
        end = _now(device)
        return _elapsed(start, middle), _elapsed(middle, end)

    activation_bytes = _saved_bytes(block, x, targets if is_head else None)
    working_bytes = _peak_bytes(run, device) - activation_bytes
    for _ in range(NUM_WARM_UPS):
        run()
    times = _repeat(run)
    forward = Sample.of([forward_s for forward_s, _ in times])
    backward = Sample.of([backward_s for _, backward_s in times])
    return BlockMeasurement(
        block=spec.block_kind(index),
        micro_batch_size=micro_batch_size,
        forward_s=forward.median_s,
        backward_s=backward.median_s,
        forward_spread_s=forward.spread_s,
        backward_spread_s=backward.spread_s,
        activation_bytes=activation_bytes,
        recompute_activation_bytes=x.nbytes,
        working_bytes=max(0, working_bytes),
    )


def measure_optimizer(spec: ModelSpec, *, device: torch.device) -> float:
    """Time of AdamW for one parameter, on the parameters of a transformer layer [s].

    Whatever the model's dtype, the optimizer works on fp32 (master) weights.
    """
    block = build_block(spec, 1, dtype=torch.float32, device=device)
    initialise_block(block, spec, 1, seed=0)
    for parameter in block.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(block.parameters(), fused=True)

    def run() -> float:
        start = _now(device)
        optimizer.step()
        return _elapsed(start, _now(device))

    for _ in range(NUM_WARM_UPS):
        run()
    return Sample.of(_repeat(run)).median_s / spec.block_parameters(1)


def process_bytes(device: torch.device) -> int:
    """Memory that this process takes of its device now [bytes].

    On a CPU: the resident set. On a GPU: everything in use there that does not belong to tensors,
    which is the CUDA context and the libraries' buffers when no other program uses the GPU.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # Elsewhere only the peak is told: in bytes on macOS, in KiB on other systems.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 2**10


def _fill(x: torch.Tensor, spec: ModelSpec) -> None:
    """Values such as training has: zeros may be faster to multiply."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if x.dtype == torch.int64:
            x.copy_(torch.randint(spec.vocab_size, x.shape, generator=generator))
        else:
            x.copy_(torch.randn(x.shape, generator=generator))


def _saved_bytes(block: nn.Module, x: torch.Tensor, targets: torch.Tensor | None) -> int:
    """Saved activations of one forward, counted as `profile.activations` says."""
    saved = SavedActivations(block.parameters())
    with saved.recording():
        output = block(x)
        if targets is not None:
            head_loss(output, targets)
    extra = 0 if targets is None else head_peak_bytes(output)
    return saved.num_bytes(output=output) + extra


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The caching allocator's peak during one run above what was there before; 0 on a CPU."""
    if device.type != "cuda":
        run()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _repeat(run: Callable[[], Result]) -> list[Result]:
    results: list[Result] = []
    end = time.perf_counter() + MAX_ENTRY_S
    while len(results) < MIN_REPEATS or (len(results) < MAX_REPEATS and time.perf_counter() < end):
        results.append(run())
    return results


# --- Clocks: the CPU's own, or events in the GPU's stream -----------------------------------------

_Moment = float | torch.cuda.Event


def _now(device: torch.device) -> _Moment:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's
    event.record()
    return event


def _elapsed(start: _Moment, end: _Moment) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3  # torch tells milliseconds
