"""This rank's part of each global batch.

Sample i of step k depends on (seed, k, i) only, never on the plan (`eth_cli.launch.order`);
pipelines take consecutive ranges of i in plan order. So a run can go on under another plan, and the
number of valid tokens of the whole batch is known on every rank without communication. Where
samples come from is decided by `eth_cli.launch.data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eth_cli.launch.dataset import Mixture, TokenSource
from eth_cli.launch.order import SampleOrder
from eth_cli.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's view of a global batch."""

    num_valid: int
    """Valid labels of the whole global batch."""
    samples: tuple[int, ...]
    """Samples of this rank's pipeline."""
    tokens: torch.Tensor | None
    """(micro_batches * micro_batch_size, seq_len) int64, on first stages only."""
    labels: torch.Tensor | None
    """(micro_batches * micro_batch_size, seq_len) int64, on last stages only."""


def order_of(source: TokenSource, *, global_batch_size: int, seed: int) -> SampleOrder:
    """The order that the samples of a source, or of a mixture of several, are used in."""
    weights = source.weights if isinstance(source, Mixture) else None
    return SampleOrder(
        num_samples=source.sizes if isinstance(source, Mixture) else source.num_samples,
        global_batch_size=global_batch_size,
        seed=seed,
        weights=weights,
    )


class BatchReader:
    """Reads what one rank needs of each global batch."""

    def __init__(
        self,
        source: TokenSource,
        *,
        plan: Plan,
        pipeline: int,
        is_first: bool,
        is_last: bool,
        seed: int,
        device: torch.device,
    ) -> None:
        self._source = source
        self._order = order_of(source, global_batch_size=plan.global_batch_size, seed=seed)
        start = sum(p.num_samples for p in plan.pipelines[:pipeline])
        self._part = slice(start, start + plan.pipelines[pipeline].num_samples)
        self._is_first = is_first
        self._is_last = is_last
        self._device = device

    def read(self, step_index: int) -> Batch:
        """The batch of the step with this index, from 0."""
        batch = self._order.batch(step_index)
        samples = batch[self._part]
        tokens = labels = None
        if self._is_first or self._is_last:
            pairs = [self._source.sample(sample) for sample in samples]
            if self._is_first:
                tokens = self._stack([tokens for tokens, _ in pairs])
            if self._is_last:
                labels = self._stack([labels for _, labels in pairs])
        return Batch(
            num_valid=sum(self._source.num_valid(sample) for sample in batch),
            samples=samples,
            tokens=tokens,
            labels=labels,
        )

    def _stack(self, rows: Sequence[NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows)).to(self._device, non_blocking=True)
