"""Every shipped cluster loads, says what it models, and can be planned for."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_profile

from eth_cli.cluster_file import read_cluster
from eth_cli.profile.table import Profile
from eth_cli.search.planner import SearchOptions, search

SPECS = sorted((Path(__file__).resolve().parents[1] / "cluster_specs").glob("*.yaml"))

DEVICES = {
    "campus": 14,
    "cloud-mix": 28,
    "homogeneous": 32,
    "lab": 16,
    "laptop": 8,
    "laptop-odd": 7,
    "large": 1024,
    "mixed-node": 8,
    "odd": 8,
}
"""Devices of each spec."""


def profile_for(types: set[str]) -> Profile:
    """A small model's profile on some device types, each of another speed."""
    base = make_profile(types=("fast",), num_layers=10, micro_batch_sizes=(1,))
    return base.model_copy(
        update={
            "compute": tuple(
                entry.model_copy(
                    update={
                        "device": name,
                        "forward_s": entry.forward_s * (1 + 0.37 * i),
                        "backward_s": entry.backward_s * (1 + 0.37 * i),
                    }
                )
                for i, name in enumerate(sorted(types))
                for entry in base.compute
            ),
            "memory": base.memory.model_copy(update={"process_bytes": 0}),
            "devices": (),
        }
    )


def test_specs_are_the_known_ones() -> None:
    assert {path.stem for path in SPECS} == set(DEVICES)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_spec_loads(path: Path) -> None:
    cluster = read_cluster(path)
    assert cluster.name == path.stem
    assert len(cluster.devices) == DEVICES[path.stem]
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# "), "says what it models"
    devices = list(cluster.devices.values())
    assert all(cluster.link(devices[0], other).bandwidth_bytes_per_s > 0 for other in devices[1:])


SMALL = [path for path in SPECS if path.stem in ("homogeneous", "mixed-node", "odd")]
"""Real clusters that are planned for in a second or two."""


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_a_spec_can_be_planned_for(path: Path) -> None:
    cluster = read_cluster(path)
    profile = profile_for({device.type for device in cluster.devices.values()})
    report = search(profile, cluster, SearchOptions(global_batch_size=64))
    assert report.plan.predicted is not None
    used = {place.device for place in report.plan.ranks}
    unused = {entry.device for entry in report.plan.unused_devices}
    assert used | unused == set(cluster.devices)
    assert not used & unused
