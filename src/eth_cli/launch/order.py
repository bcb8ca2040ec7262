"""Which sample is used when: a function of the seed and the position, never of the plan.

Nothing of it is in memory or is counted while a run goes on, so any rank finds the samples of any
step at once, and a run goes on anywhere. Two parts: positions are dealt out to the sources by
weight (`Interleaving`), and each source goes through its samples epoch after epoch, each epoch in
an order of its own (`Permutation`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 12
"""Of the Feistel network. 4 make it pseudo-random for large domains; small ones need more."""

Words = NDArray[np.uint64]


class Permutation:
    """A pseudo-random permutation of ``0 ... size - 1`` that is computed place by place.

    A Feistel network permutes the numbers of 2h bits, the smallest such set that holds ``size``;
    what falls outside is sent through it again until it falls inside ("cycle walking", Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002), less than 4 times on average.
    """

    def __init__(self, size: int, key: str) -> None:
        """``size`` at most 2**62."""
        self.size = size
        half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half)
        self._mask = np.uint64(2**half - 1)
        digest = hashlib.shake_256(key.encode()).digest(8 * _ROUNDS)
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def at(self, places: Sequence[int]) -> list[int]:
        """What stands at these places."""
        values = self._network(np.array(places, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._network(values[outside])
        return [int(value) for value in values]

    def _network(self, values: Words) -> Words:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._shift) | right


def _mixed(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit depends on every other."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Interleaving:
    """Deals positions 0, 1, 2, ... out to sources, evenly and in exact proportion to weights.

    Source 0 gets ``floor(g * w0 / W)`` of the first g positions; the others go on in the same way
    with what is left. So after any number of positions no source is as much as its place in the
    order + 1 away from its due, and after a multiple of whole parts none is away at all.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights above 0; decimal fractions are taken as they are written."""
        fractions = [Fraction(str(weight)) for weight in weights]
        common = math.lcm(*(f.denominator for f in fractions))
        parts = [int(f * common) for f in fractions]
        self._steps = [(part, sum(parts[i:])) for i, part in enumerate(parts)]

    def at(self, position: int) -> tuple[int, int]:
        """The source of a position, and how many positions it got before this one."""
        for source, (part, whole) in enumerate(self._steps):
            num_before = position * part // whole
            if (position + 1) * part // whole > num_before:
                return source, num_before
            position -= num_before
        raise AssertionError("the last source takes whatever is left")


class SampleOrder:
    """The samples of each step."""

    def __init__(
        self,
        *,
        num_samples: int | Sequence[int],
        global_batch_size: int,
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Order the samples of one source or of several, which are numbered through.

        Without weights sources get positions in proportion to their samples, so that each sample of
        all comes once before any comes twice.
        """
        self._sizes = (num_samples,) if isinstance(num_samples, int) else tuple(num_samples)
        self._starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        self._interleaving = Interleaving(weights or self._sizes)
        self._global_batch_size = global_batch_size
        self._seed = seed

    def batch(self, step_index: int) -> tuple[int, ...]:
        """The samples of the step with this index (from 0), for i = 0 ... global_batch_size - 1."""
        first = step_index * self._global_batch_size
        # Places of one epoch of one source are looked up together.
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i in range(self._global_batch_size):
            source, count = self._interleaving.at(first + i)
            epoch, place = divmod(count, self._sizes[source])
            wanted.setdefault((source, epoch), []).append((i, place))
        samples = [0] * self._global_batch_size
        for (source, epoch), found in wanted.items():
            permutation = _permutation(self._sizes[source], self._seed, source, epoch)
            values = permutation.at([place for _, place in found])
            for (i, _), value in zip(found, values, strict=True):
                samples[i] = self._starts[source] + value
        return tuple(samples)


@lru_cache(maxsize=256)
def _permutation(size: int, seed: int, source: int, epoch: int) -> Permutation:
    return Permutation(size, f"{seed}/{source}/{epoch}")
