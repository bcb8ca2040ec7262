"""What must hold for every small problem: names do not matter, more never hurts, time scales."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.instances import Instance, make_whole_instance

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, SearchReport, search

few = settings(max_examples=25, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 5_000)


def answer(cluster: Cluster, profile: Profile, total: int) -> SearchReport | None:
    """The best plan; None: there is none."""
    try:
        return search(profile, cluster, SearchOptions(global_batch_size=total))
    except InfeasibleError:
        return None


def changed(record: Any, edit: Any) -> Any:
    """A record with its data edited in place."""
    data = serde.to_data(record)
    edit(data)
    return serde.validate(type(record), data, "changed")


def small(seed: int) -> Instance:
    """Within reach of the proof."""
    return make_whole_instance(seed, max_devices=4, max_blocks=5)


def is_no_worse(after: SearchReport | None, before: SearchReport | None) -> None:
    """Proved answers do not get worse; others not by more than the gap that they state."""
    if before is None:
        return
    assert after is not None
    allowed = 1e-9 if after.status == "optimal" else after.gap + 1e-9
    assert after.step_time_s <= before.step_time_s * (1 + allowed)


@few
@given(seeds)
def test_same_inputs_same_bytes(seed: int) -> None:
    cluster, profile, total = small(seed)
    first, second = (answer(cluster, profile, total) for _ in range(2))
    if first is not None:
        assert second is not None
        texts = [serde.dump_json(serde.to_data(report.plan)) for report in (first, second)]
        assert texts[0] == texts[1]
        assert first.bound_s <= first.step_time_s


@few
@given(seeds)
def test_names_and_places_of_nodes_change_nothing_else(seed: int) -> None:
    cluster, profile, total = small(seed)
    new = {node.name: f"z{i}" for i, node in enumerate(reversed(cluster.nodes))}

    def edit(data: dict[str, Any]) -> None:
        random.Random(seed).shuffle(data["nodes"])
        for node in data["nodes"]:
            node["name"] = new[node["name"]]
        for override in data["network"].get("overrides", []):
            override["between"] = [new[name] for name in override["between"]]

    before = answer(cluster, profile, total)
    after = answer(changed(cluster, edit), profile, total)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.step_time_s == before.step_time_s
        assert after.status == before.status
        assert shapes(after, changed(cluster, edit)) == shapes(before, cluster)


def shapes(report: SearchReport, cluster: Cluster) -> list[str]:
    """Pipelines with the types of their devices instead of the names."""
    return sorted(
        repr(
            (
                p.num_samples,
                p.micro_batch_size,
                [
                    (s.blocks, s.recompute, [cluster.devices[d].type for d in s.devices])
                    for s in p.stages
                ],
            )
        )
        for p in report.plan.pipelines
    )


@few
@given(seeds)
def test_a_faster_device_never_hurts(seed: int) -> None:
    cluster, profile, total = small(seed)
    faster = random.Random(seed).choice(profile.device_types)

    def edit(data: dict[str, Any]) -> None:
        for entry in data["compute"]:
            if entry["device"] == faster:
                entry["forward_s"] *= 0.8
                entry["backward_s"] *= 0.7

    before = answer(cluster, profile, total)
    is_no_worse(answer(cluster, changed(profile, edit), total), before)


@few
@given(seeds)
def test_more_memory_never_hurts(seed: int) -> None:
    cluster, profile, total = small(seed)

    def edit(data: dict[str, Any]) -> None:
        larger = random.Random(seed).choice(sorted(data["device_types"]))
        data["device_types"][larger]["memory_bytes"] *= 2

    before = answer(cluster, profile, total)
    is_no_worse(answer(changed(cluster, edit), profile, total), before)


@few
@given(seeds)
def test_one_more_device_never_hurts(seed: int) -> None:
    cluster, profile, total = small(seed)

    def edit(data: dict[str, Any]) -> None:
        group = random.Random(seed).choice(data["nodes"])["devices"][0]
        group["count"] = group.get("count", 1) + 1

    before = answer(cluster, profile, total)
    is_no_worse(answer(changed(cluster, edit), profile, total), before)


@few
@given(seeds)
def test_faster_links_never_hurt(seed: int) -> None:
    cluster, profile, total = small(seed)

    def faster(link: dict[str, Any]) -> None:
        link["latency_s"] *= 0.5
        link["bandwidth_bytes_per_s"] *= 2

    def edit(data: dict[str, Any]) -> None:
        for link in [data["network"]["intra_node"], data["network"]["inter_node"]]:
            faster(link)

    before = answer(cluster, profile, total)
    is_no_worse(answer(changed(cluster, edit), profile, total), before)


@few
@given(seeds, st.sampled_from([0.25, 4.0]))
def test_scaled_times_scale_the_step_and_nothing_else(seed: int, factor: float) -> None:
    cluster, profile, total = small(seed)

    def scale_link(link: dict[str, Any]) -> None:
        if link.get("latency_s") is not None:
            link["latency_s"] *= factor
        if link.get("bandwidth_bytes_per_s") is not None:
            link["bandwidth_bytes_per_s"] /= factor
        if link.get("table") is not None:
            link["table"] = [[size, time_s * factor] for size, time_s in link["table"]]

    def scale_profile(data: dict[str, Any]) -> None:
        for entry in data["compute"]:
            entry["forward_s"] *= factor
            entry["backward_s"] *= factor
        for entry in data["devices"]:
            entry["optimizer_s_per_parameter"] *= factor
        for link in data.get("links", []):
            scale_link(link)

    def scale_cluster(data: dict[str, Any]) -> None:
        network = data["network"]
        overrides = [override["link"] for override in network.get("overrides", [])]
        for link in [network["intra_node"], network["inter_node"], *overrides]:
            scale_link(link)

    before = answer(cluster, profile, total)
    after = answer(changed(cluster, scale_cluster), changed(profile, scale_profile), total)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.step_time_s == before.step_time_s * factor
        assert after.plan.pipelines == before.plan.pipelines
        assert after.status == before.status
