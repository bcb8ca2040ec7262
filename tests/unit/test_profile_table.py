"""profile.json: strict reading, look-up, stored weights, interpolation of measured links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_profile

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.model_sources import PRESETS
from eth_cli.profile.table import (
    BlockGroup,
    LinkEntry,
    Profile,
    ProfiledModel,
    read_profile,
    write_profile,
)

CONTRACT = """
{"schema_version": 1, "seq_len": 2048, "dtype": "bf16",
 "model": {"name": "opt-350m", "blocks": [
   {"kind": "embedding", "count": 1, "parameters": 53575680},
   {"kind": "transformer", "count": 24, "parameters": 12596224},
   {"kind": "head", "count": 1, "parameters": 51480576}],
   "boundary_bytes_per_sample": 4194304, "tied_blocks": []},
 "memory": {"bytes_per_parameter": 16, "process_bytes": 1500000000},
 "compute": [
  {"device": "A100-40", "block": "transformer", "tensor_parallel": 1, "micro_batch_size": 1,
   "forward_s": 0.0031, "backward_s": 0.0062, "activation_bytes": 120000000,
   "recompute_activation_bytes": 4194304, "source": "measured"},
  {"device": "A100-40", "block": "embedding", "micro_batch_size": 1,
   "forward_s": 0.0004, "backward_s": 0.0007, "activation_bytes": 16384},
  {"device": "A100-40", "block": "head", "micro_batch_size": 1,
   "forward_s": 0.0013, "backward_s": 0.0027, "activation_bytes": 800000000}],
 "devices": [{"type": "A100-40", "optimizer_s_per_parameter": 2.1e-11}],
 "links": [
  {"scope": "intra_node", "devices": ["A100-40", "A100-40"], "latency_s": 5e-6,
   "bandwidth_bytes_per_s": 2.3e11},
  {"scope": "inter_node", "devices": ["A100-40", "V100-16"], "flows": 1,
   "table": [[65536, 1.2e-4], [1048576, 6.0e-4]]},
  {"scope": "inter_node", "devices": ["A100-40", "V100-16"], "flows": 4,
   "table": [[65536, 1.9e-4], [1048576, 2.1e-3]]}]}
"""
"""A profile as a user writes it by hand."""


def read(folder: Path, data: Any) -> Profile:
    path = folder / "profile.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return read_profile(path)


def faults_of(folder: Path, data: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, data)
    return {fault.field: fault.message for fault in caught.value.faults}


def test_a_hand_written_profile_is_read(tmp_path: Path) -> None:
    profile = read(tmp_path, json.loads(CONTRACT))
    entry = profile.lookup("A100-40", "transformer", tensor_parallel=1, micro_batch_size=1)
    assert entry is not None
    assert (entry.forward_s, entry.backward_s) == (0.0031, 0.0062)
    assert profile.lookup("A100-40", "transformer", tensor_parallel=2, micro_batch_size=1) is None
    assert profile.lookup("T4", "transformer", tensor_parallel=1, micro_batch_size=1) is None
    assert profile.model.num_blocks == 26
    assert profile.model.parameters[0] == 53575680
    assert profile.optimizer_s_per_parameter("A100-40") == 2.1e-11
    assert profile.optimizer_s_per_parameter("V100-16") == 0.0
    assert profile.process_bytes("A100-40") == 1_500_000_000


def test_written_files_are_equal_byte_for_byte_and_read_back(tmp_path: Path) -> None:
    profile = make_profile()
    for name in ("one.json", "two.json"):
        write_profile(tmp_path / name, profile)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert read_profile(tmp_path / "one.json") == profile
    assert read_profile(tmp_path / "one.json").digest() == profile.digest()
    assert make_profile(num_layers=7).digest() != profile.digest()


def test_case_34_times_that_are_no_times_are_refused(tmp_path: Path) -> None:
    for value in (0, -0.1, "fast", None):
        data = json.loads(CONTRACT)
        data["compute"][1]["forward_s"] = value
        (field,) = faults_of(tmp_path, data)
        assert field.startswith("compute[1]")
        assert "forward_s" in field
    data = json.loads(CONTRACT)
    del data["compute"][1]["forward_s"]
    (field,) = faults_of(tmp_path, data)
    assert "forward_s" in field
    path = tmp_path / "nan.json"
    path.write_text(CONTRACT.replace("0.0031", "NaN"), encoding="utf-8")
    with pytest.raises(ConfigError, match="forward_s"):
        read_profile(path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d["compute"].pop(1), "compute"),
        (lambda d: d["compute"].append(dict(d["compute"][0])), "compute[3]"),
        (lambda d: d["compute"][0].update(block="middle"), "compute[0].block"),
        (lambda d: d["devices"].append({"type": "A100-40"}), "devices[1].type"),
        (lambda d: d["model"].update(tied_blocks=[[0, 26]]), "model.tied_blocks[0]"),
        (lambda d: d["model"].update(tied_blocks=[[3]]), "model.tied_blocks[0]"),
        (lambda d: d["compute"][0].update(forward_s=1.7e308), "compute[0].forward_s"),
        (lambda d: d["compute"][0].update(backward_s=1e-320), "compute[0].backward_s"),
        (lambda d: d["compute"][0].update(activation_bytes=10**18), "compute[0].activation_bytes"),
        (lambda d: d["model"]["blocks"][1].update(parameters=10**30), "model.blocks[1].parameters"),
        (lambda d: d["memory"].update(process_bytes=10**30), "memory.process_bytes"),
        (lambda d: d["memory"].update(bytes_per_parameter=1e300), "memory.bytes_per_parameter"),
        (lambda d: d["links"][0].update(latency_s=1e300), "links[0].latency_s"),
        (
            lambda d: d["links"][0].update(bandwidth_bytes_per_s=1e-300),
            "links[0].bandwidth_bytes_per_s",
        ),
        (lambda d: d["model"].update(tied_blocks=[[0, 1], [1, 25]]), "model.tied_blocks[1]"),
        (
            lambda d: d["model"].update(tied_blocks=[0, 25], tied_parameters=10**9),
            "model.tied_parameters",
        ),
        (lambda d: d["links"][1].update(table=[[9, 1.0], [3, 2.0]]), "links[1].table"),
        (lambda d: d["links"][1].update(table=[]), "links[1].table"),
        (lambda d: d["links"][0].pop("bandwidth_bytes_per_s"), "links[0].bandwidth_bytes_per_s"),
        (lambda d: d["links"][0].update(table=[[9, 1.0]]), "links[0].table"),
    ],
)
def test_faults_name_their_field(change: Any, field: str, tmp_path: Path) -> None:
    data = json.loads(CONTRACT)
    change(data)
    assert list(faults_of(tmp_path, data)) == [field]


def test_the_models_shape_must_fit_the_blocks(tmp_path: Path) -> None:
    data = json.loads(CONTRACT)
    data["model"]["spec"] = serde.to_data(PRESETS["opt-350m"])
    assert read(tmp_path, data).model.spec == PRESETS["opt-350m"]
    data["model"]["spec"]["num_layers"] = 23
    (message,) = faults_of(tmp_path, data).values()
    assert "25 blocks" in message
    assert "26" in message


def test_a_stage_stores_a_tied_weight_once() -> None:
    model = ProfiledModel(
        name="toy",
        blocks=(
            BlockGroup(kind="embedding", parameters=110),
            BlockGroup(kind="transformer", count=3, parameters=70),
            BlockGroup(kind="head", parameters=105),
        ),
        boundary_bytes_per_sample=8,
        tied_blocks=((0, 4),),
        tied_parameters=100,
    )
    assert model.stage_parameters(0, 2) == 180
    assert model.stage_parameters(2, 5) == 245
    assert model.stage_parameters(0, 5) == 110 + 210 + 105 - 100


def test_a_tied_weight_of_unknown_size_is_all_of_the_smallest_block(tmp_path: Path) -> None:
    data = json.loads(CONTRACT)
    assert read(tmp_path, data).model.tied_parameters == 0
    data["model"]["tied_blocks"] = [0, 25]
    profile = read(tmp_path, data)
    assert profile.model.tied_parameters == 51480576
    # What the file does not say is not written either.
    assert "tied_parameters" not in serde.to_data(profile)["model"]
    data["model"]["tied_parameters"] = 51478528
    profile = read(tmp_path, data)
    assert profile.model.tied_parameters == 51478528
    assert serde.to_data(profile)["model"]["tied_parameters"] == 51478528


def test_links_by_latency_and_bandwidth() -> None:
    link = LinkEntry(
        scope="intra_node", devices=("a", "b"), latency_s=0.5, bandwidth_bytes_per_s=100.0
    )
    assert link.transfer_s(0) == 0.5
    assert link.transfer_s(250) == 3.0


def test_links_by_table() -> None:
    table = ((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))
    link = LinkEntry(scope="inter_node", devices=("a", "b"), table=table)
    for num_bytes, seconds in ((1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (80, 6.0)):
        assert link.transfer_s(num_bytes) == pytest.approx(seconds), num_bytes
    single = LinkEntry(scope="inter_node", devices=("a", "b"), table=((10.0, 1.0),))
    assert single.transfer_s(5) == 1.0
    assert single.transfer_s(30) == pytest.approx(3.0)
