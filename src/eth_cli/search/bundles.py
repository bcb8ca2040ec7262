"""The bundles that a search for mixes knows, in arrays: which of them do most within a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from eth_cli.search.layouts import Bundle, LaidOut
from eth_cli.search.master import Column
from eth_cli.search.pricing import Resource
from eth_cli.search.stages import CutSet
from eth_cli.search.templates import Floats, Ints, Template


class _Figures(NamedTuple):
    """Of every bundle, as in `LaidOut`."""

    size: Ints
    most: Ints
    takes: Ints
    """A number for what it takes of the resources: the same for the same."""
    chain_s: Floats
    period_s: Floats
    after_s: Floats


class Bundles:
    """Laid-out bundles in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[LaidOut] = []
        self._known: set[Bundle] = set()
        self._cuts: list[frozenset[int]] = []
        self._takes: dict[tuple[tuple[Resource, int], ...], int] = {}
        self._figures: _Figures | None = None
        self._allowed: tuple[CutSet, Sequence[bool]] | None = None

    def __contains__(self, bundle: Bundle) -> bool:
        return bundle in self._known

    def __iter__(self) -> Iterator[LaidOut]:
        return iter(self._all)

    def add(self, laid_out: LaidOut) -> None:
        """Add a bundle that is not there yet."""
        self._all.append(laid_out)
        self._known.add(laid_out.bundle)
        self._cuts.append(cuts_of(laid_out.bundle.template))
        self._takes.setdefault(laid_out.uses, len(self._takes))
        self._figures = self._allowed = None

    def columns(self, time_s: float, cuts: CutSet | None = None) -> list[Column[LaidOut]]:
        """What bundles of some cuts do within a time; of those that take the same, the best."""
        if not self._all:
            return []
        figures = self._figures or self._join()
        # The formula of `LaidOut.micro_batches`.
        spare_s = time_s - figures.after_s - figures.chain_s
        numbers = np.where(
            spare_s < 0,
            0,
            np.minimum(figures.most, 1 + np.floor(np.maximum(spare_s, 0) / figures.period_s)),
        ).astype(np.int64)
        samples = numbers * figures.size
        if cuts is not None:
            samples = np.where(self._may_have(cuts), samples, 0)
        order = np.lexsort((-samples, figures.takes))
        firsts = order[np.flatnonzero(np.diff(figures.takes[order], prepend=-1))]
        pool = self._all
        return [
            Column(pool[i], pool[i].bundle.template.micro_batch_size, pool[i].uses, int(numbers[i]))
            for i in firsts[samples[firsts] > 0].tolist()
        ]

    def _may_have(self, cuts: CutSet) -> Sequence[bool]:
        if self._allowed is None or self._allowed[0] != cuts:
            self._allowed = cuts, [cuts.has(mine) for mine in self._cuts]
        return self._allowed[1]

    def _join(self) -> _Figures:
        pool = self._all
        self._figures = _Figures(
            np.array([p.bundle.template.micro_batch_size for p in pool]),
            np.array([p.most for p in pool]),
            np.array([self._takes[p.uses] for p in pool]),
            np.array([p.chain_s for p in pool]),
            np.array([p.period_s for p in pool]),
            np.array([p.after_s for p in pool]),
        )
        return self._figures


def cuts_of(template: Template) -> frozenset[int]:
    """The blocks that the stages after the first begin at."""
    return frozenset(stage.start for stage in template.stages[1:])
