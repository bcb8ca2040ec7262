"""The cluster file and what it becomes: nodes expanded, units gone, links resolved."""

from __future__ import annotations

from pathlib import Path

import pytest

from eth_cli import catalogue, serde
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.errors import ConfigError

TEXT = """
name: lab
device_types:
  X: {memory: 40GiB, peak: {bf16: 312TFLOPS, fp32: 19.5TFLOPS}, memory_bandwidth: 1555GB/s}
  Y: {memory: 16GB, emulated: true}
nodes:
  - {name: a, count: 2, hosts: [ha, hb], devices: [{type: X, count: 3}]}
  - {name: b, devices: [{type: Y, count: 2}, {type: X}]}
network:
  intra_node: {bandwidth: 300GB/s, latency: 5us}
  inter_node: {bandwidth: 25Gbps, latency: 30us}
  overrides:
    - {between: [a, b], bandwidth: 10Gbps, latency: 50us}
    - {between: [b], bandwidth: 7GB/s}
"""


def read(text: str, folder: Path) -> Cluster:
    """A cluster from its text."""
    path = folder / "c.yaml"
    path.write_text(text)
    return read_cluster(path)


def faults(text: str, folder: Path) -> list[str]:
    """Fields of the faults of a text."""
    with pytest.raises(ConfigError) as error:
        read(text, folder)
    return [fault.field for fault in error.value.faults]


def test_the_file_in_si_units(tmp_path: Path) -> None:
    cluster = read(TEXT, tmp_path)
    assert list(cluster.devices) == [
        *("a0:0", "a0:1", "a0:2", "a1:0", "a1:1", "a1:2"),
        *("b:0", "b:1", "b:2"),
    ]
    assert [cluster.devices[d].type for d in ("a1:2", "b:1", "b:2")] == ["X", "Y", "X"]
    x = cluster.device_types["X"]
    assert (x.memory_bytes, x.peak_flops["bf16"]) == (40 * 2**30, 312e12)
    assert x.memory_bandwidth_bytes_per_s == 1555e9
    assert cluster.device_types["Y"].memory_bytes == 16_000_000_000
    assert cluster.type_of("b:0").emulated
    assert [node.host for node in cluster.nodes] == ["ha", "hb", None]


def test_links_the_most_special_one_holds(tmp_path: Path) -> None:
    cluster = read(TEXT, tmp_path)

    def rate(one: str, other: str) -> float:
        return cluster.link(cluster.devices[one], cluster.devices[other]).bandwidth_bytes_per_s

    assert rate("a0:0", "a0:1") == 300e9
    assert rate("a0:0", "a1:0") == pytest.approx(25e9 / 8)
    assert rate("a0:0", "b:0") == rate("b:2", "a1:1") == pytest.approx(10e9 / 8)
    assert rate("b:0", "b:1") == 7e9


def test_a_type_of_the_catalogue_needs_no_entry_and_an_entry_replaces_parts(
    tmp_path: Path,
) -> None:
    text = """
name: n
device_types: {A100-40: {memory: 39GiB}}
nodes: [{name: a, devices: [{type: A100-40, count: 2}, {type: T4}]}]
"""
    cluster = read(text, tmp_path)
    known = catalogue.GPU_TYPES
    assert cluster.device_types["A100-40"].memory_bytes == 39 * 2**30
    assert cluster.device_types["A100-40"].peak_flops == dict(known["A100-40"].peak_flops)
    assert cluster.device_types["T4"].memory_bytes == known["T4"].memory_bytes
    slower = cluster.link(cluster.devices["a:0"], cluster.devices["a:2"])
    assert slower.bandwidth_bytes_per_s == known["T4"].intra_node_bytes_per_s
    faster = cluster.link(cluster.devices["a:0"], cluster.devices["a:1"])
    assert faster.bandwidth_bytes_per_s == known["A100-40"].intra_node_bytes_per_s


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("type: X}]", "type: Z}]", "nodes[1].devices[1].type"),
        ("name: b", "name: a1", "nodes[1].name"),
        ("[ha, hb]", "[ha]", "nodes[0].hosts"),
        ("hosts: [ha, hb]", "host: ha", "nodes[0].host"),
        ("[b], bandwidth: 7GB/s", "[c], bandwidth: 7GB/s", "network.overrides[1].between"),
        ("[b], bandwidth: 7GB/s", "[b, b], bandwidth: 7GB/s", "network.overrides[1].between"),
        ("[b], bandwidth: 7GB/s", "[b, a0], bandwidth: 7GB/s", "network.overrides[1].between"),
        ("{name: b,", "{name: a,", "nodes[1].name"),
        ("memory: 16GB, ", "", "device_types.Y.memory"),
        ("{bf16: 312", "{fp8: 312", "device_types.X.peak.fp8"),
        ("count: 3", "count: 900000", "nodes"),
    ],
)
def test_a_fault_stands_at_its_place_in_the_file(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    text = TEXT.replace(old, new)
    assert text != TEXT
    assert field in faults(text, tmp_path)


def test_the_name_of_an_entry_with_a_count_means_each_pair_of_its_nodes(tmp_path: Path) -> None:
    text = TEXT.replace("[a, b], bandwidth: 10Gbps", "[a, a], bandwidth: 10Gbps")
    cluster = read(text, tmp_path)
    a0, a1, b = (cluster.devices[d] for d in ("a0:0", "a1:0", "b:0"))
    assert cluster.link(a0, a1).latency_s == cluster.link(a1, a0).latency_s == 50e-6
    assert cluster.link(a0, b).latency_s == 30e-6
    assert cluster.link(a0, cluster.devices["a0:1"]).latency_s == 5e-6


def test_a_link_inside_every_node_that_needs_one_is_enough(tmp_path: Path) -> None:
    text = TEXT.replace("  intra_node: {bandwidth: 300GB/s, latency: 5us}\n", "")
    assert faults(text, tmp_path) == ["network.intra_node"]
    only_b = text.replace("count: 3", "count: 1")
    assert read(only_b, tmp_path).network.intra_node is None


def test_an_unknown_type_is_one_fault_for_each_entry_not_for_each_node(tmp_path: Path) -> None:
    text = TEXT.replace("{type: X, count: 3}", "{type: A100-4O, count: 3}")
    with pytest.raises(ConfigError) as error:
        read(text, tmp_path)
    (fault,) = error.value.faults
    assert fault.field == "nodes[0].devices[0].type"
    assert "did you mean A100-40?" in fault.message


def test_the_digest_follows_meaning_and_not_text(tmp_path: Path) -> None:
    one = read(TEXT, tmp_path)
    same = read("# a comment\n" + TEXT.replace("40GiB", "40960MiB"), tmp_path)
    other = read(TEXT.replace("40GiB", "41GiB"), tmp_path)
    assert one.digest() == same.digest() != other.digest()


def test_a_resolved_cluster_survives_json(tmp_path: Path) -> None:
    cluster = read(TEXT, tmp_path)
    assert serde.validate(Cluster, serde.to_data(cluster), "plan.json") == cluster


def test_a_cluster_checks_itself_too(tmp_path: Path) -> None:
    data = serde.to_data(read(TEXT, tmp_path))
    data["nodes"][1]["name"] = "a0"
    data["nodes"][2]["devices"][0]["type"] = "none"
    del data["network"]["inter_node"]
    with pytest.raises(ConfigError) as error:
        serde.validate(Cluster, data, "plan.json")
    fields = {fault.field for fault in error.value.faults}
    assert {"nodes[1].name", "nodes[2].devices[0].type", "network.inter_node"} <= fields
