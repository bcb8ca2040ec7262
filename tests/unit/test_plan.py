"""What a plan checks by itself, and the questions that planner and runtime ask it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import make_cluster, make_pipeline, make_plan

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.model_sources import PRESETS
from eth_cli.plan import Plan, Segment, read_plan, write_plan

Change = Callable[[dict[str, Any]], None]


def faults(change: Change) -> list[tuple[str, str]]:
    """Field and message of each fault of a plan that was changed."""
    data = serde.to_data(make_plan())
    change(data)
    with pytest.raises(ConfigError) as error:
        serde.validate(Plan, data, "plan.json")
    return [(fault.field, fault.message) for fault in error.value.faults]


def stage(data: dict[str, Any], pipeline: int, index: int) -> dict[str, Any]:
    """A stage's data."""
    found: dict[str, Any] = data["pipelines"][pipeline]["stages"][index]
    return found


def set_blocks(pipeline: int, index: int, start: int, stop: int) -> Change:
    """Move a stage's cuts."""
    return lambda data: stage(data, pipeline, index).update(blocks=[start, stop])


def set_devices(pipeline: int, index: int, *devices: str) -> Change:
    """Change a stage's devices."""
    return lambda data: stage(data, pipeline, index).update(devices=list(devices))


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (set_blocks(0, 1, 7, 8), "pipelines[0].stages[1].blocks", "blocks 6 to 6 are missing"),
        (set_blocks(0, 0, 1, 6), "pipelines[0].stages[0].blocks", "blocks 0 to 0 are missing"),
        (set_blocks(1, 1, 4, 8), "pipelines[1].stages[1].blocks", "block 4 is already placed"),
        (set_blocks(1, 0, 5, 5), "pipelines[1].stages[0].blocks", "holds no block"),
        (set_blocks(1, 1, 5, 9), "pipelines[0].stages", "end at block 8"),
        (set_devices(0, 1, "a:1"), "pipelines[1].stages[0].devices", '"a:1" is used twice'),
        (set_devices(0, 0, "a:0", "a:0"), "pipelines[0].stages[0].devices", "used twice"),
        (set_devices(0, 0, "a:0", "c:0"), "pipelines[0].stages[0].devices", "nodes a, c"),
        (set_devices(0, 0, "a:x"), "pipelines[0].stages[0].devices", '"a:x" is not a device id'),
        (set_devices(0, 0, ":1"), "pipelines[0].stages[0].devices", '":1" is not a device id'),
        (lambda d: d.update(global_batch_size=9), "pipelines", "5 x 1 + 3 x 1 = 8 samples"),
    ],
)
def test_an_illegal_plan_is_one_fault_with_its_place(change: Change, field: str, says: str) -> None:
    found = faults(change)
    assert [at for at, _ in found] == [field]
    assert says in found[0][1]


def test_devices_must_exist_and_a_group_has_one_type() -> None:
    cluster = make_cluster(nodes={"a": {"fast": 1, "slow": 1}, "b": {"slow": 2}})
    plan = make_plan(pipelines=[make_pipeline(devices=("a:0", "b:5"), cuts=(4,))])
    with pytest.raises(ConfigError, match=r'"b:5" is not in cluster small: node b has 2 devices'):
        plan.check_cluster(cluster, file="p")
    data = serde.to_data(make_plan(pipelines=[make_pipeline(devices=("a:0",))]))
    data["pipelines"][0]["stages"][0]["devices"] = ["a:0", "a:1"]
    mixed = serde.validate(Plan, data, "p")
    with pytest.raises(ConfigError, match="mix fast and slow"):
        mixed.check_cluster(cluster, file="p")
    with pytest.raises(ConfigError, match="mix fast and slow"):
        serde.validate(Plan, data | {"cluster": serde.to_data(cluster)}, "p")


def test_the_model_carried_must_have_as_many_blocks() -> None:
    spec = PRESETS["gpt-tiny"]
    found = faults(lambda data: data.update(model_spec=serde.to_data(spec)))
    assert found == [("pipelines[0].stages", "cover 8 blocks, but model_spec has 10")]
    with pytest.raises(ConfigError, match="cover 8 blocks, but the model has 10"):
        make_plan().check_num_blocks(10, file="p", source="the model")


def test_ranks_follow_nodes_in_order_of_first_use() -> None:
    plan = make_plan(
        pipelines=[
            make_pipeline(devices=("b:1", "a:1"), cuts=(3,)),
            make_pipeline(devices=("a:0", "b:0", "c:0"), cuts=(2, 6)),
        ]
    )
    places = [(p.rank, p.device, p.pipeline, p.stage) for p in plan.ranks]
    assert places == [
        (0, "b:0", 1, 1),
        (1, "b:1", 0, 0),
        (2, "a:0", 1, 0),
        (3, "a:1", 0, 1),
        (4, "c:0", 1, 2),
    ]
    assert plan.ranks_of(1, 1) == (0,)


def test_segments_are_cut_at_the_union_of_all_cuts() -> None:
    plan = make_plan()  # cut at 6 and at 5; ranks: a:0 0, a:1 1, b:0 2, b:1 3
    assert plan.segments == (
        Segment(0, 5, (0, 1)),
        Segment(5, 6, (0, 3)),
        Segment(6, 8, (2, 3)),
    )
    assert plan.block_owners(5) == (0, 3)
    assert plan.num_blocks == 8


def test_the_digest_is_of_what_is_executed() -> None:
    plan = make_plan()
    told = serde.to_data(plan) | {
        "predicted": {"step_time_s": 1.5, "tokens_per_s": 7.0},
        "solver": {"status": "optimal", "bound_s": 1.5, "gap": 0.0, "wall_s": 1.0},
        "unused_devices": [{"device": "b:1", "reason": "slow"}],
        "provenance": {"version": "0"},
    }
    assert serde.validate(Plan, told, "p").digest() == plan.digest()
    other = make_plan(pipelines=[make_pipeline(devices=("a:0", "b:0"), cuts=(5,))])
    assert other.digest() != plan.digest()


def test_a_plan_survives_its_file_with_the_same_bytes(tmp_path: Path) -> None:
    plan = make_plan()
    write_plan(tmp_path / "a.json", plan)
    write_plan(tmp_path / "b.json", read_plan(tmp_path / "a.json"))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_plan_too_long_to_run_is_refused_before_its_schedule_is_made() -> None:
    def make_long(data: dict[str, Any]) -> None:
        pipeline = data["pipelines"][0]
        data["global_batch_size"] += pipeline["micro_batch_size"] * (
            10**8 - pipeline["micro_batches"]
        )
        pipeline["micro_batches"] = 10**8

    ((field, message),) = faults(make_long)
    assert field == "pipelines[0].micro_batches"
    assert "100000000" in message
    assert "1000000 are run" in message
