"""Clusters that differ from the given one: devices left out or added, more memory, faster links.

A changed cluster is a new `Cluster`; devices that both have keep their ids. To leave devices out of
a plan needs no new cluster but a set of their ids (`SearchOptions.excluded`), so that the plan
stays one of the cluster as its file has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from eth_cli import catalogue, serde
from eth_cli.cluster import (
    MAX_DEVICES,
    Cluster,
    DeviceGroup,
    DeviceType,
    Link,
    LinkOverride,
    Node,
    catalogue_type,
)
from eth_cli.errors import ConfigError
from eth_cli.faults import did_you_mean, some_of
from eth_cli.profile.table import LinkEntry, Profile

EXCLUDE, WHAT_IF = "--exclude", "--what-if"
"""The options that errors of this module are about."""


class Change(NamedTuple):
    """Devices (or nodes) that are added or taken away."""

    number: int
    """How many; below 0: taken away."""
    name: str
    """A device type, or a node that is to be had again or lost."""

    def __str__(self) -> str:
        return f"{self.number:+d}x{self.name}"


class Variant(NamedTuple):
    """A changed cluster, and those of its devices that no plan may use."""

    cluster: Cluster
    excluded: frozenset[str]


# --- Devices that are left out --------------------------------------------------------------------


def devices_named(cluster: Cluster, name: str, *, option: str = EXCLUDE) -> tuple[str, ...]:
    """Ids of the devices that a device id, a node's name or a type stands for.

    Raises:
        ConfigError: the cluster has nothing of this name, or a node and a type share it.
    """
    if name in cluster.devices:
        return (name,)
    of_node = tuple(d.id for d in cluster.devices.values() if d.node == name)
    of_type = tuple(d.id for d in cluster.devices.values() if d.type == name)
    if of_node and of_type and set(of_node) != set(of_type):
        raise ConfigError.single(
            option, "", f"{name!r} is a node and a type; name the devices, such as {of_node[0]}"
        )
    if of_node or of_type:
        return of_node or of_type
    raise ConfigError.single(option, "", _unknown(cluster, name))


def _unknown(cluster: Cluster, name: str) -> str:
    node, colon, _ = name.rpartition(":")
    if colon and node in cluster.nodes_by_name:
        number = cluster.nodes_by_name[node].num_devices
        return f"{name!r}: node {node} has {number} devices, counted from 0"
    nodes, types = sorted(cluster.nodes_by_name), _used_types(cluster)
    return (
        f"{name!r} is no device, node or type of cluster {cluster.name}"
        f"{did_you_mean(name, [*nodes, *types])}; nodes are {some_of(nodes)}; types are "
        f"{some_of(types)}; a device is written like {next(iter(cluster.devices))}"
    )


def excluded_by(cluster: Cluster, names: Iterable[str]) -> dict[str, str]:
    """By id of every device that is excluded: the name that it is excluded by.

    Raises:
        ConfigError: a name is unknown, or no device is left.
    """
    found: dict[str, str] = {}
    for name in names:
        for device in devices_named(cluster, name):
            found.setdefault(device, name)
    if found and len(found) == len(cluster.devices):
        raise ConfigError.single(
            EXCLUDE,
            "",
            f"leaves none of the {len(found)} devices of cluster {cluster.name}; keep at least one",
        )
    return found


# --- Devices that are added or lost ---------------------------------------------------------------


def apply_changes(
    cluster: Cluster, changes: Sequence[Change], excluded: Collection[str] = ()
) -> Variant:
    """The cluster after some changes.

    New devices stand in new nodes of the size that is usual in the cluster, reached over
    ``network.inter_node``. Devices of a type that are taken away are the last ones of the cluster.

    Args:
        excluded: devices that no plan may use before the changes.

    Raises:
        ConfigError: a name is unknown, there are not so many devices to take away, or the cluster
            has no link that could reach a new node.
    """
    gone = set(excluded)
    for change in changes:
        if change.number > 0:
            cluster = _added(cluster, change)
        else:
            gone |= _taken(cluster, change, gone)
    if len(gone) == len(cluster.devices):
        raise ConfigError.single(
            WHAT_IF, "", f"{', '.join(map(str, changes))} leaves no device to plan for"
        )
    return Variant(cluster, frozenset(gone))


def _added(cluster: Cluster, change: Change) -> Cluster:
    model = cluster.nodes_by_name.get(change.name)
    types = dict(cluster.device_types)
    if model is None:
        types.setdefault(change.name, _type_named(cluster, change.name))
    number = change.number * (1 if model is None else model.num_devices)
    total = len(cluster.devices) + number
    if total > MAX_DEVICES:  # Before so many are made.
        raise ConfigError.single(
            WHAT_IF, "", f"{change} makes {total} devices; at most {MAX_DEVICES} are planned for"
        )
    if model is not None:
        nodes = [model.devices] * change.number
    else:
        size = usual_node_size(cluster, change.name)
        sizes = [size] * (number // size) + [number % size] * (number % size > 0)
        nodes = [(DeviceGroup(type=change.name, count=n),) for n in sizes]
    if cluster.network.inter_node is None:
        raise ConfigError.single(
            WHAT_IF,
            "",
            f"{change}: a new node needs a link to the others, and cluster {cluster.name} has no "
            "network.inter_node; write it like {bandwidth: 25Gbps, latency: 30us}",
        )
    names = _new_names(cluster, change.name, len(nodes))
    made = [Node(name=n, devices=groups) for n, groups in zip(names, nodes, strict=True)]
    try:
        return _rebuilt(cluster, device_types=types, nodes=(*cluster.nodes, *made))
    except ValueError as error:
        raise serde.config_error(error, Cluster, f"{WHAT_IF} {change}") from None


def _rebuilt(cluster: Cluster, **changed: Any) -> Cluster:
    """The cluster with other fields. Not a copy, which would keep what it remembers of the old."""
    return Cluster(**{name: getattr(cluster, name) for name in Cluster.model_fields} | changed)


def _type_named(cluster: Cluster, name: str) -> DeviceType:
    known = cluster.device_types.get(name) or catalogue_type(name)
    if known is None:
        types = sorted(cluster.device_types)
        choices = [*types, *catalogue.GPU_TYPES, *cluster.nodes_by_name]
        raise ConfigError.single(
            WHAT_IF,
            "",
            f"{name!r} is no type{did_you_mean(name, choices)}; the cluster has {some_of(types)}, "
            f"the catalogue has {len(catalogue.GPU_TYPES)} more, or name a node to have again",
        )
    return known


def usual_node_size(cluster: Cluster, device_type: str) -> int:
    """Devices of the commonest node with this type, or of the commonest node; the larger of two."""
    nodes = [n for n in cluster.nodes if any(g.type == device_type for g in n.devices)]
    sizes = Counter(node.num_devices for node in nodes or cluster.nodes)
    return max(sizes, key=lambda size: (sizes[size], size))


def _new_names(cluster: Cluster, like: str, number: int) -> list[str]:
    names: list[str] = []
    index = 0
    while len(names) < number:
        name = f"new-{like}-{index}"
        if name not in cluster.nodes_by_name:
            names.append(name)
        index += 1
    return names


def _taken(cluster: Cluster, change: Change, gone: Collection[str]) -> set[str]:
    number = -change.number
    if change.name in cluster.nodes_by_name:
        if number != 1:
            raise ConfigError.single(
                WHAT_IF, "", f"{change}: there is one node {change.name}; write -1x{change.name}"
            )
        return set(devices_named(cluster, change.name, option=WHAT_IF))
    left = [d for d in devices_named(cluster, change.name, option=WHAT_IF) if d not in gone]
    if number > len(left):
        raise ConfigError.single(
            WHAT_IF, "", f"{change}: cluster {cluster.name} has {len(left)} {change.name} to lose"
        )
    return set(left[-number:])


def _used_types(cluster: Cluster) -> list[str]:
    return sorted({group.type for node in cluster.nodes for group in node.devices})


def one_more_device(cluster: Cluster, device_type: str) -> Cluster:
    """One device more: in a node of its own, or in the only node where no link leads out of it."""
    if cluster.network.inter_node is not None:
        return _added(cluster, Change(1, device_type))
    (node,) = cluster.nodes
    grown = node.model_copy(update={"devices": (*node.devices, DeviceGroup(type=device_type))})
    return _rebuilt(cluster, nodes=(grown,))


# --- Figures that change --------------------------------------------------------------------------


def with_memory(cluster: Cluster, device_type: str, factor: float) -> Cluster:
    """The cluster with ``factor`` times the memory on all devices of a type."""
    old = cluster.device_types[device_type]
    new = old.model_copy(update={"memory_bytes": round(old.memory_bytes * factor)})
    return _rebuilt(cluster, device_types=cluster.device_types | {device_type: new})


def with_faster_links(
    cluster: Cluster, profile: Profile, *, between_nodes: bool, factor: float
) -> tuple[Cluster, Profile]:
    """Cluster and profile with ``factor`` times the bandwidth, at the same latency, on all links
    between nodes or on all inside of nodes.

    The profile changes too, for what it measured goes before the cluster's figures.
    """
    network = cluster.network
    overrides = tuple(
        o.model_copy(update={"link": _faster(o.link, factor)})
        if (len(set(o.between)) == 2) == between_nodes
        else o
        for o in network.overrides
    )
    scope, link = (
        ("inter_node", network.inter_node) if between_nodes else ("intra_node", network.intra_node)
    )
    changed: dict[str, Any] = {"overrides": overrides}
    if link is not None:
        changed[scope] = _faster(link, factor)
    elif not between_nodes:
        changed["overrides"] += tuple(_faster_inside(cluster, profile, factor))
    links = tuple(
        _faster_entry(entry, factor) if entry.scope == scope else entry for entry in profile.links
    )
    return (
        _rebuilt(cluster, network=network.model_copy(update=changed)),
        profile.model_copy(update={"links": links}),
    )


def _faster_inside(cluster: Cluster, profile: Profile, factor: float) -> Iterator[LinkOverride]:
    """Links of nodes that have them from the catalogue. Left out: nodes of several types, whose
    links differ by pair."""
    measured = {t for e in profile.links if e.scope == "intra_node" for t in e.devices}
    own = {o.between[0] for o in cluster.network.overrides if len(o.between) == 1}
    for node in cluster.nodes:
        types = {group.type for group in node.devices}
        if len(types) > 1 or node.num_devices < 2 or node.name in own or types & measured:
            continue
        first = cluster.devices[f"{node.name}:0"]
        link = cluster.link(first, cluster.devices[f"{node.name}:1"])
        yield LinkOverride(between=(node.name,), link=_faster(link, factor))


def _faster(link: Link, factor: float) -> Link:
    rate = link.bandwidth_bytes_per_s * factor
    return link.model_copy(update={"bandwidth_bytes_per_s": rate})


def _faster_entry(entry: LinkEntry, factor: float) -> LinkEntry:
    if entry.table is not None:  # So many times the bytes in the time that was measured.
        table = tuple((size * factor, time_s) for size, time_s in entry.table)
        return entry.model_copy(update={"table": table})
    assert entry.bandwidth_bytes_per_s is not None  # checked on construction
    rate = entry.bandwidth_bytes_per_s * factor
    return entry.model_copy(update={"bandwidth_bytes_per_s": rate})


def has_slow_overrides(cluster: Cluster) -> bool:
    """Whether some pair of nodes has less bandwidth than the other pairs."""
    return without_slow_overrides(cluster).network != cluster.network


def without_slow_overrides(cluster: Cluster) -> Cluster:
    """The cluster where each pair of nodes has at least the bandwidth of the usual one."""
    usual = cluster.network.inter_node
    kept = tuple(
        o
        for o in cluster.network.overrides
        if len(set(o.between)) < 2
        or usual is None
        or o.link.bandwidth_bytes_per_s >= usual.bandwidth_bytes_per_s
    )
    network = cluster.network.model_copy(update={"overrides": kept})
    return _rebuilt(cluster, network=network)
