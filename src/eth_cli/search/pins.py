"""Parts of a plan that are pinned: cuts, devices and shares of single pipelines.

A pinned pipeline keeps its devices, those that the pin names or those of the old plan, and of cuts
and share what the pin names. The rest of it, and all other pipelines, are the search's to choose.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from eth_cli.cluster import Device
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.search.heuristic import recut
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.templates import Option, Problem
from eth_cli.units import format_bytes

OPTION = "--pin"
SYNTAX = "write it like 'p0: cuts 4,9', 'p0: devices a0:0,a0:1+a0:2' or 'p0: micro-batches 12x2'"

_WHOLE = re.compile(r"p(\d{1,6})\s*:\s*(\S.*)")
_SHARE = re.compile(r"(\d{1,9})(?:x(\d{1,9}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """What is pinned of one pipeline; None: not pinned."""

    index: int
    """Index of the pipeline in the old plan; without one only a name."""
    cuts: tuple[int, ...] | None = None
    """First blocks of all stages but the first."""
    devices: tuple[tuple[str, ...], ...] | None = None
    """Ids of each stage's devices."""
    share: tuple[int, int | None] | None = None
    """Micro-batches and their size; None for the size: the old plan's."""

    @property
    def name(self) -> str:
        """As it is written: ``p0``."""
        return f"p{self.index}"


class Pinned(NamedTuple):
    """A pipeline that every plan has to have, on these very devices."""

    pipeline: PlacedPipeline
    cuts: bool = False
    """Whether its cuts are fixed."""
    share: bool = False
    """Whether its micro-batches and their size are fixed."""

    def is_in(self, pipelines: Sequence[PlacedPipeline]) -> bool:
        """Whether a plan has it."""
        mine = self.pipeline
        return any(
            [s.devices for s in p.stages] == [s.devices for s in mine.stages]
            and (not self.cuts or p.cuts == mine.cuts)
            and (not self.share or p[:2] == mine[:2])
            for p in pipelines
        )


# --- From words to pins -----------------------------------------------------------------------


def parse_pins(texts: Iterable[str]) -> tuple[Pin, ...]:
    """Pins by pipeline, from words such as ``p0: cuts 4,9; micro-batches 12``.

    Raises:
        ConfigError: the words are no pin, or pin a part twice.
    """
    found: dict[int, Pin] = {}
    for text in texts:
        match = _WHOLE.fullmatch(text.strip())
        if match is None:
            raise _wrong(text, f"is no pin; {SYNTAX}")
        index = int(match[1])
        for words in match[2].split(";"):
            pin = found.get(index, Pin(index=index))
            part, value = _part(text, words.strip())
            if getattr(pin, part) is not None:
                raise _wrong(text, f"pins the {part} of p{index} a second time")
            found[index] = replace(pin, **{part: value})
    return tuple(found[index] for index in sorted(found))


def _part(text: str, words: str) -> tuple[str, Any]:
    """Name of a field of `Pin` and its value."""
    sort, _, value = words.partition(" ")
    value = value.replace(" ", "")
    if sort == "cuts":
        if value == "none":
            return "cuts", ()
        numbers = value.split(",")
        if not all(n.isascii() and n.isdigit() and len(n) < 10 for n in numbers):
            raise _wrong(text, "cuts are the first blocks of stages, like 4,9, or none")
        return "cuts", tuple(map(int, numbers))
    if sort == "devices":
        groups = tuple(tuple(group.split("+")) for group in value.split(","))
        if not all(all(group) for group in groups):
            raise _wrong(text, "devices are one a stage, like a0:0,a0:1, or a group, a0:0+a0:1")
        return "devices", groups
    if sort == "micro-batches":
        match = _SHARE.fullmatch(value)
        if match is None or int(match[1]) < 1 or match[2] == "0":
            raise _wrong(text, "a share is a number of micro-batches, like 12, or 12x2 with size")
        return "share", (int(match[1]), None if match[2] is None else int(match[2]))
    names = ", ".join("micro-batches" if f.name == "share" else f.name for f in fields(Pin)[1:])
    raise _wrong(text, f"{sort[:40]!r} is not one of {names}; {SYNTAX}")


def _wrong(what: str, why: str) -> ConfigError:
    return ConfigError.single(OPTION, "", f"{what[:80]!r}: {why}")


# --- From pins to pipelines -------------------------------------------------------------------


def resolve_pins(
    pins: Sequence[Pin], problem: Problem, old: Sequence[PlacedPipeline] | None
) -> tuple[Pinned, ...]:
    """The pinned pipelines.

    Args:
        old: the old plan's pipelines; None: there is none, and every pin has to name devices.

    Raises:
        ConfigError: a pin names what does not exist, may not be used, or does not go together.
        InfeasibleError: what is pinned does not fit in memory.
    """
    found = tuple(_Resolver(pin, problem, old).pinned() for pin in pins)
    uses = Counter(d.id for p in found for s in p.pipeline.stages for d in s.devices)
    for device, number in uses.items():
        if number > 1:
            raise _wrong(device, f"is in the pinned pipelines {number} times; a device is in one")
    samples = sum(p.pipeline[0] * p.pipeline[1] for p in found if p.share)
    total = problem.global_batch_size
    if samples > total:
        raise ConfigError.single(
            OPTION, "", f"pins shares of {samples} samples, more than the batch of {total}"
        )
    return found


class _Resolver:
    """One pin on its way to a pipeline."""

    def __init__(self, pin: Pin, problem: Problem, old: Sequence[PlacedPipeline] | None) -> None:
        self.pin = pin
        self.problem = problem
        self.profile = problem.model.profile
        if old is not None and pin.index >= len(old):
            known = "p0 only" if len(old) == 1 else f"p0 to p{len(old) - 1}"
            raise _wrong(pin.name, f"is no pipeline of the plan, which has {known}")
        if old is None and pin.devices is None:
            raise _wrong(pin.name, "has no devices; name them, or give a plan with --from")
        self.old = None if old is None else old[pin.index]

    def pinned(self) -> Pinned:
        groups = self._groups()
        options = [self._option(s, group) for s, group in enumerate(groups)]
        size = self._size(options)
        cuts = self._cuts(len(groups))
        if cuts is None:
            template = recut(self.problem, options, size)
            if template is None:
                raise self._infeasible(f"no cut of it fits in memory at micro-batch size {size}")
            cuts = [stage.start for stage in template.stages[1:]]
        edges = [0, *cuts, self.problem.num_blocks]
        stages = tuple(
            PlacedStage(start, stop, group, self._recomputes(option, start, stop, size))
            for start, stop, group, option in zip(
                edges[:-1], edges[1:], groups, options, strict=True
            )
        )
        micro_batches = 1 if self.pin.share is None else self.pin.share[0]
        pipeline = PlacedPipeline(size, micro_batches, stages)
        self._check_memory(pipeline)
        return Pinned(pipeline, self.pin.cuts is not None, self.pin.share is not None)

    def _groups(self) -> list[tuple[Device, ...]]:
        if self.pin.devices is None:
            assert self.old is not None
            groups = [stage.devices for stage in self.old.stages]
        else:
            groups = [tuple(map(self._device, group)) for group in self.pin.devices]
        for group in groups:
            for device in group:
                if device.id in self.problem.excluded:
                    raise _wrong(
                        self.pin.name, f"{device.id} is lost or excluded; pin other devices"
                    )
            if len({(d.node, d.type) for d in group}) > 1:
                names = "+".join(d.id for d in group)
                raise _wrong(self.pin.name, f"{names} is no group of one type in one node")
        if len(groups) > self.problem.num_blocks:
            raise _wrong(
                self.pin.name,
                f"has {len(groups)} stages, and the model only {self.problem.num_blocks} blocks",
            )
        return groups

    def _device(self, name: str) -> Device:
        cluster = self.problem.model.cluster
        if name not in cluster.devices:
            example = next(iter(cluster.devices))
            raise _wrong(
                self.pin.name,
                f"{name[:60]!r} is no device of cluster {cluster.name}; write it like {example}",
            )
        return cluster.devices[name]

    def _option(self, s: int, group: tuple[Device, ...]) -> Option:
        """What a stage is made of; it recomputes as the old plan's did."""
        kinds = [kind.device_type for kind in self.problem.kinds]
        device_type, width = group[0].type, len(group)
        if device_type not in kinds:
            raise _wrong(self.pin.name, f"{group[0].id} is a {device_type}, which no plan can use")
        recompute = (
            self.old is not None and len(self.old.stages) > s and self.old.stages[s].recompute
        )
        option = Option(kinds.index(device_type), width, recompute)
        for found in (option, option._replace(recompute=False)):
            if found in self.problem.options:
                return found
        raise _wrong(
            self.pin.name,
            f"the search has no {device_type} at tensor-parallel width {width}",
        )

    def _size(self, options: Sequence[Option]) -> int:
        """Samples in a micro-batch: pinned, or the old plan's, or the one with the best pace."""
        sizes = self.problem.micro_batch_sizes
        asked = None if self.pin.share is None else self.pin.share[1]
        if asked is None and self.old is not None:
            asked = self.old.micro_batch_size
        if asked is not None:
            if asked not in sizes:
                listed = ", ".join(map(str, sizes))
                raise _wrong(
                    self.pin.name,
                    f"micro-batch size {asked} is not one of those searched: {listed}",
                )
            return asked
        paces = {}
        for b in sizes:
            template = recut(self.problem, options, b)
            if template is not None:
                works = [
                    float(self.problem.costs(s.option, b).work_s[s.start, s.stop])
                    for s in template.stages
                ]
                paces[b] = max(works) / b
        return min(paces, key=lambda b: paces[b]) if paces else sizes[0]

    def _cuts(self, num_stages: int) -> list[int] | None:
        """The pinned cuts, or the old plan's where its devices stay; None: to be chosen."""
        if self.pin.cuts is None:
            if self.old is None or self.pin.devices is not None:
                return None
            return [stage.start for stage in self.old.stages[1:]]
        cuts = list(self.pin.cuts)
        if len(cuts) != num_stages - 1:
            raise _wrong(
                self.pin.name,
                f"cuts {','.join(map(str, cuts))} make {len(cuts) + 1} stages, but it has "
                f"devices for {num_stages}; pin as many cuts as fit, or other devices",
            )
        last = self.problem.num_blocks - 1
        if cuts != sorted(set(cuts)) or (cuts and not 1 <= cuts[0] <= cuts[-1] <= last):
            raise _wrong(
                self.pin.name,
                f"cuts {','.join(map(str, cuts))} must rise, from 1 to {last} at most",
            )
        return cuts

    def _recomputes(self, option: Option, start: int, stop: int, size: int) -> bool:
        """Whether a stage recomputes: as it did, or where it has no room otherwise."""
        again = option._replace(recompute=True)
        has_room = self.problem.costs(option, size).in_flight[start, stop] > 0
        return option.recompute or (not has_room and again in self.problem.options)

    def _check_memory(self, pipeline: PlacedPipeline) -> None:
        """Raise InfeasibleError where a stage does not fit."""
        model = self.problem.model
        for s, stage in enumerate(pipeline.stages):
            needed = model.memory(pipeline, s).total_bytes
            capacity = model.cluster.device_types[stage.devices[0].type].memory_bytes
            if needed > capacity:
                raise self._infeasible(
                    f"stage {s} (blocks {stage.start} to {stage.stop - 1}) needs "
                    f"{format_bytes(needed)} on {stage.devices[0].id}, which has "
                    f"{format_bytes(capacity)}: {needed - capacity} bytes are lacking"
                )

    def _infeasible(self, why: str) -> InfeasibleError:
        binding = f"pinned {self.pin.name}: {why}"
        return InfeasibleError(
            f"no plan exists: {binding}", binding=binding, suggestion="pin less of it"
        )
