"""What an infeasible search says lacks, and what it says would help: all of it is true."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from oracle.instances import Instance, make_instance, make_whole_instance
from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Cluster, DeviceGroup, Node
from eth_cli.errors import InfeasibleError
from eth_cli.plan import Plan
from eth_cli.profile.table import Profile
from eth_cli.search.cost import CostModel
from eth_cli.search.fit import Fit, Fitter, placed_alone
from eth_cli.search.memory import stage_memory
from eth_cli.search.placed import to_plan_pipelines
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.request import problem_of
from eth_cli.search.simulate import simulate
from eth_cli.search.templates import Kind


def _error(profile: Profile, cluster: Cluster, total: int) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search(profile, cluster, SearchOptions(global_batch_size=total))
    return caught.value


def _with_node(cluster: Cluster, device_type: str, number: int, name: str = "new") -> Cluster:
    node = Node(name=name, devices=(DeviceGroup(type=device_type, count=number),))
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


@pytest.mark.parametrize("make", [make_instance, make_whole_instance])
def test_suggested_changes_make_a_plan(make: Callable[..., Instance]) -> None:
    num_applied = 0
    for seed in range(60):
        cluster, profile, total = make(seed, max_devices=4, max_blocks=7)
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
        found = re.search(r"(\d+) more (\w+)(?: in nodes of (\d+))?$", suggestion)
        if found is not None:
            number, size = int(found[1]), int(found[3] or 1)
            larger = tight
            for i, n in enumerate(_new_nodes(number, size)):
                larger = _with_node(larger, found[2], n, name=f"new{i}")
            search(profile, larger, options)
            continue
        assert "bytes more memory on every device" in suggestion, f"seed {seed}"
        more = int(suggestion.split()[0])
        types = {
            name: t.model_copy(update={"memory_bytes": t.memory_bytes + more})
            for name, t in types.items()
        }
        search(profile, cluster.model_copy(update={"device_types": types}), options)
    assert num_applied >= 10


def _new_nodes(number: int, size: int) -> list[int]:
    """So many devices in new nodes of a size."""
    return [size] * (number // size) + [number % size] * (number % size > 0)


def _has_room(widths: Sequence[int], nodes: Sequence[int]) -> bool:
    """Whether groups of these widths lie in nodes with so many devices, by trying every node."""
    if not widths:
        return True
    return any(
        _has_room(widths[1:], [*nodes[:i], n - widths[0], *nodes[i + 1 :]])
        for i, n in enumerate(nodes)
        if n >= widths[0]
    )


class Brute:
    """All groups of devices, recomputing or not, in all orders with all cuts, by memory alone."""

    def __init__(self, model: CostModel, options: SearchOptions, *, size: int = 1) -> None:
        self.model = model
        self.size = size
        self.types = sorted(model.cluster.device_types)
        self.makes = [
            (t, width, again)
            for t in self.types
            for width in model.profile.widths(t)
            if options.tensor_parallel is None or width in options.tensor_parallel
            for again in ((False, True) if options.recompute else (False,))
        ]
        self.nodes = {
            t: [
                n
                for node in model.cluster.nodes
                if (n := sum(group.count for group in node.devices if group.type == t))
            ]
            for t in self.types
        }

    def least_lack(self, micro_batches: int, more: Mapping[str, Sequence[int]] = {}) -> int | None:
        """Bytes that the nearest pipeline lacks, with new nodes of some types.

        None: no group has room in any node.
        """
        num_blocks = self.model.profile.model.num_blocks
        nodes = {t: [*self.nodes[t], *more.get(t, ())] for t in self.types}
        lacks = [
            self._lack(makes, cuts, micro_batches)
            for num_stages in range(1, min(sum(map(sum, nodes.values())), num_blocks) + 1)
            for makes in itertools.product(self.makes, repeat=num_stages)
            if all(_has_room([w for u, w, _ in makes if u == t], nodes[t]) for t in self.types)
            for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1)
        ]
        return max(0, min(lacks)) if lacks else None

    def _lack(
        self, makes: Sequence[tuple[str, int, bool]], cuts: Sequence[int], micro_batches: int
    ) -> int:
        profile = self.model.profile
        bounds = itertools.pairwise((0, *cuts, profile.model.num_blocks))
        return max(
            stage_memory(
                profile,
                self.model.tables.table(t, width, self.size),
                start=start,
                stop=stop,
                num_in_flight=min(micro_batches, len(makes) - s),
                recompute=again,
            ).total_bytes
            - self.model.cluster.device_types[t].memory_bytes
            for s, ((t, width, again), (start, stop)) in enumerate(zip(makes, bounds, strict=True))
        )


def _random_fitter(seed: int) -> tuple[Fitter, Brute, int]:
    """Narrow groups, wide ones, or both; nodes of odd sizes; recomputation now and then."""
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 4)
    profile = profile_of(
        blocks={t: [(1.0, 2.0)] * num_blocks for t in "xy"},
        parameters=[rng.randint(1_000, 30_000) for _ in range(num_blocks)],
        activations=[rng.randint(10_000, 200_000) for _ in range(num_blocks)],
        boundary_bytes=rng.choice([0, 30_000]),
        tensor_parallel=rng.choice([(1,), (1, 2), (2,), (1, 2)]),
    )
    memory = {t: rng.randint(100_000, 900_000) for t in "xy"}
    nodes = [{"x": rng.randint(1, 3)}, {"y": rng.randint(1, 2)}, {"x": 1, "y": 1}]
    cluster = cluster_of(*nodes[: rng.randint(2, 3)], memory=memory)
    model = CostModel(profile, cluster)
    options = SearchOptions(global_batch_size=rng.randint(1, 5), recompute=rng.random() < 0.3)
    counts = Counter(device.type for device in cluster.devices.values())
    kinds = [Kind(t, counts[t], memory[t]) for t in "xy"]
    fitter = Fitter(
        problem_of(model, options, kinds, [1]),
        micro_batch_size=1,
        micro_batches=options.global_batch_size,
    )
    return fitter, Brute(model, options), options.global_batch_size


NUM_FITTERS = 120


def test_least_lack_and_fewest_devices_are_those_of_brute_force() -> None:
    num_lacking = num_grown = num_wide = num_recomputed = 0
    for seed in range(NUM_FITTERS):
        fitter, brute, micro_batches = _random_fitter(seed)
        fit = fitter.closest()
        least = brute.least_lack(micro_batches)
        if fit is None:
            assert least is None, f"seed {seed}"
            continue
        assert fitter.is_exact
        assert fit.lacking_bytes == least, f"seed {seed}"
        num_wide += any(stage.tensor_parallel > 1 for stage in fit.stages)
        num_recomputed += any(stage.recompute for stage in fit.stages)
        if fit.lacking_bytes == 0:
            continue
        num_lacking += 1
        for k, kind in enumerate(fitter.kinds):
            needed = fitter.devices_needed(k)
            size = max(brute.nodes[kind.device_type])
            lacks = [
                brute.least_lack(
                    micro_batches,
                    {kind.device_type: _new_nodes(number, size)},
                )
                for number in range(1, (needed.number if needed else 3) + 1)
            ]
            assert all(lacks[:-1])
            assert (lacks[-1] == 0) is (needed is not None), f"seed {seed}"
            if needed and needed.node_size == 1:
                apart = {kind.device_type: [1] * needed.number}
                assert brute.least_lack(micro_batches, apart) == 0
            num_grown += needed is not None
    assert num_lacking >= 15
    assert num_grown >= 10
    assert num_wide >= 10
    assert num_recomputed >= 3


def test_a_pipeline_that_fits_is_placed_and_planned() -> None:
    num_placed = 0
    for seed in range(NUM_FITTERS):
        fitter, brute, _ = _random_fitter(seed)
        fit = fitter.closest()
        if fit is None or fit.lacking_bytes > 0:
            continue
        num_placed += 1
        pipeline = placed_alone(fitter.problem, fit, 1)
        devices = [device.id for stage in pipeline.stages for device in stage.devices]
        assert len(set(devices)) == len(devices)
        assert all(len({d.node for d in stage.devices}) == 1 for stage in pipeline.stages)
        placed = [(len(s.devices), s.start, s.stop, s.recompute) for s in pipeline.stages]
        assert placed == [(s.tensor_parallel, s.start, s.stop, s.recompute) for s in fit.stages]
        plan = Plan(
            schema_version=1,
            model="table",
            seq_len=8,
            dtype="fp32",
            global_batch_size=pipeline.micro_batches,
            pipelines=to_plan_pipelines((pipeline,)),
        )
        assert not simulate(plan, brute.model.profile, brute.model.cluster).excesses
    assert num_placed >= 20


def test_some_orders_only_claim_what_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vectors of groups are too many: a pipeline that exists, maybe not the nearest."""
    exact = [fit and fit.lacking_bytes for fit in _closest()]
    monkeypatch.setattr("eth_cli.search.fit._MAX_VECTORS", 0)
    num_equal = 0
    for seed, (least, fit) in enumerate(zip(exact, _closest(), strict=True)):
        if fit is None:
            assert least is None
            continue
        assert least is not None
        assert fit.lacking_bytes >= least
        num_equal += fit.lacking_bytes == least
        fitter, brute, micro_batches = _random_fitter(seed)
        for k, kind in enumerate(fitter.kinds):
            needed = fitter.devices_needed(k)
            if needed:
                size = max(brute.nodes[kind.device_type])
                more = {kind.device_type: _new_nodes(needed.number, size)}
                assert brute.least_lack(micro_batches, more) == 0
    assert num_equal > NUM_FITTERS // 2
    tight = cluster_of({"x": 1}, memory_bytes=20_000)
    error = _error(profile_of(blocks={"x": [(1.0, 2.0)] * 2}), tight, 2)
    assert error.binding.startswith("the closest single pipeline found (x)")


def _closest() -> list[Fit | None]:
    return [_random_fitter(seed)[0].closest() for seed in range(NUM_FITTERS)]


def test_only_a_wide_group_fits() -> None:
    # A block of 9 GB a device; a group of two holds 4.5 GB of it each.
    profile = profile_of(
        blocks={"A": [(1.0, 2.0)] * 2},
        parameters=[9 * 10**9] * 2,
        activations=[0, 0],
        bytes_per_parameter=1.0,
        tensor_parallel=(1, 2),
    )
    cluster = cluster_of({"A": 2}, {"A": 1}, {"A": 1}, memory_bytes=5 * 10**9)
    error = _error(profile, cluster, 2)
    assert "(A in groups of 2)" in error.binding
    assert "on a tensor-parallel group of 2 A: each needs 8.4 GiB, A has 4.7 GiB" in error.binding
    assert error.suggestion == "2 more A in nodes of 2"
    report = search(profile, _with_node(cluster, "A", 2), SearchOptions(global_batch_size=2))
    (pipeline,) = report.plan.pipelines
    assert [len(stage.devices) for stage in pipeline.stages] == [2, 2]
    narrow = SearchOptions(global_batch_size=2, tensor_parallel=(1,))
    with pytest.raises(InfeasibleError) as caught:
        search(profile, _with_node(cluster, "A", 2), narrow)
    assert "leave out --tensor-parallel" in caught.value.suggestion


def test_widths_that_do_not_divide_each_other_are_not_called_exact() -> None:
    profile = profile_of(
        blocks={"A": [(1.0, 2.0)] * 2}, parameters=[10**6] * 2, tensor_parallel=(2, 3)
    )
    cluster = cluster_of({"A": 3}, {"A": 2}, memory_bytes=10**6)
    error = _error(profile, cluster, 2)
    assert error.binding.startswith("the closest single pipeline found (")
    roomy = cluster_of({"A": 3}, {"A": 2}, memory_bytes=2 * 10**7)
    report = search(profile, roomy, SearchOptions(global_batch_size=2))
    assert {len(s.devices) for p in report.plan.pipelines for s in p.stages} <= {2, 3}


def test_no_node_with_room_for_a_group_is_said_so() -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)] * 2}, tensor_parallel=(2,))
    error = _error(profile, cluster_of({"A": 1}, {"A": 1}), 2)
    assert "needs 2 A in one node" in error.binding
    assert "no entries" not in error.binding


@pytest.mark.timeout(20)
def test_many_blocks_and_devices_take_no_time_to_speak_of() -> None:
    blocks = {t: [(1.0, 2.0)] * 82 for t in "xy"}
    profile = profile_of(blocks=blocks, parameters=[10**9] * 82)
    cluster = cluster_of({"x": 32}, {"y": 32}, memory={"x": 8 * 10**9, "y": 17 * 10**9})
    error = _error(profile, cluster, 64)
    assert "are lacking" in error.binding
    assert error.suggestion.endswith("50 more y")
