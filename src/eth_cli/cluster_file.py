"""The cluster YAML: what people write, with units in its values. Owns cluster_specs/*.yaml.

`ClusterFile` checks the text at its own places, then becomes an `eth_cli.cluster.Cluster`:
``count: 2`` expanded to nodes, units gone, catalogue figures filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from eth_cli import catalogue, serde, units
from eth_cli.catalogue import DTYPES
from eth_cli.cluster import (
    MAX_DEVICES,
    Cluster,
    DeviceGroup,
    DeviceType,
    Link,
    LinkOverride,
    Name,
    Network,
    Node,
    catalogue_type,
)
from eth_cli.faults import did_you_mean, some_of
from eth_cli.serde import FieldError, Record

_Bytes = Annotated[int, BeforeValidator(units.parse_bytes), Field(gt=0, le=10**18)]
_Rate = Annotated[float, BeforeValidator(units.parse_bytes_per_s), Field(ge=1)]
_Flops = Annotated[float, BeforeValidator(units.parse_flops), Field(gt=0)]
_Seconds = Annotated[float, BeforeValidator(units.parse_seconds), Field(ge=0, le=1e6)]


class LinkFigures(Record):
    """``{bandwidth: 25Gbps, latency: 30us}``."""

    bandwidth: _Rate
    latency: _Seconds = 0.0

    def resolve(self) -> Link:
        """The link in SI units."""
        return Link(latency_s=self.latency, bandwidth_bytes_per_s=self.bandwidth)


class OverrideEntry(LinkFigures):
    """A link entry with the nodes that it holds for."""

    between: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]


class NetworkEntry(Record):
    """The ``network`` section."""

    intra_node: LinkFigures | None = None
    inter_node: LinkFigures | None = None
    overrides: tuple[OverrideEntry, ...] = ()


class DeviceTypeEntry(Record):
    """One entry of ``device_types``; what is absent is taken from the catalogue."""

    memory: _Bytes | None = None
    peak: dict[str, _Flops] | None = None
    memory_bandwidth: _Rate | None = None
    compute_capability: Annotated[float, Field(gt=0)] | None = None
    emulated: bool = False
    price_per_hour: Annotated[float | None, Field(gt=0, le=1e9)] = None


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
            double = [name for name in (entry.name, *entry.node_names()) if name in seen]
            if double:
                yield (
                    ("nodes", i, "name"),
                    f"{double[0]!r} names two nodes; nodes[{seen[double[0]]}] has it too",
                )
            # The entry's own name is taken too: an override may mean all of its nodes by it.
            seen |= dict.fromkeys((entry.name, *entry.node_names()), i)

    def _type_faults(self) -> Iterator[tuple[serde.Location, str]]:
        known = {*self.device_types, *catalogue.GPU_TYPES}
        for i, entry in enumerate(self.nodes):
            for j, group in enumerate(entry.devices):
                if group.type not in known:
                    yield (
                        ("nodes", i, "devices", j, "type"),
                        f"unknown type {group.type!r}{did_you_mean(group.type, known)}; add it "
                        f"under device_types, or use one of the catalogue's {len(known)} "
                        f"({some_of(sorted(known))})",
                    )

    def _override_faults(self) -> Iterator[tuple[serde.Location, str]]:
        names = {name for e in self.nodes for name in (e.name, *e.node_names())}
        seen: dict[frozenset[str], int] = {}
        for k, override in enumerate(self.network.overrides):
            at: serde.Location = ("network", "overrides", k, "between")
            unknown = [end for end in override.between if end not in names]
            for end in unknown:
                yield (
                    at,
                    f"unknown node {end!r}{did_you_mean(end, names)}; nodes are "
                    f"{some_of(sorted(names))}",
                )
            if unknown:
                continue
            pairs = [frozenset(pair) for pair in self._pairs(override)]
            if not pairs:
                only = override.between[0]
                yield at, f"names {only} twice; write [{only}] for the links inside {only}"
            double = [pair for pair in pairs if pair in seen]
            if double:
                yield (
                    at,
                    f"[{', '.join(sorted(double[0]))}] has an override already, "
                    f"network.overrides[{seen[double[0]]}]; keep one",
                )
            seen |= dict.fromkeys(pairs, k)

    def _pairs(self, override: OverrideEntry) -> list[tuple[str, str]]:
        """Pairs of nodes that an override is for; a node with itself means inside of it.

        The name of an entry with a count stands for all of its nodes.
        """
        members = {e.name: e.node_names() for e in self.nodes}
        ends = [members.get(end, (end,)) for end in override.between]
        if len(ends) == 1:
            return [(a, a) for a in ends[0]]
        # [a, a] of an entry with a count means each pair of its nodes, once.
        pairs = {tuple(sorted((a, b))): (a, b) for a in ends[0] for b in ends[1] if a != b}
        return list(pairs.values())

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
        overrides = [
            LinkOverride(between=(a,) if a == b else (a, b), link=entry.resolve())
            for entry in self.network.overrides
            for a, b in self._pairs(entry)
        ]
        intra, inter = self.network.intra_node, self.network.inter_node
        return Network(
            intra_node=None if intra is None else intra.resolve(),
            inter_node=None if inter is None else inter.resolve(),
            overrides=tuple(overrides),
        )


def _resolve_type(name: str, entry: DeviceTypeEntry) -> DeviceType:
    given: dict[str, Any] = {
        "memory_bytes": entry.memory,
        "peak_flops": None if entry.peak is None else dict(entry.peak),
        "memory_bandwidth_bytes_per_s": entry.memory_bandwidth,
        "compute_capability": entry.compute_capability,
        "emulated": entry.emulated,
        "price_per_hour": entry.price_per_hour,
    }
    figures = {field: value for field, value in given.items() if value is not None}
    known = catalogue_type(name)
    return DeviceType(**figures) if known is None else known.model_copy(update=figures)


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
