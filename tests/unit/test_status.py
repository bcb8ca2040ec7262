"""The status records that tell the launcher what a rank does, also after it was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from eth_cli.launch.status import Status, StatusWriter, read_status


def read(path: Path) -> Status:
    status = read_status(path)
    assert status is not None
    return status


def test_a_rank_is_starting_from_the_moment_it_has_a_status(tmp_path: Path) -> None:
    StatusWriter(tmp_path / "deep" / "rank-3", rank=3)
    status = read(tmp_path / "deep" / "rank-3")
    assert (status.rank, status.state, status.step, status.waits) == (3, "starting", 0, False)


def test_the_last_word_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    writer = StatusWriter(path, rank=0)
    before = time.time()
    writer.update(state="training", step=12, operation="1SEND_B1000", waits=False)
    writer.update(state="training", step=13, operation="2F0", waits=True)
    status = read(path)
    assert (status.step, status.operation, status.waits) == (13, "2F0", True)
    assert before <= status.time_s <= time.time()


def test_a_long_error_is_cut_and_still_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    StatusWriter(path, rank=0).update(
        state="failed", step=2, operation="SYNC", waits=True, error="x" * 5000
    )
    assert set(read(path).error) == {"x"}


def test_an_error_of_any_letters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    writer = StatusWriter(path, rank=0)
    writer.update(state="failed", step=2, operation="SYNC", waits=True, error='"\\\n\0é漢🏖' * 50)
    status = read(path)
    assert status.state == "failed"
    assert status.error.startswith('"\\\n\0é漢🏖')


@pytest.mark.parametrize("data", [b"", b"\0" * 512, b"{", b'{"rank": 1}\0', b"[]\0", b"\xff\0"])
def test_what_is_no_status_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "rank-0"
    path.write_bytes(data)
    assert read_status(path) is None
    assert read_status(tmp_path / "absent") is None


def test_a_killed_process_leaves_its_last_word(tmp_path: Path) -> None:
    path = tmp_path / "rank-0"
    code = (
        "import os, sys; from eth_cli.launch.status import StatusWriter\n"
        "writer = StatusWriter(sys.argv[1], rank=5)\n"
        "writer.update(state='training', step=7, operation='1F3', waits=False)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=30, check=False)
    assert done.returncode == -9
    status = read(path)
    assert (status.rank, status.step, status.operation) == (5, 7, "1F3")
