"""Process trees end as a whole, whatever their members do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eth_cli import processes

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds processes in /proc"
)

SLEEP = "import time; time.sleep(300)"
START = "import subprocess, sys, time; "
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[list[processes.ProcessTree]]:
    """Trees that are killed after the test, should the code under test not have done so."""
    started: list[processes.ProcessTree] = []
    yield started
    for tree in started:
        processes.stop_process_tree(tree, grace_s=0)


def start(trees: list[processes.ProcessTree], code: str, tmp_path: Path) -> processes.ProcessTree:
    tree = processes.start([sys.executable, "-c", code], env={}, output=tmp_path / "output")
    trees.append(tree)
    return tree


def is_alive(pid: int | str) -> bool:
    """Whether a process exists and has not ended (a zombie has, only nobody has asked how)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def members(tree: processes.ProcessTree) -> set[int]:
    """Live processes that carry the tree's mark, found without the code under test."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = tree.marker.encode() in (entry / "environ").read_bytes()
            if marked and is_alive(entry.name):
                found.add(int(entry.name))
    return found


def wait_for(tree: processes.ProcessTree, num_members: int) -> set[int]:
    deadline = time.monotonic() + 20
    while len(found := members(tree)) != num_members:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def child(code: str, **options: object) -> str:
    """Code that starts a child with some code."""
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"subprocess.Popen([sys.executable, '-c', {code!r}]{arguments}); "


def test_children_of_children_end_too(trees: list[processes.ProcessTree], tmp_path: Path) -> None:
    code = START + child(START + child(SLEEP) + SLEEP) + SLEEP
    tree = start(trees, code, tmp_path)
    wait_for(tree, 3)
    processes.stop_process_tree(tree, grace_s=3)
    assert members(tree) == set()
    assert tree.returncode == -signal.SIGTERM


def test_orphans_and_own_sessions_are_found(
    trees: list[processes.ProcessTree], tmp_path: Path
) -> None:
    # The child in the middle ends at once; its own child belongs to nobody then.
    code = START + child(START + child(SLEEP, start_new_session=True)) + SLEEP
    tree = start(trees, code, tmp_path)
    wait_for(tree, 2)
    processes.stop_process_tree(tree, grace_s=1)
    assert members(tree) == set()


def test_what_is_left_of_a_tree_whose_root_has_ended_is_found(
    trees: list[processes.ProcessTree], tmp_path: Path
) -> None:
    tree = start(trees, START + child(SLEEP, start_new_session=True), tmp_path)
    assert tree.wait(timeout=20) == 0
    wait_for(tree, 1)
    processes.stop_process_tree(tree, grace_s=1)
    assert members(tree) == set()


def test_processes_that_ignore_sigterm_are_killed_after_the_grace(
    trees: list[processes.ProcessTree], tmp_path: Path
) -> None:
    tree = start(trees, START + IGNORE + child(IGNORE + SLEEP) + SLEEP, tmp_path)
    wait_for(tree, 2)
    time.sleep(0.3)  # until both ignore it
    before = time.monotonic()
    processes.stop_process_tree(tree, grace_s=0.5)
    assert 0.5 <= time.monotonic() - before < 5
    assert members(tree) == set()
    assert tree.returncode == -signal.SIGKILL


def test_stopped_processes_are_killed(trees: list[processes.ProcessTree], tmp_path: Path) -> None:
    tree = start(trees, START + child(SLEEP) + SLEEP, tmp_path)
    for pid in wait_for(tree, 2):
        os.kill(pid, signal.SIGSTOP)
    processes.stop_process_tree(tree, grace_s=0.2)
    assert members(tree) == set()


def test_stopping_twice_does_no_harm(trees: list[processes.ProcessTree], tmp_path: Path) -> None:
    tree = start(trees, SLEEP, tmp_path)
    processes.stop_process_tree(tree, grace_s=1)
    processes.stop_process_tree(tree, grace_s=1)
    assert tree.returncode is not None


def test_another_tree_and_this_process_are_left_alone(
    trees: list[processes.ProcessTree], tmp_path: Path
) -> None:
    one, other = start(trees, SLEEP, tmp_path), start(trees, SLEEP, tmp_path)
    processes.stop_process_tree(one, grace_s=1)
    assert other.poll() is None


def test_a_plain_process_and_its_children_can_be_stopped_as_well() -> None:
    code = START + child(SLEEP) + "print(1, flush=True); " + SLEEP
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        processes.stop_process_tree(process, grace_s=1)
        assert not is_alive(children[0])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_dies_with_its_parent(
    trees: list[processes.ProcessTree], tmp_path: Path, stopped: bool
) -> None:
    dies = "from eth_cli.processes import die_with_parent; die_with_parent(); " + SLEEP
    tree = start(trees, START + child(dies) + SLEEP, tmp_path)
    found = wait_for(tree, 2)
    time.sleep(0.5)  # until it has asked the kernel to
    if stopped:
        for pid in found - {tree.pid}:
            os.kill(pid, signal.SIGSTOP)
    tree.kill()
    tree.wait(timeout=10)
    wait_for(tree, 0)


def test_a_command_starts_without_its_streams_and_in_its_own_session(
    trees: list[processes.ProcessTree], tmp_path: Path
) -> None:
    code = (
        "import os, sys\n"
        "print(repr(sys.stdin.read()), os.getsid(0) == os.getpid(), file=sys.stderr)"
    )
    tree = start(trees, code, tmp_path)
    assert tree.wait(timeout=20) == 0
    assert (tmp_path / "output").read_text() == "'' True\n"
