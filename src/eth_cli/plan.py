"""The plan: which pipelines, stages, devices and shares. Owns plan.json.

All legality that a plan can be checked for by itself is checked on construction, so a hand-edited
file meets the same rules as a solved one; `check_cluster` and `check_num_blocks` add the rest.
The planner and the runtime ask the plan the same questions (`ranks`, `block_owners`, `segments`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, Fault
from eth_cli.faults import shown
from eth_cli.model import ModelSpec
from eth_cli.serde import FieldError, Location, Record

Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(ge=0)]

MAX_BLOCKS = 100_000
MAX_STAGES = 100_000
MAX_ACTIONS = 2_000_000
"""Larger plans are refused before anything is allocated for them. Actions are the forwards of all
stages: a schedule lists every micro-batch of every stage."""


class Stage(Record):
    """Contiguous blocks ``[start, stop)`` on one tensor-parallel group of devices of one node."""

    blocks: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1, le=MAX_BLOCKS)]]
    devices: Annotated[tuple[str, ...], Field(min_length=1)]
    """Device ids, ``node:local_index``; several are the stage's tensor-parallel group."""
    recompute: bool = False
    """Whether activations are recomputed in the backward pass."""

    @property
    def num_blocks(self) -> int:
        """How many blocks the stage holds."""
        return self.blocks[1] - self.blocks[0]

    @property
    def tensor_parallel(self) -> int:
        """Devices that share each block."""
        return len(self.devices)


class Pipeline(Record):
    """An ordered list of stages that covers every block once, and its share of the batch."""

    micro_batches: Count
    """Micro-batches of each global batch that this pipeline gets."""
    micro_batch_size: Count
    """Samples in one micro-batch."""
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=MAX_STAGES)]

    @property
    def num_samples(self) -> int:
        """Samples of each global batch that this pipeline gets."""
        return self.micro_batches * self.micro_batch_size


class DeviceMemory(Record):
    """Predicted peak memory of one device."""

    device: str
    bytes: Annotated[int, Field(ge=0)]
    capacity_bytes: Annotated[int, Field(ge=0)]


class Prediction(Record):
    """What the simulator says of the plan."""

    step_time_s: Seconds
    tokens_per_s: Annotated[float, Field(ge=0)]
    terms: dict[str, float] = {}
    """Named parts of the step time that sum to it [s]."""
    memory: tuple[DeviceMemory, ...] = ()


class SolverInfo(Record):
    """How the plan was found and how good it provably is."""

    status: Literal["optimal", "feasible"]
    """optimal: proved within rounding; feasible: the best found, see gap."""
    bound_s: Seconds
    """No plan of the searched space has a smaller predicted step time [s]."""
    gap: Annotated[float, Field(ge=0)]
    """step_time_s / bound_s - 1."""
    wall_s: Seconds
    """Search time, rounded up to whole seconds. The one figure that the inputs do not determine;
    rounded so, a plan that is searched again usually has the same bytes."""
    pruned: dict[str, int] = {}
    """Candidates left out, by rule."""


class UnusedDevice(Record):
    """A device that the plan leaves out, and why."""

    device: str
    reason: str


class Provenance(Record):
    """Where the plan comes from."""

    digests: dict[str, str] = {}
    """Digests of the cluster and the profile that it was planned for."""
    options: dict[str, Any] = {}
    version: str


class PacedBlock(Record):
    """Times that an emulated device must take for one block."""

    device: str
    """Device type."""
    block: str
    """Block kind."""
    tensor_parallel: Count
    micro_batch_size: Count
    forward_s: Seconds
    backward_s: Seconds


class PacedOptimizer(Record):
    """Time that an emulated device must take to update its parameters."""

    device: str
    """Device type."""
    optimizer_s_per_parameter: Seconds


class Pacing(Record):
    """The profile's times of emulated devices, for `eth run` to keep to."""

    blocks: tuple[PacedBlock, ...] = ()
    optimizers: tuple[PacedOptimizer, ...] = ()


class Segment(NamedTuple):
    """A maximal run of blocks ``[start, stop)`` with the same owners in every pipeline."""

    start: int
    stop: int
    owners: tuple[int, ...]
    """Ranks that hold these blocks, ascending."""


class RankPlace(NamedTuple):
    """Where one rank stands in the plan."""

    rank: int
    device: str
    pipeline: int
    stage: int


class Plan(Record):
    """A complete, legal plan."""

    schema_version: Literal[1]
    model: Annotated[str, Field(min_length=1)]
    """Name of the model; the specification itself is in model_spec."""
    seq_len: Count
    dtype: Literal["bf16", "fp16", "fp32"]
    global_batch_size: Count
    """Samples in one optimizer step."""
    pipelines: Annotated[tuple[Pipeline, ...], Field(min_length=1)]
    sharded_optimizer: bool = False
    """Whether optimizer state is split over the owners of each segment."""
    predicted: Prediction | None = None
    solver: SolverInfo | None = None
    unused_devices: tuple[UnusedDevice, ...] = ()
    provenance: Provenance | None = None
    cluster: Cluster | None = None
    """The cluster, so that the plan can be run without its YAML."""
    model_spec: ModelSpec | None = None
    """The model, so that the plan can be run without naming it again."""
    pacing: Pacing | None = None
    """Times that emulated devices keep to."""

    @model_validator(mode="after")
    def _check(self) -> Plan:
        faults = [*self._block_faults(), *self._device_faults(), *self._batch_faults()]
        faults += self._size_faults()
        if self.cluster is not None and not faults:
            faults += list(self._cluster_faults(self.cluster))
        if self.model_spec is not None and not faults:
            faults += list(self._model_faults(self.model_spec.num_blocks, "model_spec"))
        if faults:
            raise FieldError(faults)
        return self

    def _block_faults(self) -> Iterable[tuple[Location, str]]:
        ends = [p.stages[-1].blocks[1] for p in self.pipelines]
        for i, pipeline in enumerate(self.pipelines):
            expected: int | None = 0
            for s, stage in enumerate(pipeline.stages):
                at: Location = ("pipelines", i, "stages", s, "blocks")
                start, stop = stage.blocks
                if stop <= start:
                    yield at, f"[{start}, {stop}] holds no block; stop must be above start"
                    expected = None  # Where the next stage should start is anybody's guess.
                    continue
                if expected is not None and start > expected:
                    yield (
                        at,
                        f"starts at block {start}: blocks {expected} to {start - 1} are missing",
                    )
                elif expected is not None and start < expected:
                    yield at, f"starts at block {start}, but block {start} is already placed"
                expected = stop
            if ends[i] != max(ends):
                yield (
                    ("pipelines", i, "stages"),
                    f"end at block {ends[i]}, but another pipeline has {max(ends)} blocks",
                )

    def _device_faults(self) -> Iterable[tuple[Location, str]]:
        used: dict[str, str] = {}
        for i, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                at: Location = ("pipelines", i, "stages", s, "devices")
                nodes = set()
                for device in stage.devices:
                    node, colon, index = device.rpartition(":")
                    if not (node and colon and index.isascii() and index.isdigit()):
                        yield at, f"{shown(device)} is not a device id; write it like a0:2"
                        continue
                    nodes.add(node)
                    here = f"pipelines[{i}].stages[{s}]"
                    if device in used:
                        place = "it also stands in " + used[device]
                        yield at, f"{shown(device)} is used twice; {place}"
                    used.setdefault(device, here)
                if len(nodes) > 1:
                    yield (
                        at,
                        f"spread over nodes {', '.join(sorted(nodes))}; a stage needs one node",
                    )

    def _batch_faults(self) -> Iterable[tuple[Location, str]]:
        total = sum(p.num_samples for p in self.pipelines)
        if total != self.global_batch_size:
            parts = " + ".join(f"{p.micro_batches} x {p.micro_batch_size}" for p in self.pipelines)
            yield (
                ("pipelines",),
                f"shares {parts} = {total} samples, but global_batch_size is "
                f"{self.global_batch_size}; change one of them",
            )

    def _size_faults(self) -> Iterable[tuple[Location, str]]:
        for i, pipeline in enumerate(self.pipelines):
            num_actions = pipeline.micro_batches * len(pipeline.stages)
            if num_actions > MAX_ACTIONS:
                yield (
                    ("pipelines", i, "micro_batches"),
                    f"is {pipeline.micro_batches}; with {len(pipeline.stages)} stages at most "
                    f"{MAX_ACTIONS // len(pipeline.stages)} are run; use larger micro-batches",
                )

    def _cluster_faults(self, cluster: Cluster) -> Iterable[tuple[Location, str]]:
        for i, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                at: Location = ("pipelines", i, "stages", s, "devices")
                unknown = [d for d in stage.devices if d not in cluster.devices]
                for device in unknown:
                    node = cluster.nodes_by_name.get(device.rpartition(":")[0])
                    have = (
                        f"node {node.name} has {node.num_devices} devices, counted from 0"
                        if node is not None
                        else f"nodes are {', '.join(sorted(cluster.nodes_by_name)[:8])}"
                    )
                    yield at, f"{shown(device)} is not in cluster {cluster.name}: {have}"
                if unknown:
                    continue
                types = sorted({cluster.devices[d].type for d in stage.devices})
                if len(types) > 1:
                    yield at, f"mix {' and '.join(types)}; a tensor-parallel group needs one type"

    def _model_faults(self, num_blocks: int, source: str) -> Iterable[tuple[Location, str]]:
        if self.num_blocks != num_blocks:
            yield (
                ("pipelines", 0, "stages"),
                f"cover {self.num_blocks} blocks, but {source} has {num_blocks}",
            )

    # --- Questions that planner and runtime ask -----------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks of the model, as the pipelines cover them."""
        return self.pipelines[0].stages[-1].blocks[1]

    @cached_property
    def ranks(self) -> tuple[RankPlace, ...]:
        """Every rank's place. Ranks follow nodes in order of first use, then local index.

        torchrun numbers ranks node by node; so a rank's device follows from the plan alone.
        """
        places: list[tuple[str, int, str, int, int]] = []
        node_order: dict[str, int] = {}
        for i, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                for device in stage.devices:
                    node, _, index = device.rpartition(":")
                    node_order.setdefault(node, len(node_order))
                    places.append((node, int(index), device, i, s))
        places.sort(key=lambda place: (node_order[place[0]], place[1]))
        return tuple(
            RankPlace(rank, device, i, s) for rank, (_, _, device, i, s) in enumerate(places)
        )

    @cached_property
    def _rank_of_device(self) -> dict[str, int]:
        return {place.device: place.rank for place in self.ranks}

    def ranks_of(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """The ranks of a stage, in the order of its tensor-parallel group."""
        devices = self.pipelines[pipeline].stages[stage].devices
        return tuple(self._rank_of_device[device] for device in devices)

    def block_owners(self, block: int) -> tuple[int, ...]:
        """Ranks that hold a block (whole or a tensor-parallel part of it), ascending."""
        return tuple(
            sorted(
                rank
                for i, pipeline in enumerate(self.pipelines)
                for s, stage in enumerate(pipeline.stages)
                if stage.blocks[0] <= block < stage.blocks[1]
                for rank in self.ranks_of(i, s)
            )
        )

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, ascending: blocks cut at the union of all pipelines' cuts."""
        cuts = sorted({b for p in self.pipelines for s in p.stages for b in s.blocks})
        return tuple(
            Segment(start, stop, self.block_owners(start))
            for start, stop in itertools.pairwise(cuts)
        )

    def digest(self) -> str:
        """Digest of what is executed; not of predictions, solver data or provenance."""
        data = serde.to_data(self)
        for key in ("predicted", "solver", "unused_devices", "provenance"):
            data.pop(key, None)
        return serde.digest(data)

    def check_cluster(self, cluster: Cluster, *, file: str) -> None:
        """Raise ConfigError unless every device exists and every stage has one device type."""
        _raise(self._cluster_faults(cluster), file)

    def check_num_blocks(self, num_blocks: int, *, file: str, source: str) -> None:
        """Raise ConfigError unless the pipelines cover exactly this many blocks."""
        _raise(self._model_faults(num_blocks, source), file)


def _raise(faults: Iterable[tuple[Location, str]], file: str) -> None:
    found = [Fault(file=file, field=serde.format_location(at), message=m) for at, m in faults]
    if found:
        raise ConfigError(found)


def read_plan(path: str | Path) -> Plan:
    """A plan.json file. Raises ConfigError with every fault at once."""
    return serde.read_json(path, Plan)


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write plan.json atomically; the same plan gives the same bytes."""
    serde.write_json(path, plan)
