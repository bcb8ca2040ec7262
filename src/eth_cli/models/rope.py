"""Angles of rotary positions, as they are and scaled to longer sequences.

D is the size of a head; pair i of its dimensions turns by ``frequency[i]`` radians a position.
"""

from __future__ import annotations

import math

import torch

from eth_cli.model import RopeScaling


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: RopeScaling | None, device: torch.device
) -> torch.Tensor:
    """The angle by which each pair of dimensions turns from one position to the next, fp32 (D/2,).

    Unscaled: theta^(-2i/D) (Su et al. 2021, "RoFormer", section 3.2.2).
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / theta ** (pairs / head_dim)
    if scaling is None or scaling.type == "dynamic":
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    if scaling.type == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, theta=theta)


def _llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs are divided by factor, fast ones kept, those between are mixed (Llama 3.1).

    A pair turns ``original_positions x frequency / 2 pi`` times within the first training's length;
    the share that it keeps rises linearly with that from low_frequency_factor to
    high_frequency_factor.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    assert scaling.original_positions is not None
    assert low is not None
    assert high is not None
    turns = scaling.original_positions * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: torch.Tensor, scaling: RopeScaling, *, theta: float) -> torch.Tensor:
    """As llama3, but the share falls linearly with the pair's index (Peng et al. 2023, "YaRN").

    The passage lies between the pairs that turn beta_fast and beta_slow times.
    """
    assert scaling.original_positions is not None
    num_pairs = len(plain)

    def pair_that_turns(times: float) -> float:
        assert scaling.original_positions is not None
        length = scaling.original_positions / (times * 2 * math.pi)
        return 2 * num_pairs * math.log(length) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001  # As in the original: the passage must have a length.
    index = torch.arange(num_pairs, dtype=torch.float32, device=plain.device)
    divided = ((index - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)
