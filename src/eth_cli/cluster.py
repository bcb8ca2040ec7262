"""Devices, nodes and links of a cluster. Owns the cluster YAML format.

`ClusterFile` is the text that people write, with units; `Cluster` is the same in SI units,
with ``count: 2`` expanded to nodes and catalogue figures filled in. A plan carries the latter
along, so that it can be run without the YAML. GPU figures live in `eth_cli.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from eth_cli import catalogue, serde, units
from eth_cli.faults import did_you_mean
from eth_cli.serde import FieldError, Record

DTYPES = ("bf16", "fp16", "fp32")
"""The number formats that a plan may train in."""

BF16_CAPABILITY = 8.0
"""The least CUDA compute capability with bf16 arithmetic (Ampere)."""

MAX_DEVICES = 1_000_000
"""A larger cluster file is a typing error."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
"""A node or type name: what is safe in a device id, a file name and a host list."""


class Link(Record):
    """A connection between two devices, one direction."""

    latency_s: Annotated[float, Field(ge=0)]
    """Time of an empty message [s]."""
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    """Rate of a long message [bytes/s]."""


class DeviceType(Record):
    """Everything known of one type of device."""

    memory_bytes: Annotated[int, Field(gt=0)]
    """Memory of one device [bytes]."""
    peak_flops: dict[str, float] = {}
    """Dense peak by dtype [FLOP/s]; a dtype that is absent is not supported by the hardware."""
    memory_bandwidth_bytes_per_s: float | None = None
    """Peak rate of the device's own memory [bytes/s]."""
    compute_capability: float | None = None
    """CUDA compute capability, such as 8.0."""
    emulated: bool = False
    """Whether a paced CPU process plays this device."""

    def lacks_dtype(self, dtype: str) -> str | None:
        """Why the hardware cannot train in a dtype; None where it can or no figure tells."""
        if self.peak_flops and dtype not in self.peak_flops:
            return f"has no {dtype} peak (it has: {', '.join(sorted(self.peak_flops))})"
        capability = self.compute_capability
        if dtype == "bf16" and capability is not None and capability < BF16_CAPABILITY:
            return (
                f"is too old: compute capability {capability} has no bf16 ({BF16_CAPABILITY} has)"
            )
        return None


class DeviceGroup(Record):
    """Some devices of one type in a node; they take consecutive local indices."""

    type: Name
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1


class Node(Record):
    """A machine."""

    name: Name
    host: str | None = None
    """Address to launch on; the node's name where absent."""
    devices: Annotated[tuple[DeviceGroup, ...], Field(min_length=1)]

    @property
    def num_devices(self) -> int:
        """How many devices the node has."""
        return sum(group.count for group in self.devices)


class Device(NamedTuple):
    """One device of one node; its id is ``node:local_index``."""

    node: str
    local_index: int
    type: str

    @property
    def id(self) -> str:
        """The device's name in plans, such as ``a0:3``."""
        return f"{self.node}:{self.local_index}"


class LinkOverride(Record):
    """A link that differs: between two nodes, or inside one."""

    between: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    link: Link


class Network(Record):
    """Links of a cluster, as its file gives them; a profile may hold measured ones."""

    intra_node: Link | None = None
    """Between two devices of a node; absent: the slower of the two types' catalogue links."""
    inter_node: Link | None = None
    """Between two nodes, per node and direction: the NIC is shared by the node's devices."""
    overrides: tuple[LinkOverride, ...] = ()


class Cluster(Record):
    """A cluster in SI units. Device types hold every type that a node uses."""

    name: str
    device_types: dict[str, DeviceType]
    nodes: Annotated[tuple[Node, ...], Field(min_length=1)]
    network: Network = Network()

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        faults: list[tuple[serde.Location, str]] = []
        names: set[str] = set()
        for i, node in enumerate(self.nodes):
            if node.name in names:
                faults.append((("nodes", i, "name"), f"{node.name!r} names two nodes"))
            names.add(node.name)
            faults += [
                (
                    ("nodes", i, "devices", j, "type"),
                    f"unknown type {group.type!r}; types are {_some(sorted(self.device_types))}",
                )
                for j, group in enumerate(node.devices)
                if group.type not in self.device_types
            ]
        if len(self.nodes) > 1 and self.network.inter_node is None:
            faults.append(
                (
                    ("network", "inter_node"),
                    f"is missing; {len(self.nodes)} nodes need one, such as "
                    "{bandwidth: 25Gbps, latency: 30us}",
                )
            )
        if self.network.intra_node is None:
            unknown = sorted(
                {
                    group.type
                    for node in self.nodes
                    for group in node.devices
                    if node.num_devices > 1 and group.type not in catalogue.GPU_TYPES
                }
            )
            if unknown:
                faults.append(
                    (
                        ("network", "intra_node"),
                        f"is missing, and the catalogue knows no link of {', '.join(unknown)}; "
                        "write it like {bandwidth: 300GB/s, latency: 5us}",
                    )
                )
        for k, override in enumerate(self.network.overrides):
            faults += [
                (
                    ("network", "overrides", k, "between"),
                    f"unknown node {end!r}; nodes are {_some(sorted(names))}",
                )
                for end in override.between
                if end not in names
            ]
        if faults:
            raise FieldError(faults)
        return self

    @cached_property
    def devices(self) -> dict[str, Device]:
        """Every device by id, in node order."""
        return {device.id: device for device in self._iterate_devices()}

    def _iterate_devices(self) -> Iterator[Device]:
        for node in self.nodes:
            index = 0
            for group in node.devices:
                for _ in range(group.count):
                    yield Device(node.name, index, group.type)
                    index += 1

    @cached_property
    def nodes_by_name(self) -> dict[str, Node]:
        """Every node by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def _overrides(self) -> dict[frozenset[str], Link]:
        return {frozenset(o.between): o.link for o in self.network.overrides}

    def type_of(self, device_id: str) -> DeviceType:
        """The type of a device. Raises KeyError for an id that the cluster lacks."""
        return self.device_types[self.devices[device_id].type]

    def link(self, source: Device, target: Device) -> Link:
        """The link between two devices of this cluster, as its file or the catalogue gives it."""
        override = self._overrides.get(frozenset((source.node, target.node)))
        if override is not None:
            return override
        if source.node != target.node:
            assert self.network.inter_node is not None  # checked on construction
            return self.network.inter_node
        if self.network.intra_node is not None:
            return self.network.intra_node
        ends = [catalogue.GPU_TYPES[t].intra_node_bytes_per_s for t in (source.type, target.type)]
        return Link(latency_s=catalogue.INTRA_NODE_LATENCY_S, bandwidth_bytes_per_s=min(ends))

    def digest(self) -> str:
        """Digest of everything that a plan depends on."""
        return serde.digest(serde.to_data(self))


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


# --- The YAML format: the same, with units in its values ------------------------------------------

_Bytes = Annotated[int, BeforeValidator(units.parse_bytes), Field(gt=0)]
_Rate = Annotated[float, BeforeValidator(units.parse_bytes_per_s), Field(gt=0)]
_Flops = Annotated[float, BeforeValidator(units.parse_flops), Field(gt=0)]
_Seconds = Annotated[float, BeforeValidator(units.parse_seconds), Field(ge=0)]


class LinkEntry(Record):
    """``{bandwidth: 25Gbps, latency: 30us}``."""

    bandwidth: _Rate
    latency: _Seconds = 0.0

    def resolve(self) -> Link:
        """The link in SI units."""
        return Link(latency_s=self.latency, bandwidth_bytes_per_s=self.bandwidth)


class OverrideEntry(LinkEntry):
    """A link entry with the nodes that it holds for."""

    between: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]


class NetworkEntry(Record):
    """The ``network`` section."""

    intra_node: LinkEntry | None = None
    inter_node: LinkEntry | None = None
    overrides: tuple[OverrideEntry, ...] = ()


class DeviceTypeEntry(Record):
    """One entry of ``device_types``; what is absent is taken from the catalogue."""

    memory: _Bytes | None = None
    peak: dict[str, _Flops] | None = None
    memory_bandwidth: _Rate | None = None
    compute_capability: Annotated[float, Field(gt=0)] | None = None
    emulated: bool = False


class NodeEntry(Record):
    """One entry of ``nodes``; ``count: 2`` makes ``a0`` and ``a1`` of ``a``."""

    name: Name
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] | None = None
    host: str | None = None
    hosts: tuple[str, ...] | None = None
    """With ``count``: one address for each node."""
    devices: Annotated[tuple[DeviceGroup, ...], Field(min_length=1)]

    def node_names(self) -> tuple[str, ...]:
        """The names of the nodes that this entry makes."""
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}{i}" for i in range(self.count))


class ClusterFile(Record):
    """A cluster YAML file as people write it."""

    name: Name
    device_types: dict[Name, DeviceTypeEntry] = {}
    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1)]
    network: NetworkEntry = NetworkEntry()

    @model_validator(mode="after")
    def _check(self) -> ClusterFile:
        faults: list[tuple[serde.Location, str]] = []
        num_devices = 0
        for i, node in enumerate(self.nodes):
            num_nodes = node.count or 1
            num_devices += num_nodes * sum(group.count for group in node.devices)
            if node.hosts is not None and len(node.hosts) != num_nodes:
                faults.append(
                    (
                        ("nodes", i, "hosts"),
                        f"names {len(node.hosts)} hosts for {num_nodes} nodes; give one for each",
                    )
                )
            if node.host is not None and (node.hosts is not None or num_nodes > 1):
                faults.append(
                    (("nodes", i, "host"), f"is for one node; give {num_nodes} under hosts")
                )
        if num_devices > MAX_DEVICES:  # Too many to look at one by one.
            raise FieldError(
                [(("nodes",), f"hold {num_devices} devices; at most {MAX_DEVICES} are read")]
            )
        faults += [*self._name_faults(), *self._type_faults(), *self._override_faults()]
        for name, entry in self.device_types.items():
            faults += [
                (
                    ("device_types", name, "peak", dtype),
                    f"unknown dtype; use one of {', '.join(DTYPES)}",
                )
                for dtype in entry.peak or {}
                if dtype not in DTYPES
            ]
            if entry.memory is None and name not in catalogue.GPU_TYPES:
                faults.append(
                    (
                        ("device_types", name, "memory"),
                        f"is missing, and {name!r} is not in the catalogue; write it like 40GiB",
                    )
                )
        if faults:
            raise FieldError(faults)
        return self

    def _name_faults(self) -> Iterator[tuple[serde.Location, str]]:
        seen: dict[str, int] = {}
        for i, entry in enumerate(self.nodes):
            double = [name for name in entry.node_names() if name in seen]
            if double:
                yield (
                    ("nodes", i, "name"),
                    f"{double[0]!r} names two nodes; nodes[{seen[double[0]]}] has it too",
                )
            seen |= dict.fromkeys(entry.node_names(), i)

    def _type_faults(self) -> Iterator[tuple[serde.Location, str]]:
        known = {*self.device_types, *catalogue.GPU_TYPES}
        for i, entry in enumerate(self.nodes):
            for j, group in enumerate(entry.devices):
                if group.type not in known:
                    yield (
                        ("nodes", i, "devices", j, "type"),
                        f"unknown type {group.type!r}{did_you_mean(group.type, known)}; add it "
                        f"under device_types, or use one of the catalogue's {len(known)} "
                        f"({_some(sorted(known))})",
                    )

    def _override_faults(self) -> Iterator[tuple[serde.Location, str]]:
        names = {name for e in self.nodes for name in (e.name, *e.node_names())}
        for k, override in enumerate(self.network.overrides):
            for end in override.between:
                if end not in names:
                    yield (
                        ("network", "overrides", k, "between"),
                        f"unknown node {end!r}{did_you_mean(end, names)}; nodes are "
                        f"{_some(sorted(names))}",
                    )

    def resolve(self) -> Cluster:
        """The cluster in SI units, nodes expanded, catalogue figures filled in."""
        nodes = []
        for entry in self.nodes:
            names = entry.node_names()
            hosts = entry.hosts or (entry.host,) * len(names)
            nodes += [
                Node(name=name, host=host, devices=entry.devices)
                for name, host in zip(names, hosts, strict=True)
            ]
        used = {group.type for entry in self.nodes for group in entry.devices}
        types = {
            name: _resolve_type(name, self.device_types.get(name, DeviceTypeEntry()))
            for name in sorted(used | set(self.device_types))
            if name in self.device_types or name in catalogue.GPU_TYPES
        }
        return Cluster(
            name=self.name, device_types=types, nodes=tuple(nodes), network=self._network()
        )

    def _network(self) -> Network:
        members = {e.name: e.node_names() for e in self.nodes}
        overrides = []
        for entry in self.network.overrides:
            # The name of an entry with a count stands for all of its nodes.
            ends = [members.get(end, (end,)) for end in entry.between]
            pairs = [(a, b) for a in ends[0] for b in ends[-1] if len(ends) == 1 or a != b]
            if len(ends) == 1:
                pairs = [(a, a) for a in ends[0]]
            overrides += [
                LinkOverride(between=(a,) if a == b else (a, b), link=entry.resolve())
                for a, b in pairs
            ]
        intra, inter = self.network.intra_node, self.network.inter_node
        return Network(
            intra_node=None if intra is None else intra.resolve(),
            inter_node=None if inter is None else inter.resolve(),
            overrides=tuple(overrides),
        )


def _resolve_type(name: str, entry: DeviceTypeEntry) -> DeviceType:
    known = catalogue.GPU_TYPES.get(name)
    figures: dict[str, Any] = {
        "memory_bytes": entry.memory,
        "peak_flops": entry.peak,
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth,
        "compute_capability": entry.compute_capability,
    }
    for field, value in figures.items():
        if value is None and known is not None:
            figures[field] = getattr(known, field)
    figures["peak_flops"] = dict(figures["peak_flops"] or {})
    return DeviceType(emulated=entry.emulated, **figures)


def read_cluster(path: str | Path) -> Cluster:
    """A cluster YAML file in SI units.

    Raises:
        ConfigError: with every fault, each with its field and the valid choices.
    """
    entry = serde.read_yaml(path, ClusterFile)
    try:
        return entry.resolve()
    except ValueError as error:
        raise serde.config_error(error, Cluster, str(path)) from None
