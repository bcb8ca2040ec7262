"""Cost of transfers between devices and of all-reduce over them.

Which figures hold for a pair of devices, first found first taken:

1. a ``network.overrides`` entry of the cluster file: it names this very pair of nodes;
2. the profile's measured link of the two device types (sender, receiver; else the reverse);
3. the cluster file's ``intra_node`` or ``inter_node`` link (or the catalogue's inside a node).

A node's NIC is shared by its devices, per direction: ``flows`` transfers of one node at once are
each slower than one alone. Links inside a node are taken as one per device pair, not shared.
Left out: congestion inside the network between nodes, and protocol changes with message size
other than those that a measured table shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eth_cli.cluster import Cluster, Device, Link
from eth_cli.profile.table import LinkEntry, Profile
from eth_cli.search.order import canonical_nodes


class Path:
    """What connects two devices: measured entries by number of flows, or a link."""

    def __init__(
        self, *, entries: Iterable[LinkEntry], link: Link, is_shared: bool, key: object
    ) -> None:
        self.key = key
        """Equal for pairs of devices that the model cannot tell apart."""
        self.is_shared = is_shared
        """Whether the path crosses a NIC, which all flows of the node share."""
        self._entries = sorted(entries, key=lambda e: e.flows)
        self._link = link
        self._times: dict[tuple[float, int], float] = {}

    def transfer_s(self, num_bytes: float, flows: int = 1) -> float:
        """Time of one transfer while ``flows`` in all use the NIC [s]."""
        if not self.is_shared:
            flows = 1
        key = (num_bytes, flows)
        time_s = self._times.get(key)
        if time_s is None:
            time_s = self._times[key] = self._transfer_s(num_bytes, flows)
        return time_s

    def _transfer_s(self, num_bytes: float, flows: int) -> float:
        if not self._entries:
            return self._shared_s(num_bytes, flows)
        if any(entry.flows == flows for entry in self._entries):
            # More flows never speed up each: a figure below that of fewer flows is noise.
            return max(e.transfer_s(num_bytes) for e in self._entries if e.flows <= flows)
        if len(self._entries) == 1:
            return self._from_one_s(self._entries[0], num_bytes, flows)
        return self._scaled_s(num_bytes, flows)

    def _from_one_s(self, measured: LinkEntry, num_bytes: float, flows: int) -> float:
        """From the only measured number of flows, by how the NIC's bandwidth is shared.

        One flow alone may leave a part of the NIC idle, which others fill first. Several flows
        share it already: more of them share what these had, and are slower in proportion.
        """
        measured_s = measured.transfer_s(num_bytes)
        shared_s = self._shared_s(num_bytes, flows)
        if flows < measured.flows:
            return min(measured_s, max(measured_s * flows / measured.flows, shared_s))
        if measured.flows == 1:
            return max(measured_s, shared_s)
        return measured_s * shared_s / self._shared_s(num_bytes, measured.flows)

    def _shared_s(self, num_bytes: float, flows: int) -> float:
        """Time on a NIC whose bandwidth all flows share in full."""
        return self._link.latency_s + num_bytes * flows / self._link.bandwidth_bytes_per_s

    def _scaled_s(self, num_bytes: float, flows: int) -> float:
        """Between two measured numbers of flows: time grows with the power that they show.

        A power of 0 is no contention, 1 is a full NIC; beyond the measured range the power of the
        two nearest measurements goes on.
        """
        above = next(
            (i for i, e in enumerate(self._entries) if e.flows > flows), len(self._entries) - 1
        )
        low, high = self._entries[max(above, 1) - 1], self._entries[max(above, 1)]
        low_s, high_s = (self.transfer_s(num_bytes, entry.flows) for entry in (low, high))
        power = math.log(high_s / low_s) / math.log(high.flows / low.flows)
        power = min(1.0, max(0.0, power))
        nearest, nearest_s = min(
            ((low, low_s), (high, high_s)), key=lambda pair: abs(math.log(pair[0].flows / flows))
        )
        return nearest_s * float((flows / nearest.flows) ** power)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """A ring all-reduce over groups that hold the same parameters.

    Each of ``width`` rings goes over one device a group and sums 1/width of the bytes.
    """

    num_owners: int
    """Groups on the ring."""
    width: int
    """Rings that run side by side: the widest tensor-parallel group's width."""
    paths: tuple[Path, ...]
    """The distinct connections between neighbours on the ring."""
    nodes: tuple[str, ...]
    """Nodes whose NIC the ring uses, each once in and once out."""


class Network:
    """The links of a cluster as a profile measured them, the cluster's own where it did not."""

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        self.cluster = cluster
        self._measured: dict[tuple[str, str, str], list[LinkEntry]] = {}
        for entry in profile.links:
            self._measured.setdefault((entry.scope, *entry.devices), []).append(entry)
        self._overridden = {frozenset(o.between) for o in cluster.network.overrides}
        self._node_index = {name: i for i, name in enumerate(canonical_nodes(cluster))}
        self._paths: dict[tuple[str, str, str, str], Path] = {}
        self._shared_paths: dict[object, Path] = {}
        self._between: dict[tuple[str, str], tuple[Path, ...]] = {}

    def path(self, source: Device, target: Device) -> Path:
        """What connects two devices, in this direction."""
        pair = (source.node, source.type, target.node, target.type)
        path = self._paths.get(pair)
        if path is None:
            path = self._paths[pair] = self._make_path(source, target)
        return path

    def _make_path(self, source: Device, target: Device) -> Path:
        is_shared = source.node != target.node
        scope = "inter_node" if is_shared else "intra_node"
        link = self.cluster.link(source, target)
        entries: list[LinkEntry] = []
        if frozenset((source.node, target.node)) not in self._overridden:
            entries = (
                self._measured.get((scope, source.type, target.type))
                or self._measured.get((scope, target.type, source.type))
                or []
            )
        key = (scope, id(entries) if entries else None, link.latency_s, link.bandwidth_bytes_per_s)
        if key not in self._shared_paths:
            self._shared_paths[key] = Path(
                entries=entries, link=link, is_shared=is_shared, key=len(self._shared_paths)
            )
        return self._shared_paths[key]

    def transfer_s(
        self, source: Device, target: Device, num_bytes: float, *, flows: int = 1
    ) -> float:
        """Time of one transfer between two devices [s]."""
        return self.path(source, target).transfer_s(num_bytes, flows)

    def boundary_s(
        self,
        sources: Sequence[Device],
        targets: Sequence[Device],
        num_bytes: float,
        *,
        flows: int = 1,
    ) -> float:
        """Time for a boundary tensor to reach every device of the next stage's group [s].

        Every receiver gets the whole tensor from one sender, all of them at once.

        Args:
            flows: transfers at once on the busier NIC; at least one for each receiver is taken.
        """
        flows = max(flows, len(targets))
        return max(
            self.transfer_s(sources[i % len(sources)], target, num_bytes, flows=flows)
            for i, target in enumerate(targets)
        )

    def ring(self, groups: Sequence[Sequence[Device]]) -> Ring:
        """The ring over the owners of a segment, one tensor-parallel group each.

        Owners on one node are neighbours, so every node is entered and left once. Nodes follow
        each other by the types of their owners: nodes that are alike may change places at will.
        """
        ends = [group[0] for group in groups]
        types: dict[str, list[str]] = {}
        for device in ends:
            types.setdefault(device.node, []).append(device.type)
        node_key = {node: (sorted(t), self._node_index[node]) for node, t in types.items()}
        ends.sort(key=lambda d: (node_key[d.node], d.type, d.local_index))
        paths: dict[object, Path] = {}
        nodes: dict[str, None] = {}
        if len(ends) > 1:
            for i, device in enumerate(ends):
                path = self.path(device, ends[(i + 1) % len(ends)])
                paths.setdefault(path.key, path)
                if path.is_shared:
                    nodes.setdefault(device.node)
        return Ring(
            num_owners=len(ends),
            width=max(len(group) for group in groups),
            paths=tuple(paths.values()),
            nodes=tuple(nodes),
        )

    def best_transfer_s(
        self,
        source_type: str,
        target_type: str,
        num_bytes: float,
        *,
        flows: int = 1,
        across_nodes: bool = False,
    ) -> float | None:
        """Time over the fastest connection between two devices of these types; None: no pair [s].

        Of different nodes only, where ``across_nodes`` says so.

        No placement can do better, which is what makes bounds on it valid.
        """
        pair = (source_type, target_type)
        if pair not in self._between:
            self._between[pair] = self._paths_between(source_type, target_type)
        return min(
            (
                p.transfer_s(num_bytes, flows)
                for p in self._between[pair]
                if p.is_shared or not across_nodes
            ),
            default=None,
        )

    def _paths_between(self, source_type: str, target_type: str) -> tuple[Path, ...]:
        """The distinct connections between devices of two types."""
        found: dict[object, Path] = {}
        targets = self._one_device_a_node(target_type)
        # Without overrides all pairs of different nodes are alike: two nodes a side show them all.
        spread = len(targets) if self._overridden else 2
        for source, num_devices in self._one_device_a_node(source_type):
            across = [t for t, _ in targets if t.node != source.node][:spread]
            inside = [t for t, _ in targets if t.node == source.node]
            if source_type == target_type and num_devices < 2:
                inside = []
            for target in (*across, *inside):
                path = self.path(source, target)
                found.setdefault(path.key, path)
        return tuple(found.values())

    def _one_device_a_node(self, device_type: str) -> list[tuple[Device, int]]:
        """The first device of a type in every node, and how many of them the node has."""
        result = []
        for node in self.cluster.nodes:
            index = 0
            first: Device | None = None
            count = 0
            for group in node.devices:
                if group.type == device_type:
                    first = first or Device(node.name, index, group.type)
                    count += group.count
                index += group.count
            if first is not None:
                result.append((first, count))
        return result


def all_reduce_s(ring: Ring, num_bytes: float, *, flows: int | None = None) -> float:
    """Ring all-reduce of ``num_bytes`` over n owners: ``2(n-1) (latency + bytes/n/bandwidth)`` [s].

    The slowest link of the ring sets the pace of all of its steps (reduce-scatter, then
    all-gather, n - 1 steps each; Patarasuk and Yuan, 2009).

    Args:
        flows: transfers at once on the busiest NIC of the ring; None: only the ring's own.
    """
    if ring.num_owners < 2 or num_bytes <= 0:
        return 0.0
    chunk = num_bytes / (ring.width * ring.num_owners)
    slowest = max(path.transfer_s(chunk, flows or ring.width) for path in ring.paths)
    return 2 * (ring.num_owners - 1) * slowest
