"""Initial weights, each a function of (seed, canonical name) only.

So no rank ever builds the whole model, and the plan has no influence on what is trained: the same
seed gives the same weights however the blocks are spread. The scheme is GPT-2's: normal with
standard deviation 0.02, divided by sqrt(2 x layers) for the two projections of each layer that add
to the residual stream (so that its variance does not grow with depth); norms 1, biases 0.
"""

from __future__ import annotations

import hashlib
import math

import torch

from eth_cli.model import ModelSpec

WEIGHT_STD = 0.02
"""Standard deviation of a matrix (GPT-2, `initializer_range`)."""
_RESIDUAL_PROJECTIONS = ("attention.out.weight", "mlp.down.weight")


def parameter_seed(seed: int, name: str) -> int:
    """The generator seed of one parameter: the first 8 bytes of SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def initial_value(spec: ModelSpec, *, seed: int, name: str, shape: torch.Size) -> torch.Tensor:
    """The initial value of one parameter, fp32 on CPU, shape ``shape``.

    Generated on CPU in fp32 whatever the parameter's own device and dtype, because the random
    streams of devices differ.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    std = WEIGHT_STD
    if name.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    return torch.normal(0.0, std, shape, generator=generator)
