"""The search's own order of nodes, and plans that do not depend on where a file puts its nodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from oracle.instances import make_instance
from unit.search.problems import cluster_of

from eth_cli.cluster import Cluster, Link, LinkOverride, Node
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.order import canonical_nodes
from eth_cli.search.planner import SearchOptions, search


def _override(first: str, last: str, rate: float = 1e6) -> LinkOverride:
    return LinkOverride(
        between=(first, last), link=Link(latency_s=1e-5, bandwidth_bytes_per_s=rate)
    )


def _permuted(cluster: Cluster, order: list[int]) -> Cluster:
    return _with(cluster, tuple(cluster.nodes[i] for i in order), cluster.network.overrides)


def _renamed(cluster: Cluster, name_of: Callable[[str], str]) -> Cluster:
    return _with(
        cluster,
        tuple(n.model_copy(update={"name": name_of(n.name)}) for n in cluster.nodes),
        tuple(
            o.model_copy(update={"between": tuple(name_of(end) for end in o.between)})
            for o in cluster.network.overrides
        ),
    )


def _with(
    cluster: Cluster, nodes: tuple[Node, ...], overrides: tuple[LinkOverride, ...]
) -> Cluster:
    """Made anew, for a copy would keep the devices that it has listed already."""
    return Cluster(
        name=cluster.name,
        device_types=cluster.device_types,
        nodes=nodes,
        network=cluster.network.model_copy(update={"overrides": overrides}),
    )


def test_nodes_are_ordered_by_devices_then_by_overrides() -> None:
    cluster = cluster_of(
        {"y": 1}, {"x": 2}, {"x": 1}, {"x": 1}, {"x": 1}, overrides=(_override("n3", "n0"),)
    )
    # Without an override first (n2, n4 as in the file), then the one that has one.
    assert canonical_nodes(cluster) == ("n2", "n4", "n3", "n1", "n0")


def test_order_follows_the_pattern_of_overrides_whatever_the_places() -> None:
    # Two pairs of like nodes with a link of their own: partners keep their places to each other.
    pairs = (_override("n0", "n2"), _override("n1", "n3"))
    cluster = cluster_of({"x": 1}, {"x": 1}, {"x": 1}, {"x": 1}, overrides=pairs)
    close = {frozenset(("n0", "n2")), frozenset(("n1", "n3"))}
    patterns = set()
    for places in itertools.permutations(range(4)):
        names = canonical_nodes(_permuted(cluster, list(places)))
        patterns.add(tuple(frozenset(pair) in close for pair in itertools.combinations(names, 2)))
    assert len(patterns) == 1


def _step_s(cluster: Cluster, profile: Profile, total: int) -> float | None:
    try:
        return search(
            profile, cluster, SearchOptions(global_batch_size=total, budget=0)
        ).step_time_s
    except InfeasibleError:
        return None


def test_places_and_names_of_nodes_change_nothing_without_a_proof() -> None:
    # On each of these a search that goes by the order of the file gives other plans.
    seeds = (2015, 2034, 2039, 2050, 2056, 2064, 2069, 2084, 2089, 2090, 2117, 2123)
    num_checked = 0
    for seed in (*seeds, *range(2_000, 2_010)):
        cluster, profile, total = make_instance(seed, max_devices=9, max_blocks=6)
        expected = _step_s(cluster, profile, total)
        if len(cluster.nodes) < 2 or expected is None:
            continue
        rng = random.Random(seed)
        order = list(range(len(cluster.nodes)))
        rng.shuffle(order)
        last_first = list(reversed(range(len(cluster.nodes))))
        names = {n.name: f"z{9 - i}" for i, n in enumerate(cluster.nodes)}
        for other in (
            _permuted(cluster, order),
            _permuted(cluster, last_first),
            _renamed(cluster, names.__getitem__),
        ):
            step_s = _step_s(other, profile, total)
            assert step_s is not None
            assert abs(step_s / expected - 1) < 1e-9, f"seed {seed}"
        num_checked += 1
    assert num_checked >= 12
