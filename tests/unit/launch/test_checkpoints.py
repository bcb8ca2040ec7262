"""Damaged checkpoints are found before anything is loaded, and an older one is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launch.launching import paced_plan

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.launch import preflight
from eth_cli.launch.checkpoints import CheckpointInfo, files_of, find_intact, read_info
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.dataset import TokenSource, WindowedTokens
from eth_cli.model_sources import load_model

OPTIONS = RunOptions(steps=9, resume=True)
DATA = WindowedTokens(np.arange(99, dtype=np.uint8), seq_len=4, digest="sha256:abc")
TENSORS = "__1_0.distcp"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with checkpoints after steps 3 and 6."""
    folder = RunFolder(tmp_path / "run")
    for step in (3, 6):
        path = folder.checkpoint_of(step)
        path.mkdir(parents=True)
        for name in ("__0_0.distcp", TENSORS, ".metadata"):
            (path / name).write_bytes(name.encode() * 500 * step)
        info = CheckpointInfo.of(
            step=step,
            plan=paced_plan(),
            spec=load_model("gpt-tiny"),
            options=OPTIONS,
            data_digest=DATA.digest,
        )
        info = info.model_copy(update={"files": files_of(path)})
        serde.write_json(folder.marker_of(step), info)
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (TENSORS, flip, "does not hold what was written"),
    (".metadata", flip, "does not hold what was written"),
    (TENSORS, shorten, "has 35000 bytes instead of 36000"),
    (TENSORS, Path.unlink, "is gone"),
    (TENSORS, replace_by_folder, ""),
    ("complete.json", Path.unlink, "no such file"),
    ("complete.json", lambda path: path.write_text('{"step": 6,'), "is not valid JSON"),
    ("complete.json", lambda path: path.write_text(path.read_text().replace("6", "7")), ""),
]


def start(
    folder: RunFolder, *, options: RunOptions = OPTIONS, source: TokenSource = DATA
) -> preflight.Start:
    return preflight.check_folder(folder, paced_plan(), load_model("gpt-tiny"), options, source)


def test_the_newest_checkpoint_is_used_where_all_are_intact(folder: RunFolder) -> None:
    assert start(folder) == preflight.Start(step=6)
    assert find_intact(folder).info == read_info(folder, 6)


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_one_line(
    folder: RunFolder, name: str, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder.checkpoint_of(6) / name)
    found = start(folder)
    assert found.step == 3
    (line,) = found.warnings
    assert f"{folder.checkpoint_of(6) / name}" in line
    assert words in line
    assert line.endswith("this checkpoint is damaged, so the run goes on from step-000003")


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGE)
def test_without_an_intact_checkpoint_a_run_is_refused_in_one_line(
    folder: RunFolder, name: str, damage: Callable[[Path], object], words: str
) -> None:
    for step in (3, 6):
        shorten(folder.checkpoint_of(step) / "__0_0.distcp")
    damage(folder.checkpoint_of(6) / name)
    with pytest.raises(ConfigError) as caught:
        start(folder)
    (fault,) = caught.value.faults
    assert fault.file == str(folder.checkpoints)
    assert "holds no intact checkpoint" in fault.message
    assert "step-000006" in fault.message
    assert "step-000003/__0_0.distcp: has" in fault.message


def test_other_data_is_refused(folder: RunFolder) -> None:
    other = WindowedTokens(np.arange(99, dtype=np.uint8), seq_len=4, digest="sha256:def")
    with pytest.raises(ConfigError) as caught:
        start(folder, source=other)
    (fault,) = caught.value.faults
    assert fault.field == "data_digest"
    assert "was trained with data sha256:abc, but this run has sha256:def" in fault.message


def test_another_number_of_steps_changes_the_learning_rates_and_is_told(folder: RunFolder) -> None:
    found = start(folder, options=OPTIONS.model_copy(update={"steps": 20}))
    assert found.step == 6
    (line,) = found.warnings
    assert "learning rates for 9 steps, and those from here on are for 20 steps" in line
