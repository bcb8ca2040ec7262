"""Links: which figure holds for which pair of devices, sharing of NICs, rings."""

from __future__ import annotations

import pytest
from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Device, Link, LinkOverride
from eth_cli.profile.table import LinkEntry
from eth_cli.search.comm import Network, all_reduce_s

BLOCKS = {"x": [(1.0, 2.0)], "y": [(2.0, 3.0)]}
X0, X1 = Device("n0", 0, "x"), Device("n0", 1, "x")
Y0 = Device("n1", 0, "y")
X2 = Device("n2", 0, "x")


def _entry(devices: tuple[str, str], flows: int, latency_s: float, rate: float) -> LinkEntry:
    return LinkEntry(
        scope="inter_node",
        devices=devices,
        flows=flows,
        latency_s=latency_s,
        bandwidth_bytes_per_s=rate,
    )


def test_cluster_file_holds_where_the_profile_has_no_link() -> None:
    network = Network(cluster_of({"x": 2}, {"y": 1}, {"x": 1}), profile_of(blocks=BLOCKS))
    assert network.transfer_s(X0, X1, 2_000) == 1e-5 + 2_000 / 1e9
    assert network.transfer_s(X0, Y0, 2_000) == 3e-5 + 2_000 / 2e8
    # The NIC is shared by all flows, a link inside the node is not.
    assert network.transfer_s(X0, Y0, 2_000, flows=3) == 3e-5 + 3 * 2_000 / 2e8
    assert network.transfer_s(X0, X1, 2_000, flows=3) == 1e-5 + 2_000 / 1e9


def test_measured_link_of_the_types_wins_and_its_direction_counts() -> None:
    links = [_entry(("x", "y"), 1, 4e-5, 1.5e8), _entry(("y", "x"), 1, 6e-5, 1.1e8)]
    network = Network(
        cluster_of({"x": 2}, {"y": 1}, {"x": 1}), profile_of(blocks=BLOCKS, links=links)
    )
    assert network.transfer_s(X0, Y0, 2_000) == 4e-5 + 2_000 / 1.5e8
    assert network.transfer_s(Y0, X0, 2_000) == 6e-5 + 2_000 / 1.1e8
    assert network.transfer_s(X0, X2, 2_000) == 3e-5 + 2_000 / 2e8


def test_measured_one_way_serves_both_ways() -> None:
    links = [_entry(("x", "y"), 1, 4e-5, 1.5e8)]
    network = Network(cluster_of({"x": 2}, {"y": 1}), profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(Y0, X0, 2_000) == 4e-5 + 2_000 / 1.5e8


def test_override_of_a_named_pair_wins_over_the_measured_types() -> None:
    links = [_entry(("x", "y"), 1, 4e-5, 1.5e8)]
    slow = Link(latency_s=7e-5, bandwidth_bytes_per_s=3e6)
    cluster = cluster_of(
        {"x": 2}, {"y": 1}, {"x": 1}, overrides=(LinkOverride(between=("n0", "n1"), link=slow),)
    )
    network = Network(cluster, profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(X0, Y0, 2_000) == 7e-5 + 2_000 / 3e6
    assert network.transfer_s(X2, Y0, 2_000) == 4e-5 + 2_000 / 1.5e8


def test_one_measured_flow_shares_the_node_bandwidth() -> None:
    # Alone 1.5e8 of the NIC's 2e8: two flows get 1e8 each.
    links = [_entry(("x", "y"), 1, 4e-5, 1.5e8)]
    network = Network(cluster_of({"x": 2}, {"y": 1}), profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(X0, Y0, 1e6, flows=2) == 3e-5 + 1e6 / 1e8
    # A flow that alone takes a tenth of the NIC is not slowed by a second one.
    links = [_entry(("x", "y"), 1, 4e-5, 2e7)]
    network = Network(cluster_of({"x": 2}, {"y": 1}), profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(X0, Y0, 1e6, flows=2) == 4e-5 + 1e6 / 2e7


def test_nearest_measured_flows_are_scaled_by_the_sharing_they_show() -> None:
    # 1 flow: 10 ms; 4 flows: 20 ms: time grows with the square root of the flows.
    links = [
        LinkEntry(scope="inter_node", devices=("x", "y"), flows=n, table=((1e6, time_s),))
        for n, time_s in ((1, 0.010), (4, 0.020))
    ]
    network = Network(cluster_of({"x": 9}, {"y": 9}), profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(X0, Y0, 1e6, flows=4) == 0.020
    assert network.transfer_s(X0, Y0, 1e6, flows=2) == pytest.approx(0.010 * 2**0.5)
    assert network.transfer_s(X0, Y0, 1e6, flows=3) == pytest.approx(0.010 * 3**0.5)
    assert network.transfer_s(X0, Y0, 1e6, flows=16) == pytest.approx(0.040)


def test_only_several_flows_measured_are_scaled_both_ways() -> None:
    # Four flows of 1e7 bytes/s each, a fifth of the NIC: sixteen share what those four had.
    links = [_entry(("x", "y"), 4, 0.0, 1e7)]
    cluster = cluster_of({"x": 9}, {"y": 9}, inter=(0.0, 2e8))
    network = Network(cluster, profile_of(blocks=BLOCKS, links=links))
    assert network.transfer_s(X0, Y0, 1e6, flows=16) == pytest.approx(4 * 0.1)
    assert network.transfer_s(X0, Y0, 1e6, flows=8) == pytest.approx(2 * 0.1)
    assert network.transfer_s(X0, Y0, 1e6, flows=4) == 0.1
    assert network.transfer_s(X0, Y0, 1e6, flows=1) == pytest.approx(0.1 / 4)


@pytest.mark.parametrize(
    "measured",
    [
        ((1, 1e8), (2, 1.2e8)),
        ((4, 1e7),),
        ((4, 9e8),),
        ((3, 6e7),),
        ((1, 3e8),),
        ((2, 9e7), (4, 1e8)),
    ],
)
def test_more_flows_are_never_faster(measured: tuple[tuple[int, float], ...]) -> None:
    links = [_entry(("x", "y"), flows, 0.0, rate) for flows, rate in measured]
    network = Network(cluster_of({"x": 9}, {"y": 9}), profile_of(blocks=BLOCKS, links=links))
    times = [network.transfer_s(X0, Y0, 1e6, flows=n) for n in range(1, 20)]
    assert times == sorted(times)


def test_ring_takes_the_slowest_hop_and_enters_each_node_once() -> None:
    network = Network(cluster_of({"x": 2}, {"y": 1}, {"x": 1}), profile_of(blocks=BLOCKS))
    inside = network.ring([(X0,), (X1,)])
    assert all_reduce_s(inside, 1e6) == 2 * (1e-5 + 5e5 / 1e9)
    across = network.ring([(X0,), (Y0,), (X1,)])
    assert across.nodes == ("n0", "n1")
    assert all_reduce_s(across, 3e6) == 4 * (3e-5 + 1e6 / 2e8)
    # Another ring over the same NIC halves the rate, not the latency.
    assert all_reduce_s(across, 3e6, flows=2) == 4 * (3e-5 + 2 * 1e6 / 2e8)
    assert all_reduce_s(network.ring([(X0,)]), 3e6) == 0


def test_best_transfer_is_the_fastest_of_all_pairs() -> None:
    fast = Link(latency_s=1e-6, bandwidth_bytes_per_s=5e9)
    cluster = cluster_of(
        {"x": 1}, {"y": 1}, {"x": 1}, overrides=(LinkOverride(between=("n1", "n2"), link=fast),)
    )
    network = Network(cluster, profile_of(blocks=BLOCKS))
    assert network.best_transfer_s("x", "y", 1e6) == 1e-6 + 1e6 / 5e9
    assert network.best_transfer_s("x", "x", 1e6) == 3e-5 + 1e6 / 2e8
    assert network.best_transfer_s("y", "y", 1e6) is None
