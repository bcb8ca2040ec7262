"""Which checkpoints stay on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch.launching import paced_plan

from eth_cli import serde
from eth_cli.launch.checkpoints import CheckpointInfo, files_of, steps_of
from eth_cli.launch.config import RunFolder, RunOptions
from eth_cli.launch.retention import Retention
from eth_cli.model_sources import load_model


def write(folder: RunFolder, step: int) -> None:
    path = folder.checkpoint_of(step)
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"tensors")
    info = CheckpointInfo.of(
        step=step,
        plan=paced_plan(),
        spec=load_model("gpt-tiny"),
        options=RunOptions(steps=9),
        data_digest="this",
    )
    serde.write_json(folder.marker_of(step), info.model_copy(update={"files": files_of(path)}))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    for step in (2, 4, 6, 8):
        write(folder, step)
    return folder


def left(folder: RunFolder) -> list[int]:
    return sorted(steps_of(folder))


@pytest.mark.parametrize(
    ("keep", "expected"), [(None, [2, 4, 6, 8]), (1, [8]), (2, [6, 8]), (9, [2, 4, 6, 8])]
)
def test_the_newest_stay(folder: RunFolder, keep: int | None, expected: list[int]) -> None:
    Retention(folder, keep=keep).remove_old(8)
    assert left(folder) == expected


def test_one_that_is_not_complete_does_not_count(folder: RunFolder) -> None:
    folder.marker_of(6).unlink()
    Retention(folder, keep=2).remove_old(8)
    assert left(folder) == [4, 6, 8]
    (folder.checkpoint_of(4) / "__0_0.distcp").write_bytes(b"short")
    Retention(folder, keep=2).remove_old(8)
    assert left(folder) == [4, 6, 8]  # no complete one but the newest: nothing is too old


def test_what_was_damaged_at_the_start_does_not_count_until_it_is_written_anew(
    folder: RunFolder,
) -> None:
    # Sizes are right, but the run went on from step 4: 6 and 8 were found to be damaged.
    retention = Retention(folder, keep=2, resumed_from=4)
    for newest, expected in ((5, [4, 5, 6, 8]), (6, [5, 6, 8]), (9, [6, 8, 9])):
        if newest != 6:
            write(folder, newest)
        retention.remove_old(newest)  # 6 was written anew, 8 never was
        assert left(folder) == expected


def test_checkpoints_of_later_steps_stay(folder: RunFolder) -> None:
    Retention(folder, keep=1).remove_old(4)
    assert left(folder) == [4, 6, 8]
