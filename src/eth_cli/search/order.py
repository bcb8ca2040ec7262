"""The order of nodes that the search goes by: from what they are, not from where a file has them.

Greedy placement and rings take nodes one after another, so without an order of their own the same
cluster, written down another way, would get another plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from eth_cli.cluster import Cluster, LinkOverride, Node

_Links = Mapping[str, Mapping[str, tuple[float, float]]]
"""By node and other node: (bandwidth, latency) of the override between them."""


def canonical_nodes(cluster: Cluster) -> tuple[str, ...]:
    """Names of all nodes, ordered by their devices and by their overrides to nodes so ordered.

    Nodes come out in the order of the file only where nothing else tells them apart, so that
    changing their places or names gives the same costs. (Overrides that form different regular
    patterns, such as a ring of six and two of three, are not told apart.)
    """
    return _ordered(cluster.nodes, cluster.network.overrides)


@lru_cache(maxsize=16)
def _ordered(nodes: tuple[Node, ...], overrides: tuple[LinkOverride, ...]) -> tuple[str, ...]:
    links: dict[str, dict[str, tuple[float, float]]] = {node.name: {} for node in nodes}
    for override in overrides:
        first, last = override.between[0], override.between[-1]
        link = (override.link.bandwidth_bytes_per_s, override.link.latency_s)
        links[first][last] = links[last][first] = link
    ranks = _ranks(
        {node.name: (_devices(node), links[node.name].get(node.name, ())) for node in nodes}
    )
    while True:
        ranks = _refined(ranks, links)
        num_alike = Counter(ranks.values())
        tied = [n for n in ranks if num_alike[ranks[n]] > 1 and set(links[n]) - {n}]
        if not tied:
            return tuple(sorted(ranks, key=lambda n: ranks[n]))
        # Like nodes may still stand in different places to each other: set one apart, look again.
        chosen = min(tied, key=lambda n: ranks[n])
        ranks = _ranks({n: (rank, n != chosen) for n, rank in ranks.items()})


def _devices(node: Node) -> tuple[tuple[str, int], ...]:
    counts: Counter[str] = Counter()
    for group in node.devices:
        counts[group.type] += group.count
    return tuple(sorted(counts.items()))


def _refined(ranks: dict[str, int], links: _Links) -> dict[str, int]:
    """Ranks by what the nodes at the other ends of overrides are as well, until nothing changes."""
    while True:
        finer = _ranks(
            {
                n: (rank, tuple(sorted((ranks[m], link) for m, link in links[n].items())))
                for n, rank in ranks.items()
            }
        )
        if len(set(finer.values())) == len(set(ranks.values())):
            return ranks
        ranks = finer


def _ranks(keys: Mapping[str, tuple[object, ...]]) -> dict[str, int]:
    """By node the place of its key among all different keys; keys of one call compare."""
    distinct = sorted(set(keys.values()))
    place = {key: i for i, key in enumerate(distinct)}
    return {name: place[key] for name, key in keys.items()}
