"""What has to move when one plan follows another: parameters with all that is kept beside them.

A device at tensor-parallel width t and place r of its group holds the part ``[r / t, (r + 1) / t)``
of every parameter of its blocks, of a weight tied between blocks once. What it needs under the new
plan and did not hold under the old one has to come from another device that held it, or, where
none of these is left, from a checkpoint. Parts are counted exactly, so that a change of width moves
no more than what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eth_cli.profile.table import Profile, ProfiledModel
from eth_cli.search.placed import PlacedPipeline, PlacedStage

Parts = int
"""What a device holds, as a bit mask: a bit for each part of each unit of parameters."""


class _Unit(NamedTuple):
    """Parameters that stay together: those of a block, or a weight tied between blocks."""

    blocks: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """What moves between two plans, counted by (block, device)."""

    num_kept: int
    """Blocks of which a device of the new plan has all that it needs."""
    num_sent: int
    """Blocks of which a device needs something that another device, still there, holds."""
    num_read: int
    """Blocks of which a device needs something that no device holds any more."""
    sent_bytes: int
    """From device to device: parameters, master weights and optimizer state [bytes]."""
    read_bytes: int
    """From a checkpoint [bytes]."""

    @property
    def num_moved(self) -> int:
        """Blocks that have to come from elsewhere."""
        return self.num_sent + self.num_read

    @property
    def moved_bytes(self) -> int:
        """All bytes that have to come from elsewhere [bytes]."""
        return self.sent_bytes + self.read_bytes


class Holdings:
    """Who holds which parameters under an old plan, to count what a new one has to move.

    Args:
        old: the old plan's pipelines.
        gone: ids of devices whose memory is lost.
        widths: tensor-parallel widths that new plans may have.
    """

    def __init__(
        self,
        profile: Profile,
        old: Sequence[PlacedPipeline],
        *,
        gone: Collection[str] = (),
        widths: Iterable[int] = (),
    ) -> None:
        mine = {len(stage.devices) for pipeline in old for stage in pipeline.stages}
        self._num_parts = math.lcm(*mine, *widths)
        self._units = _units(profile.model)
        self._of_block: dict[int, list[int]] = {}
        """By block the units that it needs."""
        sizes: dict[float, Parts] = {}
        whole = (1 << self._num_parts) - 1
        for u, unit in enumerate(self._units):
            size = unit.parameters * profile.memory.bytes_per_parameter / self._num_parts
            sizes[size] = sizes.get(size, 0) | whole << (u * self._num_parts)
            for block in unit.blocks:
                self._of_block.setdefault(block, []).append(u)
        # Units of the same size are counted at once: a model repeats one block many times.
        self._sizes = tuple(sizes.items())
        self._needs: dict[tuple[int, int, int, int], Parts] = {}
        self._by_device: dict[str, Parts] = {}
        for device, needs in self._devices(old):
            if device not in gone:
                self._by_device[device] = needs
        self._anywhere = 0
        for held in self._by_device.values():
            self._anywhere |= held

    def needs(self, stage: PlacedStage, place: int) -> Parts:
        """What the device at a place of a stage's group holds."""
        key = (stage.start, stage.stop, len(stage.devices), place)
        if key not in self._needs:
            each = self._num_parts // len(stage.devices)
            mask = ((1 << each) - 1) << (each * place)
            needs = 0
            for block in range(stage.start, stage.stop):
                for unit in self._of_block[block]:
                    needs |= mask << (unit * self._num_parts)
            self._needs[key] = needs
        return self._needs[key]

    def lacking_bytes(self, needs: Parts, device: str) -> int:
        """What a device would have to get to hold some parts [bytes]."""
        return self._bytes(needs & ~self._by_device.get(device, 0))

    def moved_bytes(self, new: Sequence[PlacedPipeline]) -> int:
        """What a new plan has to move in all [bytes]."""
        return sum(self.lacking_bytes(needs, device) for device, needs in self._devices(new))

    def moves(self, new: Sequence[PlacedPipeline]) -> Moves:
        """What a new plan has to move."""
        num_kept, num_sent, num_read = 0, 0, 0
        sent_bytes, read_bytes = 0, 0
        for pipeline in new:
            for stage in pipeline.stages:
                for place, device in enumerate(stage.devices):
                    lacking = self.needs(stage, place) & ~self._by_device.get(device.id, 0)
                    sent_bytes += self._bytes(lacking & self._anywhere)
                    read_bytes += self._bytes(lacking & ~self._anywhere)
                    for block in range(stage.start, stage.stop):
                        only = stage._replace(start=block, stop=block + 1)
                        missing = lacking & self.needs(only, place)
                        is_read = bool(missing & ~self._anywhere)
                        num_read += is_read
                        num_sent += bool(missing) and not is_read
                        num_kept += not missing
        return Moves(
            num_kept=num_kept,
            num_sent=num_sent,
            num_read=num_read,
            sent_bytes=sent_bytes,
            read_bytes=read_bytes,
        )

    def _devices(self, pipelines: Sequence[PlacedPipeline]) -> Iterator[tuple[str, Parts]]:
        for pipeline in pipelines:
            for stage in pipeline.stages:
                for place, device in enumerate(stage.devices):
                    yield device.id, self.needs(stage, place)

    def _bytes(self, parts: Parts) -> int:
        return round(sum(size * (parts & mask).bit_count() for size, mask in self._sizes))


def _units(model: ProfiledModel) -> list[_Unit]:
    """Blocks without their tied weights, then the tied weights."""
    units = []
    for block in range(model.num_blocks):
        tied = sum(block in group for group in model.tied_blocks) * model.tied_parameters
        units.append(_Unit((block,), model.parameters[block] - tied))
    return units + [_Unit(tuple(group), model.tied_parameters) for group in model.tied_blocks]
