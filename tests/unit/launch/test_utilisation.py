"""What a running job does with its devices."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from builders import make_cluster, make_plan

from eth_cli.cluster import Cluster
from eth_cli.events import Scalar, read_events
from eth_cli.launch.runtime.journal import Journal
from eth_cli.launch.status import Status, StatusWriter, read_status
from eth_cli.launch.utilisation import Gauge, Utilisation
from eth_cli.model_sources import load_model
from eth_cli.plan import Plan

GIB = 2**30


def with_model(cluster: Cluster | None) -> Plan:
    return make_plan().model_copy(update={"cluster": cluster, "model_spec": load_model("gpt2")})


def cluster_with(*, peak: float | None, emulated: bool = False) -> Cluster:
    cluster = make_cluster(emulated=emulated)
    types = {
        name: kind.model_copy(
            update={"peak_flops": {} if peak is None else {"fp32": peak}, "memory_bytes": 8 * GIB}
        )
        for name, kind in cluster.device_types.items()
    }
    return cluster.model_copy(update={"device_types": types})


def status(rank: int, *, busy_share: float | None = None, memory: int | None = None) -> Status:
    return Status(
        rank=rank,
        pid=1,
        state="training",
        step=3,
        operation="SYNC",
        waits=True,
        time_s=0.0,
        memory_bytes=memory,
        busy_share=busy_share,
    )


def test_mfu_is_the_textbook_s_six_flop_a_parameter_and_token() -> None:
    plan = with_model(cluster_with(peak=2e12))
    used = Gauge(plan).read({}, step_time_s=0.5)
    spec = plan.model_spec
    assert spec is not None
    # 6 N a token, and 12 x layers x hidden x sequence for attention (PaLM, appendix B). Tables
    # that are looked up cost nothing: the embedding is tied to the head, positions are small.
    positions = spec.max_positions * spec.hidden_size
    per_token = 6 * (spec.num_parameters - positions) + 12 * 12 * spec.hidden_size * plan.seq_len
    tokens = plan.global_batch_size * plan.seq_len
    assert used.mfu == pytest.approx(per_token * tokens / 0.5 / (4 * 2e12), rel=0.005)


@pytest.mark.parametrize(
    "cluster", [None, cluster_with(peak=None), cluster_with(peak=1e12, emulated=True)]
)
def test_without_a_peak_of_every_device_there_is_no_mfu(cluster: Cluster | None) -> None:
    assert Gauge(with_model(cluster)).read({}, step_time_s=0.5).mfu is None


def test_memory_is_of_the_rank_nearest_to_its_capacity() -> None:
    cluster = cluster_with(peak=None)
    first = cluster.devices[make_plan().ranks[0].device].type
    types = dict(cluster.device_types)
    types[first] = types[first].model_copy(update={"memory_bytes": 2 * GIB})
    gauge = Gauge(with_model(cluster.model_copy(update={"device_types": types})))
    statuses = {0: status(0, memory=GIB), 3: status(3, memory=3 * GIB), 2: status(2)}
    used = gauge.read(statuses, step_time_s=0.5)
    assert used.memory_bytes == GIB
    assert used.memory_share == pytest.approx(0.5)


def test_processes_that_play_devices_have_no_share_of_their_memory() -> None:
    gauge = Gauge(with_model(cluster_with(peak=None, emulated=True)))
    used = gauge.read({0: status(0, memory=GIB), 3: status(3, memory=3 * GIB)}, step_time_s=0.5)
    assert (used.memory_bytes, used.memory_share) == (3 * GIB, None)


def test_the_busy_share_is_a_mean_over_those_that_told() -> None:
    gauge = Gauge(with_model(None))
    statuses = {0: status(0, busy_share=0.9), 1: status(1, busy_share=0.5), 2: status(2)}
    assert gauge.read(statuses, step_time_s=1.0).busy_share == pytest.approx(0.7)
    assert gauge.read({}, step_time_s=1.0) == Utilisation()


def test_a_rank_tells_its_memory_and_its_busy_share(tmp_path: Path) -> None:
    place = make_plan().ranks[1]
    events = tmp_path / "events.jsonl"
    journal = Journal(
        place=place, status=StatusWriter(tmp_path / "status", rank=1), events_path=events
    )
    journal.begin("start")
    first = read_status(tmp_path / "status")
    assert first is not None
    assert (first.memory_bytes, first.busy_share) == (None, None)
    for step, memory in ((1, 500), (2, 500), (3, 700)):
        journal.enter("training", step=step)
        start_s = time.time() - 2.0
        journal.span("F", start_s, start_s + 0.5, micro_batch=0)
        journal.span("B", start_s + 0.5, start_s + 1.5, micro_batch=0)
        journal.span("OPTIMIZER", start_s + 1.5, start_s + 1.75)
        journal.end_step(start_s, memory_bytes=memory)
        journal.flush()
    journal.begin("READ")
    told = read_status(tmp_path / "status")
    assert told is not None
    assert told.memory_bytes == 700
    assert told.busy_share == pytest.approx(0.75, abs=0.02)
    scalars = [event for event in read_events(events) if isinstance(event, Scalar)]
    # Only where it grew.
    assert [(s.step, s.value) for s in scalars] == [(1, 500), (3, 700)]
    assert len([1 for line in events.read_text().splitlines() if json.loads(line)]) == 3 * 4 + 2
