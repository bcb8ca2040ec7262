"""Measured profiles: real workers on this machine, and clear words when they fail."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import ClusterFile
from eth_cli.errors import ConfigError, LaunchError
from eth_cli.model_sources import PRESETS
from eth_cli.profile import measure
from eth_cli.profile.analytic import analytic_profile
from eth_cli.profile.measure import measure_profile, run_workers
from eth_cli.profile.measurement import MESSAGE_BYTES, Request
from eth_cli.profile.table import Profile, read_profile, write_profile

TYPES: dict[str, Any] = {
    "fast": {"memory": "300MB", "peak": {"fp32": "21GFLOPS"}, "emulated": True},
    "slow": {"memory": "200MB", "peak": {"fp32": "7GFLOPS"}, "emulated": True},
    "core": {"memory": "2GB"},
    "other": {"memory": "3GB"},
}


def make_cluster(**nodes: dict[str, int]) -> Cluster:
    """A cluster; each node is given as its number of devices by type."""
    used = {name for groups in nodes.values() for name in groups}
    return serde.validate(
        ClusterFile,
        {
            "name": "here",
            "device_types": {name: TYPES[name] for name in sorted(used & set(TYPES))},
            "nodes": [
                {"name": n, "devices": [{"type": t, "count": c} for t, c in groups.items()]}
                for n, groups in nodes.items()
            ],
            "network": {
                "intra_node": {"bandwidth": "11GB/s"},
                "inter_node": {"bandwidth": "10Gbps"},
            },
        },
        "cluster.yaml",
    ).resolve()


def profile_of(cluster: Cluster, **options: Any) -> Profile:
    settings: dict[str, Any] = {"seq_len": 64, "dtype": "fp32", "micro_batch_sizes": (1, 2)}
    return measure_profile(PRESETS["llama-tiny"], cluster, **settings | options)


def assert_measured_table(table: tuple[tuple[float, float], ...] | None) -> None:
    assert table is not None
    assert [size for size, _ in table] == list(MESSAGE_BYTES)
    times = [seconds for _, seconds in table]
    assert times == sorted(times)
    assert 1e-7 < times[0] < 0.1
    # 16 MiB are not moved faster than memory is.
    assert times[-1] > 16 * 2**20 / 1e12


@pytest.mark.distributed
def test_emulated_types_have_analytic_times_and_measured_links() -> None:
    steps: list[tuple[int, int, str]] = []
    cluster = make_cluster(a={"fast": 2, "slow": 1}, b={"slow": 1})
    profile = profile_of(
        cluster, progress=lambda done, total, what: steps.append((done, total, what))
    )
    analytic = analytic_profile(
        PRESETS["llama-tiny"], cluster, seq_len=64, dtype="fp32", micro_batch_sizes=(1, 2)
    )
    assert profile.compute == analytic.compute
    assert profile.devices == analytic.devices
    assert profile.memory == analytic.memory
    pairs = {(link.scope, *link.devices) for link in profile.links}
    assert pairs == {
        ("intra_node", "fast", "fast"),
        ("intra_node", "fast", "slow"),
        ("intra_node", "slow", "fast"),
        ("inter_node", "fast", "slow"),
        ("inter_node", "slow", "fast"),
        ("inter_node", "slow", "slow"),
    }
    for link in profile.links:
        assert_measured_table(link.table)
    # 3 kinds at 2 sizes, 8 message sizes; one bar that only goes forward.
    assert {total for _, total, _ in steps} == {14}
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][0] == 14


@pytest.mark.distributed
def test_this_machines_cpu_is_measured_as_the_one_real_type(tmp_path: Path) -> None:
    profile = profile_of(make_cluster(a={"core": 2}))
    keys = [(e.device, e.block, e.micro_batch_size) for e in profile.compute]
    assert keys == [
        ("core", block, size) for block in ("embedding", "transformer", "head") for size in (1, 2)
    ]
    for entry in profile.compute:
        assert entry.source == "measured"
        assert entry.forward_spread_s is not None
        assert entry.backward_spread_s is not None
        assert 0 < entry.forward_s < 1
        assert 0 < entry.backward_s < 1
        assert entry.recompute_activation_bytes is not None
        assert entry.recompute_activation_bytes <= entry.activation_bytes
    assert profile.optimizer_s_per_parameter("core") > 0
    # A Python process with torch in it.
    assert 50e6 < profile.process_bytes("core") < 5e9
    assert [(link.scope, link.devices) for link in profile.links] == [
        ("intra_node", ("core", "core"))
    ]
    assert_measured_table(profile.links[0].table)
    write_profile(tmp_path / "profile.json", profile)
    assert read_profile(tmp_path / "profile.json") == profile


def test_a_single_emulated_device_needs_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_workers", None)
    profile = profile_of(make_cluster(a={"fast": 1}))
    assert profile.links == ()
    assert len(profile.compute) == 6


@pytest.mark.parametrize(
    ("nodes", "field", "says"),
    [
        ({"a": {"core": 1, "other": 1}}, "nodes", "hold 2 types that are not emulated"),
        ({"a": {"core": 1}, "b": {"core": 1}}, "nodes", "in 2 nodes"),
        ({"a": {"core": 1}, "b": {"fast": 1}}, "nodes", "in 2 nodes"),
        ({"a": {"A100-40": 999}}, "nodes[0].devices", "has 999 GPUs of type A100-40"),
    ],
)
def test_devices_that_this_machine_cannot_stand_for(
    nodes: dict[str, dict[str, int]], field: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_of(make_cluster(**nodes))
    (fault,) = caught.value.faults
    assert (fault.file, fault.field) == ("cluster here", field)
    assert says in fault.message
    assert "--analytic" in fault.message


def test_bad_requests_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_workers", None)
    with pytest.raises(ConfigError, match="--seq-len: 300 tokens"):
        profile_of(make_cluster(a={"core": 1}), seq_len=300)
    with pytest.raises(ConfigError, match=r"device_types.fast.peak: fast has no bf16 peak"):
        profile_of(make_cluster(a={"fast": 2}), dtype="bf16")


def request_of(**changes: Any) -> Request:
    fields: dict[str, Any] = {
        "spec": PRESETS["gpt-tiny"],
        "seq_len": 64,
        "dtype": "fp32",
        "micro_batch_sizes": (1,),
        "device": "cpu",
        "num_compute_ranks": 2,
    }
    return Request(**fields | changes)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `run_workers` makes its folder, by which its processes are known."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def processes_in(folder: Path) -> list[str]:
    """Command lines of all processes that were given a folder below this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{folder}/eth-profile-" in command:
                found.append(command)
    return found


@pytest.mark.distributed
def test_a_worker_that_fails_is_named_with_the_end_of_its_log(workplace: Path) -> None:
    # A sequence that the position table is too short for: the blocks of gpt-tiny fail.
    with pytest.raises(LaunchError) as caught:
        run_workers(request_of(seq_len=1000), num_ranks=2)
    assert caught.value.rank in (0, 1)
    assert caught.value.operation == "measure"
    lines = str(caught.value).splitlines()
    assert f"rank {caught.value.rank} failed while measuring" in lines[0]
    assert "RuntimeError" in lines[-1]
    assert lines[-1].startswith("  | ")
    assert processes_in(workplace) == []


@pytest.mark.distributed
def test_workers_that_do_not_get_on_are_stopped(workplace: Path) -> None:
    with pytest.raises(LaunchError, match=r"no measurement was finished for 0.5 s, at the start"):
        run_workers(request_of(), num_ranks=2, stall_timeout_s=0.5)
    assert processes_in(workplace) == []


@pytest.mark.distributed
def test_interrupting_leaves_no_process_behind(workplace: Path) -> None:
    seen: list[str] = []

    def interrupt(done: int, _total: int, _what: str) -> None:
        if done == 1:
            seen.extend(processes_in(workplace))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_workers(request_of(), num_ranks=2, progress=interrupt)
    assert len(seen) >= 3
    assert processes_in(workplace) == []
