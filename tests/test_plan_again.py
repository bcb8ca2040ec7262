"""`eth plan --from`, `--lost` and `--pin`, and Ctrl-C, through the real command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_profile
from test_bad_input import CLUSTER, MODEL, run

from benchmarks.problems import mixed_cluster
from benchmarks.problems import profile as problem_profile
from eth_cli import serde
from eth_cli.plan import read_plan
from eth_cli.profile.table import write_profile

FILES = "--cluster cluster.yaml --profile profile.json"
SEARCH = f"plan {FILES} --global-batch-size 24"
AGAIN = f"plan --from plan.json {FILES}"


@pytest.fixture(autouse=True)
def _files(in_tmp_path: Path) -> None:
    """Three nodes of two devices each."""
    cluster: dict[str, Any] = {**CLUSTER, "nodes": [*CLUSTER["nodes"]]}
    cluster["nodes"].append({"name": "c", "devices": [{"type": "fast", "count": 2}]})
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    Path("model.yaml").write_text(yaml.safe_dump(MODEL))
    serde.write_json("profile.json", make_profile())


@pytest.fixture
def old(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """A plan, in plan.json too."""
    assert run([*SEARCH.split(), "-o", "plan.json"]) == 0
    capsys.readouterr()
    data: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return data


def plan(line: str, capsys: pytest.CaptureFixture[str], *pins: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    words = [word for pin in pins for word in ("--pin", pin)]
    assert run([*line.split(), "--json", *words]) == 0, capsys.readouterr().err
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def fails(line: str, code: int, capsys: pytest.CaptureFixture[str], *pins: str) -> str:
    """The one line of a command that fails."""
    words = [word for pin in pins for word in ("--pin", pin)]
    assert run([*line.split(), *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


def used(data: dict[str, Any]) -> set[str]:
    """Devices of a plan."""
    return {d for p in data["pipelines"] for s in p["stages"] for d in s["devices"]}


def cuts(pipeline: dict[str, Any]) -> list[int]:
    """Where its stages begin, but for the first."""
    return [stage["blocks"][0] for stage in pipeline["stages"][1:]]


def devices(pipeline: dict[str, Any]) -> list[list[str]]:
    """Its stages' devices."""
    return [stage["devices"] for stage in pipeline["stages"]]


@pytest.mark.usefixtures("old")
def test_lost_devices_stay_lost_and_excluded_ones_excluded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = plan(f"{AGAIN} --lost a:0 --exclude b:1 -o next.json", capsys)
    assert not used(first) & {"a:0", "b:1"}
    reasons = {u["device"]: u["reason"] for u in first["unused_devices"]}
    assert reasons["a:0"] == "lost"
    assert reasons["b:1"] == "excluded by --exclude b:1"
    second = plan(f"plan --from next.json {FILES} --lost c", capsys)
    assert used(second) <= {"a:1", "b:0"}
    reasons = {u["device"]: u["reason"] for u in second["unused_devices"]}
    assert [reasons[d] for d in ("a:0", "c:0", "c:1")] == ["lost"] * 3
    assert reasons["b:1"] == "excluded by --exclude b:1"
    assert second["provenance"]["options"]["lost"] == ["a:0", "c:0", "c:1"]
    assert run(["simulate", "next.json", *FILES.split()]) == 0


def test_what_moves_is_said_in_words_and_as_data(
    old: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    moves = plan(f"{AGAIN} --lost c", capsys)["moves"]
    blocks = sum(moves[f"blocks_{what}"] for what in ("kept", "sent", "read"))
    assert blocks >= 8
    assert (moves["blocks_sent"] == 0) == (moves["sent_bytes"] == 0)
    assert not moves["is_fresh_search"]
    assert run([*AGAIN.split(), "--lost", "c"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "unused: c:0-1: lost" in text
    assert f"from plan.json: of {blocks} blocks on devices" in text or "stay where they" in text
    same = plan(AGAIN, capsys)
    assert same["global_batch_size"] == old["global_batch_size"]
    assert same["predicted"]["step_time_s"] <= old["predicted"]["step_time_s"] * 1.005


@pytest.mark.usefixtures("old")
def test_limits_of_the_old_plan_hold_again(capsys: pytest.CaptureFixture[str]) -> None:
    limits = "--max-pipelines 1 --micro-batch-size 2 --no-recompute"
    plan(f"{SEARCH} {limits} -o plan.json", capsys)
    data = plan(f"{AGAIN} --lost b", capsys)
    assert [p["micro_batch_size"] for p in data["pipelines"]] == [2]
    assert data["provenance"]["options"]["recompute"] is False
    more = plan(f"{AGAIN} --lost b --max-pipelines 2", capsys)
    assert len(more["pipelines"]) <= 2


def test_a_plan_from_data_sheets_needs_no_file_but_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    estimated = "plan --cluster cluster.yaml --model model.yaml --seq-len 16"
    assert run([*estimated.split(), "--global-batch-size", "8", "-o", "plan.json"]) == 0
    for name in ("cluster.yaml", "model.yaml", "profile.json"):
        Path(name).unlink()
    capsys.readouterr()
    data = plan("plan --from plan.json --lost a", capsys)
    assert not used(data) & {"a:0", "a:1"}
    assert set(data["provenance"]["digests"]) == {"cluster"}


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{SEARCH} --lost a", "--lost: needs --from"),
        (f"{AGAIN} --lost d", "--lost: 'd' is no device, node or type of cluster small"),
        (f"{AGAIN} --lost a:2", "--lost: 'a:2': node a has 2 devices, counted from 0"),
        (f"{AGAIN} --lost slow", "--lost: 'slow' is a type of device; nodes and devices are lost"),
        (f"{AGAIN} --compare", "--compare: is answered by searches from nothing"),
        (f"{AGAIN} --strategy even", "--strategy: is answered by searches from nothing"),
        (f"{AGAIN} --what-if +1xfast", "--what-if: is answered by searches from nothing"),
        (f"{AGAIN} --frontier", "--frontier: is answered by searches from nothing"),
        (f"{AGAIN} --objective cost", "--objective: is answered by searches from nothing"),
        (f"{AGAIN} -o plan.json", "--output: plan.json is read by this command too"),
        ("plan --from none.json --lost a", "none.json: no such file"),
        ("plan --from plan.json --lost a", "--profile: is missing; plan.json was made from"),
        ("plan --profile profile.json --global-batch-size 8", "--cluster: is missing"),
        (f"plan {FILES}", "--global-batch-size: is missing"),
    ],
)
def test_wrong_options_are_one_line(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in fails(line, 2, capsys)


def test_a_plan_of_something_else_is_refused(
    old: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = yaml.safe_load(Path("cluster.yaml").read_text())
    cluster["nodes"][0]["devices"][0]["count"] = 1
    Path("other.yaml").write_text(yaml.safe_dump(cluster))
    line = "plan --from plan.json --cluster other.yaml --profile profile.json"
    assert "plan.json: provenance.digests.cluster: the plan was made for" in fails(line, 2, capsys)
    serde.write_json("other.json", make_profile(num_layers=7))
    line = "plan --from plan.json --profile other.json"
    assert "plan.json: provenance.digests.profile: the plan was made for" in fails(line, 2, capsys)
    by_hand = {k: v for k, v in old.items() if k not in ("provenance", "model_spec")}
    Path("plan.json").write_text(json.dumps(by_hand))
    assert "plan.json: " in fails(line, 2, capsys)
    Path("plan.json").write_text(json.dumps(old | {"sharded_optimizer": True}))
    assert "plan.json: sharded_optimizer: is true" in fails(AGAIN, 2, capsys)
    old["provenance"]["options"]["max_pipelines"] = "many"
    Path("plan.json").write_text(json.dumps(old))
    assert "plan.json: provenance.options.max_pipelines: 'many' is not" in fails(AGAIN, 2, capsys)


@pytest.mark.usefixtures("old")
def test_nothing_left_is_infeasible(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(f"{AGAIN} --lost a --lost b --lost c", 3, capsys)
    assert "no device of cluster small is left: 6 of 6 are lost" in err
    err = fails(f"{AGAIN} --lost a --exclude b --exclude c", 3, capsys)
    assert "2 of 6 are lost and the other 4 are excluded" in err


# --- Pins -----------------------------------------------------------------------------------------


def test_what_is_pinned_of_an_old_pipeline_is_in_the_plan(
    old: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = old["pipelines"][0]
    same = devices(first)
    share = first["micro_batches"] - 1
    data = plan(AGAIN, capsys, f"p0: micro-batches {share}")
    (pinned,) = [p for p in data["pipelines"] if devices(p) == same]
    assert pinned["micro_batches"] == share
    assert pinned["micro_batch_size"] == first["micro_batch_size"]
    assert sum(p["micro_batches"] * p["micro_batch_size"] for p in data["pipelines"]) == 24
    data = plan(AGAIN, capsys, "p0: devices b:0,c:1; cuts 3", "p0: micro-batches 2x2")
    (pinned,) = [p for p in data["pipelines"] if devices(p) == [["b:0"], ["c:1"]]]
    assert cuts(pinned) == [3]
    assert (pinned["micro_batches"], pinned["micro_batch_size"]) == (2, 2)


def test_pins_without_an_old_plan_are_planned_around(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan(SEARCH, capsys, "p0: devices b:0,a:0; cuts 5", "p7: devices c:1")
    assert "moves" not in data
    (two,) = [p for p in data["pipelines"] if devices(p) == [["b:0"], ["a:0"]]]
    assert cuts(two) == [5]
    assert [p for p in data["pipelines"] if devices(p) == [["c:1"]]]
    assert len(used(data)) > 3, "the other devices are used, too"
    Path("pinned.json").write_text(json.dumps(data))
    assert run(["simulate", "pinned.json", *FILES.split()]) == 0
    capsys.readouterr()
    free = plan(SEARCH, capsys)
    assert free["predicted"]["step_time_s"] <= data["predicted"]["step_time_s"] * (1 + 1e-9)
    assert data["solver"]["bound_s"] <= free["predicted"]["step_time_s"]


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    ("pins", "says"),
    [
        (["q0: cuts 4"], "'q0: cuts 4': is no pin; write it like 'p0: cuts 4,9'"),
        (["p0 cuts 4"], "is no pin"),
        (["p0: cut 4"], "'cut' is not one of cuts, devices, micro-batches"),
        (["p0: cuts 4,"], "cuts are the first blocks of stages, like 4,9, or none"),
        (["p0: devices a:0,,a:1"], "devices are one a stage"),
        (["p0: micro-batches 0"], "a share is a number of micro-batches"),
        (["p0: cuts 4", "p0: cuts 5"], "pins the cuts of p0 a second time"),
        (["p99: micro-batches 1"], "'p99': is no pipeline of the plan, which has p0"),
        (["p0: devices a:0; cuts 3"], "cuts 3 make 2 stages, but it has devices for 1"),
        (["p0: devices a:0,a:1; cuts 8"], "cuts 8 must rise, from 1 to 7 at most"),
        (["p0: devices a:0,c:0,a:1; cuts 5,3"], "cuts 5,3 must rise"),
        (["p0: devices a:0,z:1; cuts 3"], "'z:1' is no device of cluster small"),
        (["p0: devices a:0+c:0"], "a:0+c:0 is no group of one type in one node"),
        (["p0: devices a:0+a:1"], "the search has no fast at tensor-parallel width 2"),
        (["p0: devices a:0,a:0"], "a:0': is in the pinned pipelines 2 times"),
        (["p0: devices a:0; micro-batches 2x3"], "micro-batch size 3 is not one of those"),
        (["p0: devices a:0; micro-batches 25x1"], "shares of 25 samples, more than the batch"),
    ],
)
def test_wrong_pins_are_one_line(
    pins: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = fails(AGAIN, 2, capsys, *pins)
    assert err.startswith("error: --pin: ")
    assert says in err


@pytest.mark.usefixtures("old")
def test_pins_that_cannot_be_met(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(f"{AGAIN} --lost a:0", 2, capsys, "p0: devices a:0")
    assert "a:0 is lost or excluded; pin other devices" in err
    err = fails(SEARCH, 2, capsys, "p0: cuts 4")
    assert "'p0': has no devices; name them, or give a plan with --from" in err
    err = fails(f"{AGAIN} --explain", 2, capsys, "p0: micro-batches 1")
    assert err.startswith("error: --explain: ")
    # Two of 24 samples, and no device for the others.
    line = f"{AGAIN} --exclude b --exclude c --exclude a:1"
    err = fails(line, 3, capsys, "p0: devices a:0; micro-batches 2x1")
    assert "with what is pinned no plan was found" in err
    cluster = yaml.safe_load(Path("cluster.yaml").read_text())
    cluster["device_types"]["slow"]["memory"] = "0.3GB"
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    err = fails(SEARCH, 3, capsys, "p0: devices b:0,a:0; cuts 7; micro-batches 12x1")
    assert "pinned p0: stage 0 (blocks 0 to 6) needs" in err
    assert "bytes are lacking" in err


# --- Ctrl-C ---------------------------------------------------------------------------------------


def large_problem() -> str:
    """A search of many seconds, in files."""
    cluster = mixed_cluster(1024, 5, inter_node_gbps=100)
    spec = {
        "name": cluster.name,
        "nodes": [
            {"name": n.name, "devices": [{"type": g.type, "count": g.count} for g in n.devices]}
            for n in cluster.nodes
        ],
        "network": {"inter_node": {"bandwidth": "100Gbps", "latency": "20us"}},
    }
    Path("large.yaml").write_text(yaml.safe_dump(spec))
    write_profile("large.json", problem_profile("llama3-8b"))
    files = "--cluster large.yaml --profile large.json -o large-plan.json"
    return f"plan {files} --global-batch-size 16384"


def interrupted(line: str, *, times: int = 1, more: str = "") -> subprocess.CompletedProcess[str]:
    """A command that gets Ctrl-C once its search has gone on for a little."""
    script = (
        "import sys; from eth_cli.commands import plan\n"
        "found = plan.watched\n"
        "def watched():\n"
        "    print('searching', file=sys.stderr, flush=True)\n"
        "    return found()\n"
        "plan.watched = watched\n"
        "from eth_cli.__main__ import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, *line.split(), *more.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "searching\n"
        time.sleep(0.8)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_ctrl_c_gives_the_best_plan_so_far() -> None:
    line = large_problem()
    started_s = time.monotonic()
    done = interrupted(line)
    assert done.returncode == 130, done.stderr
    assert time.monotonic() - started_s < 40
    assert "Traceback" not in done.stderr
    *_, wrote, last = done.stderr.splitlines()
    assert wrote == "wrote large-plan.json"
    assert last == "error: interrupted: the plan is the best found so far (feasible)"
    assert "searched for" in done.stdout
    found = read_plan("large-plan.json")
    assert found.solver is not None
    assert found.solver.status == "feasible"
    assert found.solver.bound_s > 0
    simulate = "simulate large-plan.json --cluster large.yaml --profile large.json --json"
    assert run(simulate.split()) == 0


def test_a_second_ctrl_c_ends_at_once() -> None:
    done = interrupted(large_problem(), times=2)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: interrupted")


def test_ctrl_c_during_the_questions_gives_the_plan_alone() -> None:
    frontier = "plan --cluster cluster.yaml --profile profile.json --global-batch-size 24"
    done = interrupted(f"{frontier} -o plan.json", more="--frontier --explain")
    if done.returncode == 0:  # It was done before.
        return
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: interrupted")
    assert "Traceback" not in done.stderr
