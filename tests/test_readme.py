"""What the README tells people to type works, and is what CI runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eth_cli.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
    return ["\n".join(line[len(indent) :] for line in text.splitlines()) for indent, text in blocks]


def test_the_two_commands_are_the_first_thing_and_what_ci_runs() -> None:
    commands = [line.split("#")[0].strip() for line in code_blocks("bash")[0].splitlines()]
    assert commands == ["./demo", "./check"]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in commands:
        assert os.access(ROOT / command, os.X_OK)
        assert f"\n{command}" in ci


@pytest.mark.skipif(shutil.which("bash") is None, reason="the demo is a bash script")
@pytest.mark.timeout(400)
def test_the_demo_in_small(tmp_path: Path) -> None:
    # The environment that runs this test has all that the demo needs, and so is used as it is.
    environment = os.environ | {"VENV": sys.prefix, "STEPS": "3", "EVEN_STEPS": "2"}
    out = tmp_path / "out"
    done = subprocess.run(
        ["bash", str(ROOT / "demo"), str(out)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"hpp is \d\.\d\d x as fast as even, measured \(\d\.\d\d x predicted\); "
        r"loss \d\.\d{4} -> \d\.\d{4}",
        last,
    )
    records = [json.loads(line) for line in (out / "hpp/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the demo is a bash script")
def test_the_demo_removes_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = subprocess.run(
        ["bash", str(ROOT / "demo"), str(tmp_path)],
        env=os.environ | {"VENV": sys.prefix},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "name another folder" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the demo is a bash script")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "./demo [FOLDER]"),
        (["-h"], 0, "STEPS, EVEN_STEPS"),
        (["--fast"], 2, "no option --fast"),
        (["a", "b"], 2, "give one folder"),
        ([""], 2, "give one folder"),
    ],
)
def test_the_demo_tells_how_it_is_used(
    arguments: list[str], code: int, says: str, in_tmp_path: Path
) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "demo"), *arguments],
        env=os.environ | {"VENV": str(in_tmp_path / "none"), "PYTHON": "false"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code
    assert says in (done.stderr if code else done.stdout)
    assert "set -euo" not in done.stdout + done.stderr
    assert not list(in_tmp_path.iterdir())


@pytest.mark.usefixtures("in_tmp_path")
def test_planning_from_data_sheets(capsys: pytest.CaptureFixture[str]) -> None:
    (cluster,) = code_blocks("yaml")
    Path("lab.yaml").write_text(cluster)
    command = next(
        line for block in code_blocks("bash") for line in block.splitlines() if "lab" in line
    )
    with pytest.raises(SystemExit) as end:
        main(command.split()[1:])
    assert end.value.code == 0
    assert "hpp" in capsys.readouterr().out
