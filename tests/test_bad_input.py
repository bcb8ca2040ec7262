"""Every malformed input ends in one line that names file and field, and starts nothing.

Each case spoils one thing in a set of files that work together (`test_good_files_work` shows it),
and runs the real command line.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from builders import make_pipeline, make_plan, make_profile

from eth_cli import serde
from eth_cli.cli import main

CLUSTER: dict[str, Any] = {
    "name": "small",
    "device_types": {
        "fast": {"memory": "1GB", "peak": {"fp32": "6.1TFLOPS"}, "emulated": True},
        "slow": {"memory": "0.7GB", "peak": {"fp32": "2TFLOPS"}, "emulated": True},
    },
    "nodes": [
        {"name": "a", "devices": [{"type": "fast", "count": 2}]},
        {"name": "b", "devices": [{"type": "slow", "count": 2}]},
    ],
    "network": {
        "intra_node": {"bandwidth": "11GB/s", "latency": "5us"},
        "inter_node": {"bandwidth": "10Gbps", "latency": "30us"},
    },
}
MODEL: dict[str, Any] = {
    "name": "toy",
    "family": "gpt",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 8,
    "ffn_size": 128,
    "max_positions": 128,
    "activation": "gelu",
    "tied": False,
    "embedding_size": 32,
}
FILES = {
    "cluster": "cluster.yaml",
    "profile": "profile.json",
    "plan": "plan.json",
    "model": "model.yaml",
    "data": "text.txt",
}
GOOD = "--cluster cluster.yaml --profile profile.json"
COMMANDS = {
    name: line.split()
    for name, line in {
        "plan": f"plan {GOOD} --global-batch-size 8 -o out.json",
        "simulate": f"simulate plan.json {GOOD}",
        "run": f"run plan.json {GOOD} --model model.yaml --data text.txt --steps 2 --out run",
        "profile": "profile --cluster cluster.yaml --model model.yaml --seq-len 16 --analytic "
        "-o out.json",
        "report": "report text.txt",
    }.items()
}
COMMAND_OF = {
    "cluster": "plan",
    "profile": "plan",
    "plan": "simulate",
    "model": "profile",
    "data": "run",
}
"""The command that a spoiled file is tried with, unless the case names another one."""

DELETE = object()
"""As a new value: the key is removed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that is wrong."""

    name: str
    file: str
    """Which of `FILES` is spoiled; empty: the options are."""
    says: tuple[str, ...]
    """What the line must hold: the field, and what helps."""
    path: tuple[str | int, ...] = ()
    value: Any = None
    """New value at ``path``."""
    text: Callable[[str], str | bytes] | None = None
    """Or: new content of the file from the good one."""
    argv: tuple[str, ...] = ()
    """Options appended to the command's."""
    command: str = ""
    code: int = 2

    def argv_of(self) -> list[str]:
        """The whole command line."""
        return [*COMMANDS[self.command or COMMAND_OF[self.file]], *self.argv]


def key(file: str, where: str, value: Any, *says: str, **other: Any) -> Case:
    """A case that sets (or deletes) one key; ``where`` is written as ``nodes.0.devices``."""
    path = tuple(int(part) if part.isdigit() else part for part in where.split("."))
    wrong = "absent" if value is DELETE else repr(value)[:30]
    return Case(
        name=f"{file}-{where}-{wrong}", file=file, path=path, value=value, says=says, **other
    )


def text(file: str, name: str, change: Callable[[str], str | bytes], *says: str, **o: Any) -> Case:
    """A case that changes a file's text."""
    return Case(name=f"{file}-{name}", file=file, text=change, says=says, **o)


def option(name: str, argv: str, *says: str, command: str = "plan", **other: Any) -> Case:
    """A case with wrong options."""
    return Case(
        name=f"{command}-{name}",
        file="",
        argv=tuple(argv.split()),
        says=says,
        command=command,
        **other,
    )


NAN = float("nan")
CLUSTER_CASES = [
    key("cluster", "name", DELETE, "name", "is missing"),
    key("cluster", "name", "", "name"),
    key("cluster", "name", 7, "name", "text"),
    key("cluster", "name", ["a"], "name", "a list"),
    key("cluster", "nods", [], "nods", "did you mean nodes?"),
    key("cluster", "nodes", [], "nodes", "at least 1"),
    key("cluster", "nodes", None, "nodes"),
    key("cluster", "nodes", {"a": 1}, "nodes", "must be a list"),
    key("cluster", "nodes.0", "a", "nodes[0]", "mapping"),
    key("cluster", "nodes.1.name", "a", "nodes[1].name", "two nodes"),
    key("cluster", "nodes.0.name", "a b", "nodes[0].name", "not a name"),
    key("cluster", "nodes.0.count", 0, "nodes[0].count", "not 0"),
    key("cluster", "nodes.0.count", -3, "nodes[0].count", "-3"),
    key("cluster", "nodes.0.hosts", ["x", "y"], "nodes[0].hosts", "2 hosts for 1"),
    key("cluster", "nodes.0.devices", [], "nodes[0].devices", "at least 1"),
    key("cluster", "nodes.0.devices.0.count", 0, "nodes[0].devices[0].count"),
    key("cluster", "nodes.0.devices.0.count", 1.5, "nodes[0].devices[0].count", "whole number"),
    key("cluster", "nodes.0.devices.0.count", True, "nodes[0].devices[0].count", "true"),
    key("cluster", "nodes.0.devices.0.count", 10**7, "devices[0].count", "10000000", "1000000"),
    key("cluster", "nodes.0.devices.0.count", "two", "nodes[0].devices[0].count", "two"),
    key("cluster", "nodes.0.devices.0.type", "H100-80GB", "nodes[0].devices[0].type", "H100"),
    key("cluster", "nodes.0.devices.0.typ", "fast", "typ", "did you mean type?"),
    key("cluster", "device_types.fast.memory", "40", "device_types.fast.memory", "unit"),
    key("cluster", "device_types.fast.memory", 40, "device_types.fast.memory", "40GiB"),
    key("cluster", "device_types.fast.memory", "40Gbps", "device_types.fast.memory", "GiB"),
    key("cluster", "device_types.fast.memory", "-1GiB", "device_types.fast.memory", "-1GiB"),
    key("cluster", "device_types.fast.memory", "0GiB", "device_types.fast.memory", "0GiB"),
    key("cluster", "device_types.fast.memory", "nanGiB", "device_types.fast.memory"),
    text(
        "cluster",
        "a-memory-without-bound",  # and without quotes, which a YAML writer would put
        lambda t: t.replace("memory: 1GB", "memory: 1e400GiB"),
        "device_types.fast.memory",
        "1e400GiB",
        "finite",
    ),
    text("cluster", "no-date", lambda t: "name: 2026-13-45\n", "line 1", "month"),
    text("cluster", "no-number", lambda t: "name: x\nnodes: !!int many\n", "line 2", "many"),
    key("cluster", "device_types.fast.memory", DELETE, "device_types.fast.memory", "catalogue"),
    key("cluster", "device_types.fast.memory", "9" * 400 + "GiB", "device_types.fast.memory"),
    key("cluster", "device_types.fast.peak.fp8", "1TFLOPS", "peak.fp8", "bf16, fp16, fp32"),
    key("cluster", "device_types.fast.peak.fp32", "6TB/s", "peak.fp32", "TFLOPS"),
    key("cluster", "device_types.fast.compute_capability", NAN, "compute_capability", "nan"),
    key("cluster", "device_types.fast.emulated", "yes", "fast.emulated", "true or false"),
    key("cluster", "network.inter_node", DELETE, "network.inter_node", "2 nodes"),
    key("cluster", "network.intra_node", DELETE, "network.intra_node", "fast, slow"),
    key("cluster", "network.inter_node.bandwith", "1Gbps", "bandwith", "did you mean bandwidth?"),
    key("cluster", "network.inter_node.bandwidth", "0Gbps", "inter_node.bandwidth", "0Gbps"),
    key("cluster", "network.inter_node.latency", "5 minutes", "inter_node.latency", "us"),
    key(
        "cluster",
        "network.overrides",
        [{"between": ["a", "c"], "bandwidth": "1Gbps"}],
        "network.overrides[0].between",
        "'c'",
    ),
    key(
        "cluster",
        "network.overrides",
        [{"between": ["a", "b", "a"], "bandwidth": "1Gbps"}],
        "network.overrides[0].between",
        "at most 2",
    ),
    text("cluster", "empty", lambda t: "", "is empty"),
    text("cluster", "only-a-comment", lambda t: "# nothing\n", "nothing"),
    text("cluster", "a-list", lambda t: "- a\n- b\n", "mapping", "a list"),
    text("cluster", "not-utf8", lambda t: b"name: \xff\xfe\n", "UTF-8", "byte 6"),
    text("cluster", "null-byte", lambda t: "name: a\0b\n", "not valid YAML"),
    text("cluster", "broken-yaml", lambda t: "name: [a\nnodes: ]", "line 2", "not valid YAML"),
    text("cluster", "tabs", lambda t: "name: x\n\tnodes: y", "line 2"),
    text("cluster", "duplicate-key", lambda t: t + "\nname: again\n", "stands twice"),
    text("cluster", "alias", lambda t: "name: &x a\nnodes: [*x]\n", "line 2", "aliases"),
    text("cluster", "python-tag", lambda t: "name: !!python/name:os.system\n", "line 1"),
    text("cluster", "two-documents", lambda t: t + "\n---\nname: x\n", "not valid YAML"),
    text("cluster", "number-as-key", lambda t: t + "\n3090: x\n", "3090", "quotes"),
    text("cluster", "deep", lambda t: "name: " + "[" * 5000, "nested too deeply"),
    text("cluster", "deep-mapping", lambda t: "name: " + "{a: " * 3000, "nested too deeply"),
    text("cluster", "huge-number", lambda t: "name: " + "9" * 5000, "too many digits"),
]
PROFILE_CASES = [
    key("profile", "schema_version", DELETE, "schema_version", "is missing"),
    key("profile", "schema_version", 2, "schema_version", "1", "not 2"),
    key("profile", "schema_version", "1", "schema_version", '"1"'),
    key("profile", "seq_len", 0, "seq_len", "not 0"),
    key("profile", "dtype", "fp8", "dtype", "bf16"),
    key("profile", "model.blocks", [], "model.blocks", "at least 1"),
    key("profile", "model.blocks.0.count", 10**12, "model.blocks[0].count", "100000"),
    key("profile", "model.blocks.1.parameters", -5, "model.blocks[1].parameters", "-5"),
    key("profile", "model.tied_blocks", [[0, 99]], "model.tied_blocks[0]", "99", "8 blocks"),
    key("profile", "model.boundary_bytes", 1, "boundary_bytes", "boundary_bytes_per_sample?"),
    key("profile", "memory.bytes_per_parameter", 0, "memory.bytes_per_parameter"),
    key("profile", "memory.bytes_per_parameter", "16", "memory.bytes_per_parameter", "number"),
    key("profile", "compute", [], "compute", "at least 1"),
    key("profile", "compute.3.block", "attention", "compute[3].block", "attention", "transformer"),
    key("profile", "compute.0.tensor_parallel", 0, "compute[0].tensor_parallel"),
    key("profile", "compute.0.activation_bytes", 1.5, "compute[0].activation_bytes", "whole"),
    key("profile", "compute.0.forward_ms", 3, "forward_ms", "did you mean forward_s?"),
    key("profile", "devices.0.type", "slow", "devices[1].type", "twice"),
    key("profile", "links", [{"scope": "lan", "devices": ["fast", "fast"]}], "links[0].scope"),
    key(
        "profile",
        "links",
        [{"scope": "intra_node", "devices": ["fast", "fast"], "table": [[9, 1.0], [3, 2.0]]}],
        "links[0].table",
        "rising",
    ),
    key(
        "profile",
        "links",
        [{"scope": "intra_node", "devices": ["fast"], "bandwidth_bytes_per_s": 1.0}],
        "links[0].devices",
    ),
    text("profile", "truncated", lambda t: t[: len(t) // 2], "line", "not valid JSON"),
    text("profile", "trailing", lambda t: t + "}", "line", "not valid JSON"),
    text("profile", "single-quotes", lambda t: t.replace('"', "'"), "line 2", "not valid JSON"),
    text("profile", "duplicate-key", lambda t: '{"seq_len": 1,' + t.lstrip()[1:], "seq_len"),
    text("profile", "not-an-object", lambda t: "[1, 2]", "mapping", "a list"),
    text("profile", "a-number", lambda t: "7", "mapping", "7"),
    text("profile", "blank", lambda t: "  \n\n", "is empty"),
    text("profile", "deep", lambda t: '{"a":' * 100_000, "nested too deeply"),
    text("profile", "lone-surrogate", lambda t: t.replace("toy", "\\ud800"), "cannot be read"),
    text("profile", "utf16", lambda t: t.encode("utf-16"), "UTF-8"),
]
CASE_34 = [
    key("profile", f"compute.2.{field}", value, f"compute[2].{field}", "fast", "transformer")
    for field in ("forward_s", "backward_s")
    for value in (NAN, float("inf"), 0, -0.001, None, "3ms", DELETE)
]
PLAN_CASES = [
    key("plan", "schema_version", DELETE, "schema_version", "is missing"),
    key("plan", "schema_version", 2, "schema_version", "not 2"),
    key("plan", "pipelines", [], "pipelines", "at least 1"),
    key("plan", "pipelines.0.stages", [], "pipelines[0].stages", "at least 1"),
    key("plan", "pipelines.0.micro_batches", 0, "pipelines[0].micro_batches", "not 0"),
    key("plan", "pipelines.0.micro_batches", True, "pipelines[0].micro_batches", "true"),
    key("plan", "pipelines.0.micro_batches", 6, "pipelines", "6 x 1 + 3 x 1 = 9", "is 8"),
    key("plan", "global_batch_size", 10**12, "global_batch_size", "1000000000000"),
    key("plan", "pipelines.0.stages.0.blocks", [3, 2], "stages[0].blocks", "[3, 2]"),
    key("plan", "pipelines.0.stages.0.blocks", [0, -1], "pipelines[0].stages[0].blocks"),
    key("plan", "pipelines.0.stages.0.blocks", [0], "pipelines[0].stages[0].blocks"),
    key("plan", "pipelines.0.stages.0.blocks", [0, 3, 6], "pipelines[0].stages[0].blocks"),
    key("plan", "pipelines.0.stages.0.blocks", "0-6", "pipelines[0].stages[0].blocks", "list"),
    key("plan", "pipelines.0.stages.1.blocks", [5, 8], "stages[1].blocks", "already placed"),
    key("plan", "pipelines.0.stages.1.blocks", [6, 7], "pipelines[0].stages", "7", "8 blocks"),
    key("plan", "pipelines.0.stages.0.devices", [], "stages[0].devices", "at least 1"),
    key("plan", "pipelines.0.stages.0.devices", ["a0"], "stages[0].devices", '"a0"'),
    key("plan", "pipelines.0.stages.0.devices", ["a:-1"], "stages[0].devices", '"a:-1"'),
    key("plan", "pipelines.0.stages.0.devices", "a:0", "stages[0].devices", "must be a list"),
    key("plan", "pipelines.0.stages.0.devices", ["a:1"], "devices", '"a:1" is used twice'),
    key("plan", "pipelines.0.stages.0.devices", ["a:7"], "devices", "a:7", "2 devices"),
    key("plan", "pipelines.0.stages.0.devices", ["c:0"], "devices", "c:0", "a, b"),
    key("plan", "pipelines.0.stages.0.recompute", "no", "recompute", "true or false"),
    key("plan", "pipelines.0.stages.0.layers", [0, 3], "layers", "blocks"),
    key("plan", "pipelines.0.micro_batch_size", NAN, "pipelines[0].micro_batch_size"),
    key("plan", "seq_len", 64, "seq_len", "64", "128"),
    key("plan", "model", "", "model", "empty"),
    key("plan", "model", "other", "model", "other", "toy"),
    key("plan", "dtype", "bf16", "dtype", "bf16", "fp32"),
    key(
        "plan",
        "provenance",
        {"version": "0", "digests": {"profile": "sha256:0"}},
        "provenance.digests.profile",
        "sha256:0",
        "plan again",
    ),
    key(
        "plan",
        "provenance",
        {"version": "0", "digests": {"cluster": "sha256:1"}},
        "provenance.digests.cluster",
        "sha256:1",
        command="run",
    ),
    key("plan", "sharded_optimizer", "yes", "sharded_optimizer", "true or false"),
    key("plan", "predicted", {"step_time_s": -1, "tokens_per_s": 1}, "predicted.step_time_s"),
    text("plan", "truncated", lambda t: t[:-40], "line", "not valid JSON"),
]
MODEL_CASES = [
    key("model", "hidden_size", 0, "hidden_size", "not 0"),
    key("model", "family", "bert", "family", "gpt", "llama"),
    key("model", "hiden_size", 1, "hiden_size", "did you mean hidden_size?"),
    key("model", "num_kv_heads", 3, "num_kv_heads", "3", "4"),
    key("model", "tied", "false", "tied", "true or false"),
    key("model", "num_layers", DELETE, "num_layers", "is missing"),
    text("model", "empty", lambda t: "", "is empty"),
    text("model", "a-text", lambda t: "gpt-tiny", "mapping"),
]
DATA_CASES = [
    text("data", "empty", lambda t: "", "empty"),
    text("data", "blank", lambda t: "\n \n", "129"),
    text("data", "not-utf8", lambda t: b"caf\xe9 " * 500, "UTF-8"),
    text("data", "too-short", lambda t: "hello", "129"),
]
OPTION_CASES = [
    option("no-such-file", "--cluster none.yaml", "none.yaml", "no such file"),
    option("a-folder", "--cluster .", ".", "folder"),
    option("batch-zero", "--global-batch-size 0", "--global-batch-size", "0", "1"),
    option("batch-negative", "--global-batch-size -8", "--global-batch-size", "-8"),
    option("batch-word", "--global-batch-size many", "--global-batch-size", "many"),
    option("batch-fraction", "--global-batch-size 8.5", "--global-batch-size", "8.5"),
    option("batch-huge", "--global-batch-size " + "9" * 30, "--global-batch-size"),
    option("strategy", "--strategy unven-layers", "--strategy", "did you mean uneven-layers?"),
    option("micro-batch-unknown", "--micro-batch-size 4", "micro", "4"),
    option("micro-batch-above-batch", "--micro-batch-size 16", "16", "8"),
    option("output-folder-missing", "-o no/where.json", "--output", "no"),
    option("output-is-a-folder", "-o .", "--output", "."),
    Case(name="plan-output-empty", file="", command="plan", argv=("-o", ""), says=("--output",)),
    Case(name="run-out-empty", file="", command="run", argv=("--out", ""), says=("--out", "empty")),
    Case(name="run-data-empty", file="", command="run", argv=("--data", ""), says=("--data",)),
    option("against-a-file", "--against text.txt", "text.txt", "is a file", command="report"),
    option("unknown-option", "--micro-batch 3", "--micro-batch"),
    option("profile-and-model", "--model gpt-tiny", "--model", "--profile"),
    option("not-a-trace-folder", "--trace no/t.json", "--trace", "no", command="simulate"),
    option("rehearse", "--rehearse", "--rehearse", "not implemented", command="run"),
    option("backend", "--backend slurm", "--backend", "slurm", "not implemented", command="run"),
    option("backend-unknown", "--backend pbs", "--backend", "pbs", "local", command="run"),
    option("learning-rate", "--lr nan", "--lr", "nan", command="run"),
    option("learning-rate-word", "--lr fast", "--lr", "fast", command="run"),
    option("seed", "--seed -1", "--seed", "-1", command="run"),
    option("out-is-a-file", "--out text.txt", "text.txt", "file", command="run"),
    option("data-missing", "--data none.txt", "none.txt", command="run"),
    option("data-weight", "--data text.txt=much", "--data", "'much'", command="run"),
    option("data-weight-zero", "--data text.txt=0", "--data", "'0'", command="run"),
    option("data-half-weighed", "--data text.txt=2", "text.txt", "no weight", command="run"),
    option("tokenizer-missing", "--tokenizer t.json", "t.json", "no such", command="run"),
    option("tokenizer-other", "--tokenizer plan.json", "plan.json", "tokenizer", command="run"),
    option("text-field", "--data d.jsonl --text-field x", "d.jsonl", "no such", command="run"),
    option("nothing-to-resume", "--resume", "run", "resume", command="run"),
    option("model-unknown", "--model gpt-9", "--model", "gpt-9", "gpt2", command="profile"),
    option(
        "micro-batch-list", "--micro-batch-sizes 1,,2", "--micro-batch-sizes", command="profile"
    ),
    option(
        "micro-batch-twice", "--micro-batch-sizes 2,2", "--micro-batch-sizes", command="profile"
    ),
    option("dtype", "--dtype f32", "--dtype", "fp32", command="profile"),
    option("seq-len", "--seq-len 4096", "4096", "128", command="profile"),
]
CASES = [
    *CLUSTER_CASES,
    *PROFILE_CASES,
    *PLAN_CASES,
    *MODEL_CASES,
    *DATA_CASES,
    *OPTION_CASES,
]


def good_files() -> dict[str, Any]:
    """Content of the files, as data (as text for the training text)."""
    return {
        "cluster": CLUSTER,
        "profile": serde.to_data(make_profile()),
        "plan": serde.to_data(make_plan()),
        "model": MODEL,
        "data": "It was a bright cold day in April. " * 100,
    }


def as_text(file: str, data: Any) -> str:
    """A file's text."""
    if file == "data":
        return str(data)
    return yaml.safe_dump(data) if FILES[file].endswith(".yaml") else json.dumps(data, indent=1)


def change(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of plain data with one place changed."""
    data = copy.deepcopy(data)
    place = data
    for part in path[:-1]:
        place = place[part]
    if value is DELETE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


def write_files(case: Case | None = None) -> None:
    """Write all files into the current folder, one spoiled."""
    for file, data in good_files().items():
        content: str | bytes = as_text(file, data)
        if case is not None and case.file == file:
            content = (
                case.text(as_text(file, data))
                if case.text is not None
                else as_text(file, change(data, case.path, case.value))
            )
        Path(FILES[file]).write_bytes(content if isinstance(content, bytes) else content.encode())


def run(argv: list[str]) -> int:
    """Run the command line in this process; its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def no_process(*args: object, **kwargs: object) -> NoReturn:
    """Stands in for starting a process."""
    pytest.fail(f"a process was started: {args} {kwargs}")


def check(case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a case and check all that holds for every one of them."""
    write_files(case)
    before = sorted(Path().iterdir())
    monkeypatch.setattr(subprocess.Popen, "__init__", no_process)
    code = run(case.argv_of())
    out, err = capsys.readouterr()
    assert code == case.code, err
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    if case.file:
        assert FILES[case.file] in err
    for words in case.says:
        assert words in err
    assert sorted(Path().iterdir()) == before, "something was written"


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_one_line(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, capsys, monkeypatch)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("case", CASE_34, ids=lambda case: case.name)
def test_case_34_a_bad_time_names_file_device_block_and_field(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, capsys, monkeypatch)


@pytest.mark.usefixtures("in_tmp_path")
def test_case_13_a_batch_that_does_not_divide_never_reaches_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = option("case-13", "--global-batch-size 101 --micro-batch-size 2", "101", "2")
    check(case, capsys, monkeypatch)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("command", ["simulate", "run"])
def test_case_23_a_plan_that_lacks_a_block_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks_5 = [0, 5]
    where = "pipelines.0.stages.0.blocks"
    case = key("plan", where, lacks_5, "stages[1].blocks", "blocks 5 to 5", command=command)
    check(case, capsys, monkeypatch)


@pytest.mark.usefixtures("in_tmp_path")
def test_case_24_hand_edited_cuts_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    write_files()
    edited = make_plan(
        pipelines=[
            make_pipeline(devices=("a:0", "b:0"), cuts=(7,), micro_batches=6),
            make_pipeline(devices=("a:1", "b:1"), cuts=(4,), micro_batches=2),
        ]
    )
    Path("plan.json").write_text(json.dumps(serde.to_data(edited)))
    assert run([*COMMANDS["simulate"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0


def write_bf16(capabilities: dict[str, float]) -> None:
    """A bf16 profile, and a cluster of real types of these compute capabilities."""
    write_files()
    cluster = copy.deepcopy(CLUSTER)
    for name, capability in capabilities.items():
        cluster["device_types"][name] = {"memory": "1GB", "compute_capability": capability}
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    profile = make_profile(dtype="bf16")
    Path("profile.json").write_text(json.dumps(serde.to_data(profile)))


@pytest.mark.usefixtures("in_tmp_path")
def test_case_32_a_dtype_that_no_device_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_bf16({"fast": 7.0, "slow": 7.5})
    assert run(COMMANDS["plan"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    for words in ("profile.json: dtype", "bf16", "fast", "7.0", "slow", "7.5", "8.0"):
        assert words in err


@pytest.mark.usefixtures("in_tmp_path")
def test_case_32_a_device_without_the_dtype_is_left_unused_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_bf16({"fast": 8.0, "slow": 7.0})
    assert run([*COMMANDS["plan"], "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    unused = {entry["device"]: entry["reason"] for entry in plan["unused_devices"]}
    assert set(unused) == {"b:0", "b:1"}
    assert all("7.0" in reason and "bf16" in reason for reason in unused.values())


@pytest.mark.usefixtures("in_tmp_path")
def test_good_files_work(capsys: pytest.CaptureFixture[str]) -> None:
    write_files()
    assert run(COMMANDS["plan"]) == 0, capsys.readouterr().err
    assert run(COMMANDS["simulate"]) == 0, capsys.readouterr().err
    assert run([*COMMANDS["run"], "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("in_tmp_path")
def test_every_fault_is_reported_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    write_files()
    data = change(good_files()["profile"], ("compute", 0, "forward_s"), -1)
    data = change(change(data, ("dtype",), "int8"), ("memory", "bytes_per_parameter"), None)
    Path("profile.json").write_text(json.dumps(data))
    assert run(COMMANDS["plan"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all("profile.json" in line for line in lines)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_same_in_a_process_of_its_own(command: str) -> None:
    write_files(text("cluster", "empty", lambda t: ""))
    done = subprocess.run(
        [sys.executable, "-m", "eth_cli", *COMMANDS[command]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cluster.yaml: is empty\n"


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize(("file", "other"), [("cluster", "plan"), ("plan", "profile")])
def test_a_file_of_another_format_is_told_by_its_keys(
    file: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files()
    Path(FILES[file]).write_bytes(Path(FILES[other]).read_bytes())
    assert run(COMMANDS[COMMAND_OF[file]]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"error: {FILES[file]}: ") for line in lines)
    assert any("unknown key" in line for line in lines)


def test_there_are_at_least_sixty_cases() -> None:
    assert len([*CASES, *CASE_34]) >= 60
