"""The command line as a process: what its streams are, and how it ends when it is ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from builders import make_profile
from test_bad_input import CLUSTER, MODEL

from eth_cli import cli, serde
from eth_cli.plan import read_plan

PLAN = "plan --cluster cluster.yaml --profile profile.json --global-batch-size 8"
ANALYTIC = "profile --cluster cluster.yaml --model model.yaml --seq-len 16 --analytic -o out.json"
STREAMS_CLOSED = 'exec "$@" <&- >&- 2>&-'


@pytest.fixture(autouse=True)
def _files(in_tmp_path: Path) -> None:
    Path("cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    Path("model.yaml").write_text(yaml.safe_dump(MODEL))
    serde.write_json("profile.json", make_profile())


def command(line: str) -> list[str]:
    """What starts ``eth`` with a line of arguments."""
    return [sys.executable, "-m", "eth_cli", *line.split()]


def run(
    line: str, *, shell: str = 'exec "$@"', buffered: bool = True
) -> subprocess.CompletedProcess[str]:
    """A command that a shell starts, which may redirect its streams."""
    return subprocess.run(
        ["bash", "-c", shell, "bash", *command(line)],
        env=os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("shell", ['exec "$@" >&-', STREAMS_CLOSED])
def test_closed_streams_are_streams_that_nobody_reads(shell: str) -> None:
    done = run(f"{PLAN} -o plan.json", shell=shell)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr in ("", "wrote plan.json\n")
    assert read_plan("plan.json").global_batch_size == 8


@pytest.mark.parametrize(
    ("line", "buffered"),
    [
        *(("--version", True), ("--version", False), ("plan --help", True)),
        *((PLAN, True), (PLAN, False), (f"{PLAN} --json", True), (f"{PLAN} --json", False)),
    ],
)
def test_a_full_stdout_is_said_in_one_line(line: str, buffered: bool) -> None:
    done = run(line, shell='exec "$@" >/dev/full', buffered=buffered)
    assert done.stderr == "error: stdout: cannot be written: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.parametrize("line", ["--version", "--help", f"{PLAN} --json"])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_reader_that_has_gone_ends_the_command_quietly(line: str, buffered: bool) -> None:
    # The reader ends before the command starts.
    shell = '{ sleep 0.1; "$@"; echo "$?" >&2; } | true'
    done = run(line, shell=shell, buffered=buffered)
    assert done.stderr == "141\n"


@pytest.mark.parametrize("more", ["", " --json", " --compare"])
def test_a_plan_that_goes_to_stdout_has_stdout_for_itself(more: str) -> None:
    done = run(f"{PLAN} -o /dev/stdout{more}")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["global_batch_size"] == 8
    assert run(f"{PLAN} -o plan.json").stderr == "wrote plan.json\n"
    # How long the search took is told too, in whole seconds: another search may take longer.
    wall = re.compile(r'"wall_s": [\d.]+')
    assert wall.sub("", Path("plan.json").read_text()) == wall.sub("", done.stdout)


def test_other_results_that_go_to_stdout() -> None:
    done = run(ANALYTIC.replace("out.json", "/dev/stdout"))
    assert done.returncode == 0
    assert json.loads(done.stdout)["seq_len"] == 16
    assert run(f"{PLAN} -o plan.json").returncode == 0
    simulate = "simulate plan.json --cluster cluster.yaml --profile profile.json"
    assert json.loads(run(f"{simulate} --trace /dev/stdout").stdout)["traceEvents"]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("plan --cluster none.yaml --global-batch-size 8 -o ro/p.json", "--output: ro/p.json"),
        (
            "profile --cluster none.yaml --model gpt-tiny --seq-len 8 -o ro/p.json",
            "--output: ro/p.json",
        ),
        (
            "simulate none.json --cluster none.yaml --profile none.json --trace ro/t.json",
            "--trace: ro/t.json",
        ),
        ("report none --trace ro/t.json", "--trace: ro/t.json"),
    ],
)
def test_a_read_only_folder_is_told_before_the_work(
    line: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ro").mkdir()
    # Root may write everywhere but on a read-only file system, of which access tells too.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "ro")
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {option} cannot be written: the folder ro is read-only for this user\n"
    )


@pytest.mark.parametrize("delay_s", [0.03, 0.1, 0.2, 0.4, 0.8])
@pytest.mark.parametrize("line", [PLAN, ANALYTIC])
def test_ctrl_c_while_it_loads_is_one_quiet_end(line: str, delay_s: float) -> None:
    script = "import sys; from eth_cli.__main__ import main; print('ready', flush=True); main()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    if process.returncode == 0:  # It was done before.
        return
    assert process.returncode == 130
    assert "Traceback" not in err
    errors = [text for text in err.splitlines() if "error" in text]
    assert len(errors) <= 1
    assert all(text.startswith("error: interrupted") for text in errors)


def test_a_background_job_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    shell = "trap '' INT; exec \"$@\""
    script = (
        "import os, signal; from eth_cli import __main__, cli\n"
        "cli.main = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "__main__.main(); print('still here')"
    )
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_a_plan_from_data_sheets_is_simulated_with_any_profile_of_the_model() -> None:
    estimated = "--model model.yaml --seq-len 16"
    line = f"plan --cluster cluster.yaml {estimated} --global-batch-size 8 -o plan.json"
    assert run(line).returncode == 0
    plan = read_plan("plan.json")
    assert plan.provenance is not None
    assert set(plan.provenance.digests) == {"cluster"}
    sizes = {p.micro_batch_size for p in plan.pipelines} | {1}
    names = ",".join(map(str, sorted(sizes)))
    assert run(f"{ANALYTIC} --micro-batch-sizes {names}").returncode == 0
    done = run("simulate plan.json --cluster cluster.yaml --profile out.json --json")
    assert done.returncode == 0, done.stderr
    assert plan.predicted is not None
    found = json.loads(done.stdout)["step_time_s"]
    assert found == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_the_reason_why_no_plan_exists_is_the_last_line() -> None:
    cluster = yaml.safe_load(Path("cluster.yaml").read_text())
    for entry in cluster["device_types"].values():
        entry["memory"] = "10kB"
    Path("cluster.yaml").write_text(yaml.safe_dump(cluster))
    done = run(
        "plan --cluster cluster.yaml --model model.yaml --seq-len 16 "
        "--global-batch-size 8 -o p.json"
    )
    assert (done.returncode, done.stdout) == (3, "")
    *progress, last = done.stderr.splitlines()
    assert last.startswith("error: no plan exists: ")
    assert not any("error" in line for line in progress)
    assert not Path("p.json").exists()
