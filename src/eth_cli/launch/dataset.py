"""What a training sample is: windows over a sequence of tokens, and parts and mixtures of them.

Documents stand one after the other in one long sequence. It is cut into windows of ``seq_len + 1``
tokens that do not overlap; a window's tokens are its input and the same tokens one place further
its labels. Where tokens come from is the matter of `eth_cli.launch.data`; which window is used
when, of `eth_cli.launch.order`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from eth_cli.launch.data.files import Integers

Tokens: TypeAlias = NDArray[np.int64]

IGNORED_LABEL = -100
"""Label of a position that counts neither in the loss nor in the number of valid tokens."""

_BORDERS_STEP = 1024
"""Of so many ends of documents one is in memory, to find the others by."""


class TokenSource(Protocol):
    """Samples by index; the same on every rank, so that ranks need not tell each other."""

    @property
    def digest(self) -> str:
        """Changes with the samples, and with nothing else: not with where they are kept."""

    @property
    def num_samples(self) -> int:
        """How many samples there are."""

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels of a sample, each ``(seq_len,)``."""

    def num_valid(self, index: int) -> int:
        """How many labels of a sample are not `IGNORED_LABEL`, without reading the sample."""


class Borders:
    """The positions at which documents begin, found without being in memory."""

    def __init__(self, ends: Integers) -> None:
        """``ends``: the positions at which documents end, ascending."""
        self._ends = ends
        firsts = [ends[i : i + 1] for i in range(0, len(ends), _BORDERS_STEP)]
        self._index = np.concatenate(firsts) if firsts else np.empty(0, dtype=np.int64)

    def within(self, start: int, stop: int) -> Tokens:
        """Those after ``start`` and before ``stop``."""
        first = int(np.searchsorted(self._index, start, side="right")) - 1
        last = int(np.searchsorted(self._index, stop, side="left"))
        some = self._ends[max(0, first) * _BORDERS_STEP : last * _BORDERS_STEP]
        inside = slice(np.searchsorted(some, start, side="right"), np.searchsorted(some, stop))
        return some[inside].astype(np.int64)


class WindowedTokens:
    """A sequence of tokens cut into windows of ``seq_len + 1``.

    A last window cut short is filled up with ignored labels; one without any label is left out.
    """

    def __init__(
        self,
        tokens: Integers,
        *,
        seq_len: int,
        digest: str,
        borders: Borders | None = None,
    ) -> None:
        """``digest`` is of ``tokens`` and ``borders``.

        With ``borders`` the first token of a document is no label: what comes before it is another
        document, and says nothing about it.
        """
        self.digest = digest
        self._tokens = tokens
        self._seq_len = seq_len
        self._borders = borders
        full, rest = divmod(len(tokens), seq_len + 1)
        self._num_samples = full + (rest >= 2)

    @property
    def num_samples(self) -> int:
        """Number of windows."""
        return self._num_samples

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        width = self._seq_len + 1
        return index * width, min((index + 1) * width, len(self._tokens))

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels of a window, each ``(seq_len,)``."""
        start, stop = self._place(index)
        window = self._tokens[start:stop]
        tokens = np.zeros(self._seq_len, dtype=np.int64)
        labels = np.full(self._seq_len, IGNORED_LABEL, dtype=np.int64)
        tokens[: len(window) - 1] = window[:-1]
        labels[: len(window) - 1] = window[1:]
        if self._borders is not None:
            labels[self._borders.within(start, stop) - start - 1] = IGNORED_LABEL
        return tokens, labels

    def num_valid(self, index: int) -> int:
        """Labels of a window that are neither filling nor the first token of a document."""
        start, stop = self._place(index)
        num_ignored = 0 if self._borders is None else len(self._borders.within(start, stop))
        return stop - start - 1 - num_ignored


class SampleRange:
    """The samples ``[start, stop)`` of a source."""

    def __init__(self, source: TokenSource, start: int, stop: int) -> None:
        self._source = source
        self._start = start
        self.num_samples = stop - start
        self.digest = f"{source.digest}[{start}:{stop}]"

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels, each ``(seq_len,)``."""
        return self._source.sample(self._place(index))

    def num_valid(self, index: int) -> int:
        """Labels that are not `IGNORED_LABEL`."""
        return self._source.num_valid(self._place(index))

    def _place(self, index: int) -> int:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return self._start + index


class Mixture:
    """Several sources, whose samples are numbered through in their order.

    Which part of what is trained on each of them gives is decided by `eth_cli.launch.order`.
    """

    def __init__(
        self, sources: Sequence[TokenSource], weights: Sequence[float] | None = None
    ) -> None:
        """Weights are above 0; without them each source gives by the number of its samples."""
        self._sources = tuple(sources)
        self.weights = None if weights is None else tuple(weights)
        self.sizes = tuple(source.num_samples for source in sources)
        """Samples of each source."""
        self._ends = list(accumulate(self.sizes))
        self.num_samples = sum(self.sizes)
        parts = [source.digest for source in sources]
        if weights is not None:
            parts = [f"{w!r} of {part}" for w, part in zip(weights, parts, strict=True)]
        self.digest = " and ".join(parts)

    def sample(self, index: int) -> tuple[Tokens, Tokens]:
        """Input tokens and labels, each ``(seq_len,)``."""
        source, place = self._find(index)
        return source.sample(place)

    def num_valid(self, index: int) -> int:
        """Labels that are not `IGNORED_LABEL`."""
        source, place = self._find(index)
        return source.num_valid(place)

    def _find(self, index: int) -> tuple[TokenSource, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        i = bisect.bisect_right(self._ends, index)
        return self._sources[i], index - (self._ends[i] - self.sizes[i])
