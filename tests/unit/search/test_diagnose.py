"""What an infeasible search says lacks, and what it says would help: all of it is true."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from oracle.instances import make_instance
from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Cluster, DeviceGroup, Node
from eth_cli.errors import InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.cost import CostModel
from eth_cli.search.fit import Fitter
from eth_cli.search.memory import stage_memory
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.templates import Kind


def _error(profile: Profile, cluster: Cluster, total: int) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search(profile, cluster, SearchOptions(global_batch_size=total))
    return caught.value


def _with_node(cluster: Cluster, device_type: str, number: int) -> Cluster:
    node = Node(name="new", devices=(DeviceGroup(type=device_type, count=number),))
    return Cluster(
        name=cluster.name,
        device_types=cluster.device_types,
        nodes=(*cluster.nodes, node),
        network=cluster.network,
    )


def test_the_order_with_the_least_lack_is_found() -> None:
    # A 10 GB, B 6 GB; blocks of 3, 3.5 and 9.5 GB: the small device has to come first.
    profile = profile_of(
        blocks={"A": [(1.0, 2.0)] * 3, "B": [(1.0, 2.0)] * 3},
        parameters=[3 * 10**9 - 77, 35 * 10**8, 95 * 10**8 - 77],
        activations=[0, 0, 0],
        bytes_per_parameter=1.0,
    )
    memory = {"A": 10 * 10**9, "B": 6 * 10**9}
    cluster = cluster_of({"A": 1}, {"B": 1}, memory=memory)
    error = _error(profile, cluster, 4)
    assert "(B, A) puts blocks 0 to 1 (stage 0 of 2" in error.binding
    assert "500000000 bytes" in error.binding
    assert error.suggestion == "1 more B"
    report = search(profile, _with_node(cluster, "B", 1), SearchOptions(global_batch_size=4))
    (pipeline,) = report.plan.pipelines
    assert len(pipeline.stages) == 3


def _suggestion(profile: Profile, cluster: Cluster, options: SearchOptions) -> str | None:
    try:
        search(profile, cluster, options)
    except InfeasibleError as error:
        return error.suggestion
    return None


def test_suggested_devices_make_a_plan() -> None:
    num_applied = 0
    for seed in range(60):
        cluster, profile, total = make_instance(seed, max_devices=4, max_blocks=7)
        types = {
            name: t.model_copy(update={"memory_bytes": int(t.memory_bytes * 0.5)})
            for name, t in cluster.device_types.items()
        }
        tight = cluster.model_copy(update={"device_types": types})
        options = SearchOptions(global_batch_size=total, budget=1_000)
        suggestion = _suggestion(profile, tight, options)
        if suggestion is None:
            continue
        num_applied += 1
        found = re.search(r"(\d+) more (\w+)$", suggestion)
        if found is not None:
            search(profile, _with_node(tight, found[2], int(found[1])), options)
            continue
        assert "bytes more memory on every device" in suggestion, f"seed {seed}"
        more = int(suggestion.split()[0])
        types = {
            name: t.model_copy(update={"memory_bytes": t.memory_bytes + more})
            for name, t in types.items()
        }
        search(profile, cluster.model_copy(update={"device_types": types}), options)
    assert num_applied >= 10


def _brute_least_lack(
    model: CostModel, kinds: tuple[Kind, ...], micro_batches: int, size: int = 1
) -> int:
    """By trying all devices in all orders with all cuts."""
    profile, num_blocks = model.profile, model.profile.model.num_blocks
    devices = [k for k, kind in enumerate(kinds) for _ in range(kind.num_devices)]
    least = 2**60
    for num_stages in range(1, min(len(devices), num_blocks) + 1):
        for order in set(itertools.permutations(devices, num_stages)):
            for inner in itertools.combinations(range(1, num_blocks), num_stages - 1):
                worst = 0
                for s, (start, stop) in enumerate(itertools.pairwise((0, *inner, num_blocks))):
                    kind = kinds[order[s]]
                    memory = stage_memory(
                        profile,
                        model.tables.table(kind.device_type, 1, size),
                        start=start,
                        stop=stop,
                        num_in_flight=min(micro_batches, num_stages - s),
                    )
                    worst = max(worst, memory.total_bytes - kind.capacity_bytes)
                least = min(least, worst)
    return least


def _random_fitter(seed: int) -> tuple[CostModel, tuple[Kind, ...], int]:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 5)
    profile = profile_of(
        blocks={t: [(1.0, 2.0)] * num_blocks for t in "xy"},
        parameters=[rng.randint(1_000, 30_000) for _ in range(num_blocks)],
        activations=[rng.randint(10_000, 200_000) for _ in range(num_blocks)],
        boundary_bytes=rng.choice([0, 30_000]),
    )
    kinds = tuple(Kind(t, rng.randint(1, 2), rng.randint(100_000, 1_200_000)) for t in "xy")
    cluster = cluster_of(
        *({kind.device_type: kind.num_devices} for kind in kinds),
        memory={kind.device_type: kind.capacity_bytes for kind in kinds},
    )
    return CostModel(profile, cluster), kinds, rng.randint(1, 5)


def test_least_lack_and_fewest_devices_are_those_of_brute_force() -> None:
    num_lacking = num_grown = 0
    for seed in range(60):
        model, kinds, micro_batches = _random_fitter(seed)
        fitter = Fitter(model, kinds, micro_batch_size=1, micro_batches=micro_batches)
        fit = fitter.closest()
        assert fit is not None
        assert fit.lacking_bytes == _brute_least_lack(model, kinds, micro_batches), f"seed {seed}"
        if fit.lacking_bytes == 0:
            continue
        num_lacking += 1
        for k, kind in enumerate(kinds):
            needed = fitter.devices_needed(k)
            lacks = []
            for number in range(1, (needed or 3) + 1):
                grown = list(kinds)
                grown[k] = kind._replace(num_devices=kind.num_devices + number)
                lacks.append(_brute_least_lack(model, tuple(grown), micro_batches))
            assert all(lacks[:-1])
            assert (lacks[-1] == 0) is (needed is not None), f"seed {seed}"
            num_grown += needed is not None
    assert num_lacking >= 20
    assert num_grown >= 10


def test_some_orders_only_claim_what_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where count vectors are too many: a pipeline that exists, maybe not the nearest."""
    exact = []
    for seed in range(40):
        model, kinds, micro_batches = _random_fitter(seed)
        fit = Fitter(model, kinds, micro_batch_size=1, micro_batches=micro_batches).closest()
        assert fit is not None
        exact.append(fit.lacking_bytes)
    monkeypatch.setattr("eth_cli.search.fit._MAX_VECTORS", 0)
    num_equal = 0
    for seed, least in enumerate(exact):
        model, kinds, micro_batches = _random_fitter(seed)
        fitter = Fitter(model, kinds, micro_batch_size=1, micro_batches=micro_batches)
        fit = fitter.closest()
        assert fit is not None
        assert fit.lacking_bytes >= least
        num_equal += fit.lacking_bytes == least
        for k, kind in enumerate(kinds):
            needed = fitter.devices_needed(k)
            if needed:
                grown = list(kinds)
                grown[k] = kind._replace(num_devices=kind.num_devices + needed)
                assert _brute_least_lack(model, tuple(grown), micro_batches) == 0
    assert num_equal > 20
    tight = cluster_of({"x": 1}, memory_bytes=20_000)
    error = _error(profile_of(blocks={"x": [(1.0, 2.0)] * 2}), tight, 2)
    assert error.binding.startswith("the closest single pipeline found (x)")


@pytest.mark.timeout(20)
def test_many_blocks_and_devices_take_no_time_to_speak_of() -> None:
    blocks = {t: [(1.0, 2.0)] * 82 for t in "xy"}
    profile = profile_of(blocks=blocks, parameters=[10**9] * 82)
    cluster = cluster_of({"x": 32}, {"y": 32}, memory={"x": 8 * 10**9, "y": 17 * 10**9})
    error = _error(profile, cluster, 64)
    assert "are lacking" in error.binding
    assert error.suggestion.endswith("50 more y")
