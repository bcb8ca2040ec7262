"""AdamW on the parameters that a rank holds, and the learning-rate schedule.

Every owner of a parameter updates its own copy from the same gradients with the same operations, so
copies stay equal bit by bit without being sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eth_cli.launch.config import RunOptions
from eth_cli.launch.runtime.stage import OwnedParameter

STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps for each parameter: both moments, and how many updates it had."""


def learning_rate(options: RunOptions, step_index: int) -> float:
    """The rate of the step with this index, from 0.

    Linear warm-up from ``peak / warmup_steps`` to the peak, then half a cosine from the peak down
    to ``peak * final_learning_rate_ratio``, which the step after the last one would have.
    """
    peak = options.learning_rate
    if step_index < options.warmup_steps:
        return peak * (step_index + 1) / options.warmup_steps
    progress = (step_index - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    ratio = options.final_learning_rate_ratio
    return peak * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class Optimizer:
    """AdamW, with decay on matrices only: not on norms and biases."""

    def __init__(self, parameters: Sequence[OwnedParameter], options: RunOptions) -> None:
        self._options = options
        self._parameters = tuple(parameters)
        self.num_parameters = sum(p.parameter.numel() for p in parameters)
        """Parameters that each step updates."""
        matrices = [p.parameter for p in parameters if p.parameter.dim() >= 2]
        vectors = [p.parameter for p in parameters if p.parameter.dim() < 2]
        groups = [(matrices, options.weight_decay), (vectors, 0.0)]
        self._adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": decay} for params, decay in groups if params],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.epsilon,
            fused=True,
        )
        # torch makes the state at the first step; a checkpoint is loaded into it before that.
        for owned in parameters:
            self._adamw.state[owned.parameter] = {
                "step": torch.zeros((), device=owned.parameter.device),
                "exp_avg": torch.zeros_like(owned.parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(owned.parameter, requires_grad=False),
            }

    def step(self, step_index: int) -> None:
        """Update all parameters with the learning rate of the step with this index."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._options, step_index)
        self._adamw.step()

    def state_of(self, owned: OwnedParameter) -> dict[str, torch.Tensor]:
        """The live state of one parameter, by `STATE_NAMES`."""
        return {name: self._adamw.state[owned.parameter][name] for name in STATE_NAMES}
