"""Why devices are unused: what is tried, and that the reason given is the true one."""

from __future__ import annotations

from unit.search.problems import cluster_of, profile_of

from eth_cli.cluster import Cluster
from eth_cli.profile.table import Profile
from eth_cli.search.cost import CostModel
from eth_cli.search.heuristic import with_one_more
from eth_cli.search.planner import SearchOptions, search
from eth_cli.search.request import problem_of
from eth_cli.search.templates import Kind, Problem, Template, TemplateStage


def problem(profile: Profile, cluster: Cluster, kinds: dict[str, int], total: int) -> Problem:
    """The problem of all devices of a cluster."""
    made = [Kind(t, n, cluster.device_types[t].memory_bytes) for t, n in kinds.items()]
    options = SearchOptions(global_batch_size=total)
    return problem_of(CostModel(profile, cluster), options, made, profile.micro_batch_sizes)


def test_one_more_pipeline_is_not_tried_where_there_may_be_none() -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)]})
    asked = problem(profile, cluster_of({"A": 2}), {"A": 2}, 4)
    alone = Template(1, (TemplateStage(0, 0, 1),))
    free = with_one_more(asked, [alone], 0)
    assert free.pipelines is not None
    assert len(free.pipelines) == 2
    assert with_one_more(asked, [alone], 0, max_pipelines=2).time_s == free.time_s
    assert with_one_more(asked, [alone], 0, max_pipelines=1).pipelines is None


def test_the_limit_on_pipelines_is_the_reason() -> None:
    # One block: a second device is of use to a second pipeline only.
    profile = profile_of(blocks={"A": [(1.0, 2.0)]})
    options = SearchOptions(global_batch_size=4, max_pipelines=1)
    report = search(profile, cluster_of({"A": 2}), options)
    (unused,) = report.plan.unused_devices
    assert "a plan may have 1 pipelines at most" in unused.reason


def test_of_a_type_that_has_wide_groups_only_a_group_more_is_tried() -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)] * 2}, tensor_parallel=(2,))
    asked = problem(profile, cluster_of({"A": 4}), {"A": 4}, 4)
    alone = Template(1, (TemplateStage(0, 0, 2, 2),))
    found = with_one_more(asked, [alone], 0)
    assert found.pipelines is not None
    assert sum(len(s.devices) for p in found.pipelines for s in p.stages) == 4


def test_a_device_that_is_left_over_is_said_to_be() -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)] * 2}, tensor_parallel=(2,))
    report = search(profile, cluster_of({"A": 3}), SearchOptions(global_batch_size=4))
    (unused,) = report.plan.unused_devices
    assert unused.device == "n0:2"
    assert "needs 2 A in one node" in unused.reason
    assert "no node has more than 1 left" in unused.reason


def test_a_size_that_is_profiled_at_a_wider_width_only_is_planned_with() -> None:
    """Micro-batches of 1 on single devices are slow, of 4 on groups of two are fast."""
    profile = profile_of(
        blocks={"A": [(1.0, 2.0)] * 2}, micro_batch_sizes=(1, 4), tensor_parallel=(1, 2)
    )
    kept = [
        e for e in profile.compute if (e.tensor_parallel, e.micro_batch_size) in {(1, 1), (2, 4)}
    ]
    fast = [e.model_copy(update={"forward_s": 0.1, "backward_s": 0.2}) for e in kept]
    compute = tuple(f if e.tensor_parallel == 2 else e for e, f in zip(kept, fast, strict=True))
    odd = profile.model_copy(update={"compute": compute})
    report = search(odd, cluster_of({"A": 3}), SearchOptions(global_batch_size=8))
    wide = [p for p in report.plan.pipelines if p.micro_batch_size == 4]
    assert wide
    assert all(len(stage.devices) == 2 for p in wide for stage in p.stages)
    assert all(r.step_time_s is None or r.step_time_s >= report.step_time_s for r in report.rivals)


def test_baselines_say_why_a_type_with_wide_groups_only_has_none() -> None:
    profile = profile_of(blocks={"A": [(1.0, 2.0)] * 2}, tensor_parallel=(2,))
    report = search(profile, cluster_of({"A": 2}), SearchOptions(global_batch_size=4))
    assert {rival.step_time_s for rival in report.rivals} == {None}
    assert all("no entries of A at tensor-parallel width 1" in r.note for r in report.rivals)
