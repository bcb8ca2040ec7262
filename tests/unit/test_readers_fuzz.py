"""Files changed at random are read or refused; nothing else ever happens."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_plan, make_profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eth_cli import serde
from eth_cli.cluster_file import read_cluster
from eth_cli.errors import ConfigError, Fault
from eth_cli.model_sources import PRESETS, load_model
from eth_cli.plan import read_plan
from eth_cli.profile.table import read_profile

ROOT = Path(__file__).resolve().parents[2]
QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 10**12, 10**40, 1.5, -0.0, float("nan"), float("inf")),
    *("", " ", "a", "a:0", "1GiB", "-3", "\x00", "\ud800", "💥", "x" * 5000, "[key]"),
    *([], {}, [[]], [None], {"a": 1}, {"": 0}, [1, 2], ["a:0", "a:0"], [[0, 1], [1, 0]]),
]

FORMATS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "cluster.yaml": (
        yaml.safe_load((ROOT / "cluster_specs/cloud-mix.yaml").read_text()),
        read_cluster,
    ),
    "profile.json": (serde.to_data(make_profile()), read_profile),
    "plan.json": (serde.to_data(make_plan()), read_plan),
    "model.yaml": (serde.to_data(PRESETS["llama-tiny"]), lambda path: load_model(str(path))),
}


def places(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in plain data."""
    below = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [at] * bool(at) + [p for key, value in below for p in places(value, (*at, key))]


def mutate(data: Any, chance: random.Random) -> Any:
    """Plain data with one place removed, doubled, replaced or renamed."""
    data = copy.deepcopy(data)
    *path, last = chance.choice(places(data))
    parent = data
    for part in path:
        parent = parent[part]
    match chance.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        case 2 if isinstance(parent, dict):
            parent[chance.choice(["x", "", "blocks", last + "s", last[:-1]])] = parent.pop(last)
        case _:
            parent[last] = copy.deepcopy(chance.choice(ODD_VALUES))
    return data


def must_read_or_refuse(read: Callable[[Path], object], path: Path) -> None:
    """Reading ends in a value or in faults that each are one line naming the file."""
    faults: Sequence[Fault] = ()
    try:
        read(path)
    except ConfigError as error:
        faults = error.faults or pytest.fail("refused without a reason")
    for fault in faults:
        assert path.name in fault.file
        assert 0 < len(fault.message.strip()) < 2000


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(seed=st.integers(0, 2**32), num_changes=st.integers(1, 4))
def test_changed_data(tmp_path: Path, name: str, seed: int, num_changes: int) -> None:
    data, read = FORMATS[name]
    chance = random.Random(seed)
    for _ in range(num_changes):
        data = mutate(data, chance) or data
    path = tmp_path / name
    # JSON is YAML too, but for NaN and lone surrogates, which the reader must survive as well.
    path.write_text(json.dumps(data))
    must_read_or_refuse(read, path)


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(seed=st.integers(0, 2**32))
def test_changed_bytes(tmp_path: Path, name: str, seed: int) -> None:
    data, read = FORMATS[name]
    chance = random.Random(seed)
    text = yaml.safe_dump(data) if name.endswith("yaml") else json.dumps(data, indent=1)
    content = bytearray(text.encode())
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(content) or 1)
        match chance.randrange(4):
            case 0:
                del content[at : at + chance.randint(1, 30)]
            case 1:
                content[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                content[at:at] = chance.choice(
                    [b"{", b"}", b"[", b'"', b": ", b"\n", b"-", b"&a", b"*"]
                )
            case _:
                del content[at:]
    path = tmp_path / name
    path.write_bytes(bytes(content))
    must_read_or_refuse(read, path)


@pytest.mark.parametrize("name", FORMATS)
@QUICK
@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_any_bytes(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    must_read_or_refuse(FORMATS[name][1], path)
