"""Options of `eth plan` beyond its inputs, through the real command line, on small clusters."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_profile
from test_bad_input import CLUSTER, run

from eth_cli import serde

PRICES = {"fast": 3.5, "slow": 0.4}
BASE = "plan --cluster cluster.yaml --profile profile.json --global-batch-size 8"


@pytest.fixture(autouse=True)
def _files(in_tmp_path: Path) -> None:
    """Two fast and two slow devices, with and without prices."""
    Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    priced: dict[str, Any] = copy.deepcopy(CLUSTER)
    for name, price in PRICES.items():
        priced["device_types"][name]["price_per_hour"] = price
    priced["device_types"]["mid"] = {"memory": "0.8GB", "emulated": True}
    Path("priced.yaml").write_text(yaml.safe_dump(priced))
    profile = make_profile(types=("fast", "slow", "mid"))
    Path("profile.json").write_text(json.dumps(serde.to_data(profile)))


def plan(options: str, capsys: pytest.CaptureFixture[str], *, base: str = BASE) -> dict[str, Any]:
    """What a command prints as JSON."""
    assert run([*base.split(), "--json", *options.split()]) == 0, capsys.readouterr().err
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def words(options: str, capsys: pytest.CaptureFixture[str], *, base: str = BASE) -> str:
    """What a command prints for people, on one line."""
    assert run([*base.split(), *options.split()]) == 0, capsys.readouterr().err
    return " ".join(capsys.readouterr().out.split())


def used(data: dict[str, Any]) -> set[str]:
    """Devices of a plan."""
    return {d for p in data["pipelines"] for s in p["stages"] for d in s["devices"]}


PRICED = BASE.replace("cluster.yaml", "priced.yaml")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--exclude c", "--exclude: 'c' is no device, node or type of cluster small"),
        ("--exclude a:2", "--exclude: 'a:2': node a has 2 devices, counted from 0"),
        ("--exclude fast --exclude b", "--exclude: leaves none of the 4 devices"),
        ("--max-pipelines 0", "--max-pipelines: 0 is too small; the least is 1"),
        ("--max-pipelines few", "--max-pipelines: 'few' is not a whole number"),
        ("--tensor-parallel 1,,2", "--tensor-parallel: '' is not a whole number"),
        ("--tensor-parallel 1,4", "--tensor-parallel: 4 is not in the profile, which has widths 1"),
        ("--max-gap 5", "--max-gap: 5 must be from 0 to 1; write it like 0.05 or 5%"),
        ("--max-gap nan", "--max-gap: nan must be from 0 to 1"),
        ("--max-gap x%", "--max-gap: 'x%' is not a number"),
        ("--time-limit 10", "--time-limit: '10' has no unit; use one of ns, us, ms, s"),
        ("--time-limit 0s", "--time-limit: 0s must be above 0"),
        ("--time-limit 10GB", "--time-limit: '10GB' has no unit that is a time"),
        (
            "--no-prune bounds",
            "--no-prune: 'bounds' is no rule (did you mean bound?); the rules are bound, capacity,",
        ),
        ("--objective price", "--objective: 'price' is not one of step-time, cost"),
        ("--objective cost", "cluster.yaml: device_types.fast.price_per_hour: is missing; "),
        ("--max-step-time 2s", "--max-step-time: is for --objective cost"),
        ("--objective cost --compare", "--compare: shows the fastest plans; leave it or"),
        ("--what-if 4xfast", "--what-if: '4xfast' is no change; write it like +4xL4"),
        ("--what-if +0xfast", "--what-if: '+0xfast' is no change"),
        ("--what-if +1xfast,", "--what-if: '' is no change"),
        ("--what-if +4xL4", "--what-if: the profile has no L4, only fast, mid, slow; "),
        ("--what-if +1xfats", "--what-if: 'fats' is no type (did you mean fast?)"),
        ("--what-if -3xfast", "--what-if: -3xfast: cluster small has 2 fast to lose"),
        ("--what-if -1xa,-1xb", "--what-if: -1xa, -1xb leaves no device to plan for"),
        ("--frontier-svg no/f.svg", "--frontier-svg: the folder no does not exist"),
        ("--frontier-svg cluster.yaml", "--frontier-svg: cluster.yaml is read by this command too"),
        ("-o x --frontier-svg x", "--frontier-svg: x is where the plan goes too"),
    ],
)
def test_wrong_options_are_one_line(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().iterdir())
    assert run([*BASE.split(), *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert says in err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("price", [0, -1, "3.67"])
def test_a_wrong_price_names_its_field(price: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster: dict[str, Any] = copy.deepcopy(CLUSTER)
    cluster["device_types"]["slow"]["price_per_hour"] = price
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    assert run(BASE.split()) == 2
    assert "cluster.yaml: device_types.slow.price_per_hour: " in capsys.readouterr().err


def test_a_type_of_the_catalogue_may_have_a_price_alone() -> None:
    from eth_cli.cluster_file import read_cluster

    Path("c.yaml").write_text(
        "name: c\ndevice_types: {T4: {price_per_hour: 0.35}}\n"
        "nodes: [{name: a, devices: [{type: T4}]}]\n"
    )
    t4 = read_cluster("c.yaml").device_types["T4"]
    assert (t4.memory_bytes, t4.price_per_hour) == (16 * 2**30, 0.35)


def test_a_rule_of_the_search_is_off_and_the_plan_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = plan("", capsys)
    data = plan("--no-prune bound --no-prune recompute", capsys)
    assert data["pipelines"] == usual["pipelines"]
    assert data["predicted"]["step_time_s"] == usual["predicted"]["step_time_s"]
    assert "bound" in usual["solver"]["pruned"]
    assert not {"bound", "recompute"} & data["solver"]["pruned"].keys()
    assert data["provenance"]["options"]["no_prune"] == ["bound", "recompute"]


def test_excluded_devices_are_named_and_the_plan_stays_one_of_the_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = plan("--exclude a:0 --exclude slow -o plan.json", capsys)
    assert used(data) == {"a:1"}
    assert {u["device"]: u["reason"] for u in data["unused_devices"]} == {
        "a:0": "excluded by --exclude a:0",
        "b:0": "excluded by --exclude slow",
        "b:1": "excluded by --exclude slow",
    }
    assert len(data["cluster"]["nodes"]) == 2
    simulate = "simulate plan.json --cluster cluster.yaml --profile profile.json --json"
    assert run(simulate.split()) == 0
    step_time_s = json.loads(capsys.readouterr().out)["step_time_s"]
    assert step_time_s == pytest.approx(data["predicted"]["step_time_s"])


@pytest.mark.parametrize("strategy", ["even", "uneven-layers"])
def test_baselines_leave_excluded_devices_out(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert used(plan(f"--exclude b --strategy {strategy}", capsys)) == {"a:0", "a:1"}


def test_a_plain_plan_holds_and_loads_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan("", capsys)
    assert not {"explain", "what_if", "frontier", "cost"} & set(data)
    code = (
        "import sys; from eth_cli.cli import main\n"
        f"try: main({BASE.split()!r})\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('eth_cli.search.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = done.stdout.splitlines()[-1]
    assert "eth_cli.search.planner" in loaded
    assert not any(f"search.{name}'" in loaded for name in ("explain", "frontier", "edits"))


def test_prices_change_neither_the_plan_nor_its_digests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dear = plan("", capsys, base=PRICED)
    text = Path("priced.yaml").read_text()
    lines = [line for line in text.splitlines() if "price_per_hour" not in line]
    Path("cluster.yaml").write_text("\n".join(lines))
    plain = plan("", capsys)
    for data in (dear, plain):
        del data["solver"]["wall_s"]
    assert dear == plain


def test_what_if_says_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--what-if +2xfast --what-if -1xb --what-if +1xmid,-1xslow"
    data = plan(options, capsys, base=PRICED)
    more, fewer, mixed = data["what_if"]
    assert [w["change"] for w in data["what_if"]] == ["+2xfast", "-1xb", "+1xmid,-1xslow"]
    assert [w["num_devices"] for w in data["what_if"]] == [6, 2, 4]
    assert more["step_time_s_now"] == data["predicted"]["step_time_s"]
    assert more["speed_up"] > 1 > fewer["speed_up"]
    assert more["cost_now"]["per_hour"] == pytest.approx(2 * 3.5 + 2 * 0.4)
    assert more["cost_then"]["per_hour"] == pytest.approx(4 * 3.5 + 2 * 0.4)
    assert mixed["cost_then"] is None, "a mid has no price"
    assert used(data) == {"a:0", "a:1", "b:0", "b:1"}, "the plan is that of the cluster as it is"
    text = words("--what-if +2xfast", capsys)
    assert "+2xfast" in text
    assert "an hour" not in text, "this cluster has no prices"


def test_losing_what_is_excluded_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    (outcome,) = plan("--exclude b --what-if +1xb", capsys)["what_if"]
    assert outcome["num_devices"] == 4, "the new node is not excluded, b still is"
    (outcome,) = plan("--exclude b --what-if -1xb", capsys)["what_if"]
    assert outcome["speed_up"] == 1


def test_what_if_tells_what_would_make_a_plan_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster: dict[str, Any] = copy.deepcopy(CLUSTER)
    cluster["device_types"]["fast"]["memory"] = "0.18GB"
    cluster["nodes"] = [{"name": "a", "devices": [{"type": "fast"}]}]
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    options = ["--json", "--what-if", "+3xfast", "--what-if", "+1xfast"]
    assert run([*BASE.split(), *options]) == 3
    out, err = capsys.readouterr()
    assert "no plan exists" in err
    enough, too_few = json.loads(out)["what_if"]
    assert enough["step_time_s_now"] is None
    assert enough["step_time_s_then"] > 0
    assert too_few["step_time_s_then"] is None
    assert "lacking" in too_few["why_none"]


def test_the_cheapest_plan_costs_less_and_takes_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fastest = plan("--frontier", capsys, base=PRICED)
    cheap = plan("--objective cost -o plan.json", capsys, base=PRICED)
    assert cheap["cost"]["tokens_per_dollar"] > fastest["cost"]["tokens_per_dollar"]
    assert cheap["predicted"]["step_time_s"] > fastest["predicted"]["step_time_s"]
    assert cheap["provenance"]["options"]["objective"] == "cost"
    reasons = {u["reason"] for u in cheap["unused_devices"]}
    assert len(reasons) == 1
    assert "save cost" in reasons.pop()
    hours = cheap["predicted"]["step_time_s"] / 3600
    by_hand = sum(PRICES["fast" if d[0] == "a" else "slow"] for d in used(cheap)) * hours
    assert cheap["cost"]["per_step"] == pytest.approx(by_hand)
    files = ["--cluster", "priced.yaml", "--profile", "profile.json"]
    assert run(["simulate", "plan.json", *files]) == 0


def test_the_step_time_limit_is_kept_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    data = plan("--objective cost --max-step-time 0.5s", capsys, base=PRICED)
    assert data["predicted"]["step_time_s"] <= 0.5
    assert run([*PRICED.split(), "--objective", "cost", "--max-step-time", "10ms"]) == 3
    err = capsys.readouterr().err.splitlines()[-1]
    assert "at most 10.0 ms" in err
    assert "what would fit: --max-step-time 0." in err


def test_the_frontier_as_table_plot_and_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    text = words("--frontier --frontier-svg f.svg", capsys, base=PRICED)
    assert "step time against devices" in text
    assert "tokens/$" in text
    assert "4 devices" in text
    drawing = ElementTree.parse("f.svg").getroot()
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}circle"))) >= 2 * 4
    data = plan("--frontier", capsys)
    points = data["frontier"]["points"]
    assert data["frontier"]["num_searches"] <= 16
    assert points[-1]["step_time_s"] == data["predicted"]["step_time_s"]
    assert next(p["num_devices"] for p in points if p["is_fastest_for_its_devices"]) == 1
    assert all(sum(p["devices"].values()) == p["num_devices"] for p in points)
    assert all(p["cost"] is None for p in points)


@pytest.mark.parametrize("options", ["", "--strategy even", "--compare"])
def test_explain_as_words_and_as_data(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = words(f"--explain {options}", capsys)
    for said in (" ends last", "gradient sync", "what memory decides", "would help"):
        assert said in text
    data = plan(f"--explain {options}", capsys)
    explained, made = data["explain"], data["hpp"] if "--compare" in options else data
    assert explained["step_time_s"] == made["predicted"]["step_time_s"]
    assert sum(explained["terms"].values()) == pytest.approx(explained["step_time_s"])
    limit = explained["limit"]
    assert limit["busy_s"] + limit["idle_s"] == pytest.approx(explained["step_time_s"])
    times = [c["step_time_s"] for c in explained["changes"] if c["gain"]]
    assert times == sorted(times)
    assert all(t < explained["step_time_s"] for t in times)


def test_case_38_explain_shows_what_processes_and_buckets_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = plan("--explain", capsys)
    capacity = {m["device"]: m["bytes"] for m in data["predicted"]["memory"]}
    for stage in data["explain"]["memory"]:
        assert stage["terms"]["process"] == 50_000_000
        assert sum(stage["terms"].values()) == stage["total_bytes"]
        assert all(capacity[device] == stage["total_bytes"] for device in stage["devices"])
    text = words("--explain", capsys)
    assert "communication buckets included" in text
    assert "47.7 MiB" in text


def test_what_memory_decides_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """The fast devices have room for half of their share; with twice the memory they take it."""
    cluster: dict[str, Any] = copy.deepcopy(CLUSTER)
    cluster["device_types"]["fast"]["memory"] = "0.25GB"
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    explained = plan("--explain --no-recompute", capsys)["explain"]
    fast = next(d for d in explained["memory_decisions"] if d["device_type"] == "fast")
    assert fast["gain"] > 0.1
    assert fast["step_time_s"] < explained["step_time_s"]
    assert fast["stages"]
    assert all(s["blocks_then"] > s["blocks"] for s in fast["stages"])
    best = explained["best_change"]
    assert best is not None
    assert best["step_time_s"] == min(c["step_time_s"] for c in explained["changes"])
