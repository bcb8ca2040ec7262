"""A plan as ranks on hosts, and which backend may run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_cluster, make_pipeline, make_plan

from eth_cli.errors import ConfigError
from eth_cli.launch.backends.registry import load_backend
from eth_cli.launch.config import RunFolder
from eth_cli.launch.job import THIS_MACHINE, NodeTask, make_job
from eth_cli.plan import Plan

FOLDER = RunFolder("/runs/first")


def on_cluster(plan: Plan, *, emulated: bool, hosts: dict[str, str] | None = None) -> Plan:
    """The plan with `make_cluster`'s cluster in it."""
    cluster = make_cluster(emulated=emulated)
    nodes = tuple(n.model_copy(update={"host": (hosts or {}).get(n.name)}) for n in cluster.nodes)
    return plan.model_copy(update={"cluster": cluster.model_copy(update={"nodes": nodes})})


def test_emulated_nodes_are_all_played_by_this_machine() -> None:
    job = make_job(on_cluster(make_plan(), emulated=True), FOLDER)
    assert job.tasks == (NodeTask(host=THIS_MACHINE, nodes=("a", "b"), num_ranks=4),)
    assert job.num_ranks == 4
    assert job.args == ("/runs/first",)


def test_case_44_each_real_node_gets_as_many_ranks_as_it_has_devices_in_the_plan() -> None:
    plan = make_plan(
        pipelines=(
            make_pipeline(devices=("b:1", "a:0"), cuts=(3,)),
            make_pipeline(devices=("b:0",), micro_batches=2),
        )
    )
    job = make_job(on_cluster(plan, emulated=False, hosts={"a": "10.0.0.7"}), FOLDER)
    assert job.tasks == (
        NodeTask(host="b", nodes=("b",), num_ranks=2),
        NodeTask(host="10.0.0.7", nodes=("a",), num_ranks=1),
    )


def test_case_44_ranks_follow_the_identity_of_devices_not_the_order_of_stages() -> None:
    plan = make_plan(
        pipelines=(
            make_pipeline(devices=("b:1", "a:1"), cuts=(3,)),
            make_pipeline(devices=("a:0", "b:0"), cuts=(5,), micro_batches=2),
        )
    )
    job = make_job(plan, FOLDER)
    # torchrun numbers node by node, and on a node by local rank: so does the plan.
    assert [place.device for place in job.places] == ["b:0", "b:1", "a:0", "a:1"]
    assert [(place.pipeline, place.stage) for place in job.places] == [
        (1, 1),
        (0, 0),
        (1, 0),
        (0, 1),
    ]


def test_a_plan_of_one_node_runs_here_even_without_a_cluster() -> None:
    plan = make_plan(pipelines=(make_pipeline(devices=("x:0", "x:3"), cuts=(3,)),))
    assert make_job(plan, FOLDER).tasks == (NodeTask(host=THIS_MACHINE, nodes=("x",), num_ranks=2),)


def test_local_refuses_real_nodes_by_name() -> None:
    backend = load_backend("local")
    with pytest.raises(ConfigError, match=r"uses 2 nodes \(a, b\)"):
        backend.render(make_job(on_cluster(make_plan(), emulated=False), FOLDER))


@pytest.mark.parametrize("name", ["ssh", "slurm", "kubernetes"])
def test_backends_to_come_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_backend(name)
    assert str(caught.value) == f"--backend: {name} is not implemented yet; use local"


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="use one of local, ssh, slurm, kubernetes"):
        load_backend("locale")


def test_rendering_touches_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    load_backend("local").render(make_job(on_cluster(make_plan(), emulated=True), folder))
    assert list(tmp_path.iterdir()) == []
