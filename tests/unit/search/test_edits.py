"""Clusters that differ: what changes, and what stays as it was."""

from __future__ import annotations

import pytest
from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Cluster, DeviceGroup, DeviceType, Link, LinkOverride, Network, Node
from eth_cli.errors import ConfigError
from eth_cli.profile.table import LinkEntry
from eth_cli.search.comm import Network as Links
from eth_cli.search.edits import (
    Change,
    apply_changes,
    devices_named,
    excluded_by,
    has_slow_overrides,
    one_more_device,
    usual_node_size,
    with_faster_links,
    with_memory,
    without_slow_overrides,
)

CLUSTER = cluster_of({"A": 3}, {"A": 3}, {"B": 2, "A": 1})


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("n1:2", ("n1:2",)),
        ("n2", ("n2:0", "n2:1", "n2:2")),
        ("B", ("n2:0", "n2:1")),
    ],
)
def test_names_of_devices_nodes_and_types(name: str, devices: tuple[str, ...]) -> None:
    assert devices_named(CLUSTER, name) == devices


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("n1:3", "node n1 has 3 devices"),
        ("n7", "nodes are n0, n1, n2"),
        ("b", "types are A, B"),
        ("", "a device is written like n0:0"),
    ],
)
def test_unknown_names_say_what_there_is(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--exclude: ") as error:
        devices_named(CLUSTER, name)
    assert says in str(error.value)


def test_a_name_of_a_node_and_of_a_type_is_refused() -> None:
    cluster = Cluster(
        name="c",
        device_types={t: DeviceType(memory_bytes=10) for t in ("A", "B")},
        nodes=(
            Node(name="A", devices=(DeviceGroup(type="B"),)),
            Node(name="x", devices=(DeviceGroup(type="A"),)),
        ),
        network=Network(inter_node=Link(latency_s=0, bandwidth_bytes_per_s=9)),
    )
    with pytest.raises(ConfigError, match="is a node and a type"):
        devices_named(cluster, "A")


def test_exclusions_are_told_by_the_first_name_and_leave_something() -> None:
    assert excluded_by(CLUSTER, ["n2:1", "B"]) == {"n2:1": "n2:1", "n2:0": "B"}
    with pytest.raises(ConfigError, match="leaves none of the 9 devices"):
        excluded_by(CLUSTER, ["A", "B"])


def test_new_devices_stand_in_nodes_of_the_usual_size() -> None:
    assert [usual_node_size(CLUSTER, t) for t in ("A", "B")] == [3, 3]
    grown, excluded = apply_changes(CLUSTER, [Change(5, "A"), Change(1, "n2")])
    assert excluded == frozenset()
    assert [(n.name, n.num_devices) for n in grown.nodes[3:]] == [
        ("new-A-0", 3),
        ("new-A-1", 2),
        ("new-n2-0", 3),
    ]
    assert list(grown.devices)[:9] == list(CLUSTER.devices)
    assert grown.devices["new-n2-0:2"].type == "A"
    catalogue = apply_changes(CLUSTER, [Change(1, "L4")]).cluster
    assert catalogue.type_of("new-L4-0:0").memory_bytes == 24 * 2**30


def test_the_last_devices_are_taken_away() -> None:
    assert apply_changes(CLUSTER, [Change(-2, "A")]).excluded == {"n1:2", "n2:2"}
    assert apply_changes(CLUSTER, [Change(-1, "A")], ["n2:2"]).excluded == {"n1:2", "n2:2"}
    assert apply_changes(CLUSTER, [Change(-1, "n0")]).excluded == {"n0:0", "n0:1", "n0:2"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change(-3, "B"), "has 2 B to lose"),
        (Change(-2, "n0"), "write -1xn0"),
        (Change(-1, "L4"), "'L4' is no device, node or type"),
        (Change(1, "L44"), "did you mean L4"),
        (Change(999_999_999, "A"), "1000000008 devices; at most 1000000"),
        (Change(999_999_999, "n0"), "3000000006 devices; at most 1000000"),
    ],
)
def test_changes_that_cannot_be_made(change: Change, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^--what-if") as error:
        apply_changes(CLUSTER, [change])
    assert says in str(error.value)


def lone_node() -> Cluster:
    """One node, and no link out of it."""
    network = Network(intra_node=Link(latency_s=0, bandwidth_bytes_per_s=9))
    node = Node(name="n", devices=(DeviceGroup(type="A", count=2),))
    types = {"A": DeviceType(memory_bytes=10)}
    return Cluster(name="c", device_types=types, nodes=(node,), network=network)


def test_a_lone_node_grows_inside() -> None:
    with pytest.raises(ConfigError, match="has no network"):
        apply_changes(lone_node(), [Change(1, "A")])
    assert list(one_more_device(lone_node(), "A").devices) == ["n:0", "n:1", "n:2"]
    assert list(one_more_device(CLUSTER, "B").devices)[-1] == "new-B-0:0"


def test_more_memory_is_that_of_one_type() -> None:
    more = with_memory(CLUSTER, "A", 1.25)
    sizes = {
        t: (CLUSTER.device_types[t].memory_bytes, f.memory_bytes)
        for t, f in more.device_types.items()
    }
    assert sizes == {"A": (10**9, 125 * 10**7), "B": (10**9, 10**9)}


def test_twice_the_bandwidth_takes_the_same_time_for_twice_the_bytes() -> None:
    links = (
        LinkEntry(
            scope="inter_node", devices=("A", "B"), latency_s=1e-4, bandwidth_bytes_per_s=3e7
        ),
        LinkEntry(scope="inter_node", devices=("A", "A"), table=((100, 1e-3), (9000, 7e-3))),
        LinkEntry(scope="intra_node", devices=("A", "A"), bandwidth_bytes_per_s=5e8),
    )
    override = LinkOverride(
        between=("n0", "n1"), link=Link(latency_s=2e-4, bandwidth_bytes_per_s=1e6)
    )
    cluster = cluster_of({"A": 3}, {"A": 3}, {"B": 2, "A": 1}, overrides=(override,))
    profile = profile_of(blocks={"A": [(1.0, 2.0)], "B": [(2.0, 3.0)]}, links=links)
    pairs = [("n0:0", "n2:0"), ("n0:0", "n2:2"), ("n0:0", "n1:0"), ("n2:0", "n2:2")]
    for between_nodes in (True, False):
        changed = with_faster_links(cluster, profile, between_nodes=between_nodes, factor=2.0)
        old, new = Links(cluster, profile), Links(*changed)
        for a, b in (*pairs, ("n0:0", "n0:1")):
            source, target = cluster.devices[a], cluster.devices[b]
            times = [new.transfer_s(source, target, n) for n in (4000, 8000)]
            if (source.node != target.node) == between_nodes:
                assert times[1] == pytest.approx(old.transfer_s(source, target, 4000)), (a, b)
            else:
                assert times[0] == old.transfer_s(source, target, 4000), (a, b)


def test_slow_pairs_of_nodes_become_usual_ones() -> None:
    slow, fast = (Link(latency_s=0, bandwidth_bytes_per_s=rate) for rate in (1e8, 3e8))
    overrides = (
        LinkOverride(between=("n0", "n1"), link=slow),
        LinkOverride(between=("n0", "n2"), link=fast),
    )
    cluster = cluster_of({"A": 1}, {"A": 1}, {"A": 1}, overrides=overrides)
    assert without_slow_overrides(cluster).network.overrides == overrides[1:]
    assert has_slow_overrides(cluster)
    assert not has_slow_overrides(CLUSTER)
