"""Devices, nodes and links of a cluster in SI units.

A plan carries a `Cluster` along, so that it can be run without the YAML that people wrote; that
text is read in `eth_cli.cluster_file`. GPU figures live in `eth_cli.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from eth_cli import catalogue, serde
from eth_cli.faults import some_of
from eth_cli.serde import FieldError, Record

BF16_CAPABILITY = 8.0
"""The least CUDA compute capability with bf16 arithmetic (Ampere)."""

MAX_DEVICES = 1_000_000
"""A larger cluster file is a typing error."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
"""A node or type name: what is safe in a device id, a file name and a host list."""


class Link(Record):
    """A connection between two devices, one direction."""

    latency_s: Annotated[float, Field(ge=0, le=1e6)]
    """Time of an empty message [s]."""
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1)]
    """Rate of a long message [bytes/s]."""


class DeviceType(Record):
    """Everything known of one type of device."""

    memory_bytes: Annotated[int, Field(gt=0, le=10**18)]
    """Memory of one device [bytes]."""
    peak_flops: dict[str, float] = {}
    """Dense peak by dtype [FLOP/s]; a dtype that is absent is not supported by the hardware."""
    memory_bandwidth_bytes_per_s: float | None = None
    """Peak rate of the device's own memory [bytes/s]."""
    compute_capability: float | None = None
    """CUDA compute capability, such as 8.0."""
    emulated: bool = False
    """Whether a paced CPU process plays this device."""
    price_per_hour: Annotated[float | None, Field(gt=0, le=1e9, exclude=True)] = None
    """Price of one device for an hour [$]. Not written anywhere and in no digest: a plan stays the
    same plan when prices change."""

    def lacks_dtype(self, dtype: str) -> str | None:
        """Why the hardware cannot train in a dtype; None where it can or no figure tells.

        A peak that is absent tells nothing: a profile with times in this dtype knows better.
        """
        capability = self.compute_capability
        if dtype == "bf16" and capability is not None and capability < BF16_CAPABILITY:
            return (
                f"is too old: compute capability {capability} has no bf16 ({BF16_CAPABILITY} has)"
            )
        return None


def catalogue_type(name: str) -> DeviceType | None:
    """A type of the built-in catalogue; None: it has none of this name."""
    known = catalogue.GPU_TYPES.get(name)
    if known is None:
        return None
    return DeviceType(
        memory_bytes=known.memory_bytes,
        peak_flops=dict(known.peak_flops),
        memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s,
        compute_capability=known.compute_capability,
    )


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
                    f"unknown type {group.type!r}; types are {some_of(sorted(self.device_types))}",
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
            own = {o.between[0] for o in self.network.overrides if len(o.between) == 1}
            unknown = sorted(
                {
                    group.type
                    for node in self.nodes
                    for group in node.devices
                    if node.num_devices > 1
                    and node.name not in own
                    and group.type not in catalogue.GPU_TYPES
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
                    f"unknown node {end!r}; nodes are {some_of(sorted(names))}",
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
