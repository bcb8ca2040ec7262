"""Parts of a cluster: so many devices of each group of like nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from eth_cli.cluster import Cluster

Part = tuple[int, ...]
"""How many devices of each group are offered: its first ones."""

_FEW = 4
"""Nodes of a group up to which single devices are given up, and not whole nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Nodes that hold the same devices."""

    devices: tuple[str, ...]
    """Their devices, node after node."""
    node_size: int
    levels: tuple[int, ...]
    """How many devices to offer: rising, the last one is all of them."""


def groups_of(cluster: Cluster, excluded: Collection[str], *, max_searches: int) -> list[Group]:
    """The groups of the devices that are not excluded, in the order of the file."""
    nodes: dict[str, list[str]] = {}
    for device in cluster.devices.values():
        if device.id not in excluded:
            nodes.setdefault(device.node, []).append(device.id)
    alike: dict[object, list[list[str]]] = {}
    for ids in nodes.values():
        types = Counter(cluster.devices[d].type for d in ids)
        alike.setdefault(tuple(sorted(types.items())), []).append(ids)
    number = len(alike)
    # Up to `number` searches a round, fewer once groups are complete.
    parts = max(1, 2 * max_searches // (number * (number + 1)))
    return [
        Group(
            devices=tuple(d for ids in members for d in ids),
            node_size=len(members[0]),
            levels=_levels(len(members), len(members[0]), parts),
        )
        for members in alike.values()
    ]


def _levels(num_nodes: int, node_size: int, parts: int) -> tuple[int, ...]:
    """Device counts that cut a group in about ``parts``: whole nodes, or equal parts of nodes."""
    if num_nodes >= parts:
        return tuple(
            node_size * n
            for n in sorted({math.ceil(num_nodes * i / parts) for i in range(1, parts + 1)})
        )
    within = min(node_size, parts // num_nodes)
    ends = sorted({math.ceil(node_size * i / within) for i in range(1, within + 1)})
    return tuple(node * node_size + end for node in range(num_nodes) for end in ends)


class Parts:
    """The parts of a cluster.

    Args:
        excluded: devices that are in no part.
        max_searches: about so many parts lie on the way from nothing to the whole cluster.
    """

    def __init__(self, cluster: Cluster, excluded: Collection[str], *, max_searches: int) -> None:
        self.cluster = cluster
        self.excluded = frozenset(excluded)
        self.groups = groups_of(cluster, excluded, max_searches=max_searches)

    @property
    def nothing(self) -> Part:
        """No device."""
        return tuple(0 for _ in self.groups)

    @property
    def everything(self) -> Part:
        """All devices that are not excluded."""
        return tuple(len(group.devices) for group in self.groups)

    def offered(self, part: Part) -> list[str]:
        """The devices of a part."""
        return [
            device
            for group, n in zip(self.groups, part, strict=True)
            for device in group.devices[:n]
        ]

    def left_out(self, part: Part) -> frozenset[str]:
        """All other devices, the excluded ones among them."""
        return self.excluded | {
            device
            for group, n in zip(self.groups, part, strict=True)
            for device in group.devices[n:]
        }

    def added(self, part: Part, larger: Part) -> set[str]:
        """Devices that a larger part has more."""
        return set(self.offered(larger)).difference(self.offered(part))

    def steps(self, part: Part) -> list[Part]:
        """Parts with the next level of one group, for each group that is not complete."""
        return [
            (*part[:g], next(level for level in group.levels if level > n), *part[g + 1 :])
            for g, (group, n) in enumerate(zip(self.groups, part, strict=True))
            if n < group.levels[-1]
        ]

    def neighbours(self, part: Part) -> list[Part]:
        """One device less, one more; where the group has many nodes, one node."""
        result = []
        for g, group in enumerate(self.groups):
            unit = 1 if len(group.devices) <= _FEW * group.node_size else group.node_size
            for n in (part[g] - unit, part[g] + unit):
                if 0 <= n <= len(group.devices):
                    result.append((*part[:g], n, *part[g + 1 :]))
        return [step for step in result if any(step)]
