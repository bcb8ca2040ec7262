"""`eth checkpoint`: a run folder -> which checkpoints it has, and whether they are intact."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eth_cli import serde
from eth_cli.commands import arguments
from eth_cli.errors import ConfigError
from eth_cli.launch.checkpoints import State, examine, examine_all, steps_of
from eth_cli.launch.config import RunFolder


def run_list(*, run_dir: Path, as_json: bool) -> None:
    """Show all checkpoints of a run, oldest first; of their files names and sizes are checked.

    Raises:
        ConfigError: there is no such folder.
    """
    states = examine_all(_folder(run_dir), contents=False)
    _show(states, as_json=as_json)


def run_verify(*, run_dir: Path, step: int | None, as_json: bool) -> None:
    """Read the checkpoints of a run, or one of them, and hold them against what was written.

    Raises:
        ConfigError: there is no such folder or checkpoint; some of them are damaged.
    """
    folder = _folder(run_dir)
    known = sorted(steps_of(folder))
    if not known or (step is not None and step not in known):
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"; there are those of steps {', '.join(map(str, known))}" if known else ""
        raise ConfigError.single(str(folder.checkpoints), "", f"holds {wanted}{there}")
    steps = known if step is None else [step]
    states = [examine(folder, s, contents=True) for s in steps]
    _show(states, as_json=as_json)
    faults = [state.fault for state in states if state.fault is not None]
    if faults:
        raise ConfigError(faults)


def _folder(run_dir: Path) -> RunFolder:
    return RunFolder(arguments.input_folder(run_dir))


def _show(states: Sequence[State], *, as_json: bool) -> None:
    from eth_cli.render.console import print_json, print_result

    if as_json:
        print_json(serde.dump_json({"checkpoints": [_data(state) for state in states]}))
        return
    from eth_cli.render.checkpoints import checkpoints_view

    print_result(checkpoints_view(states))


def _data(state: State) -> dict[str, Any]:
    return {
        "step": state.step,
        "next_sample": None if state.info is None else state.info.next_sample,
        "plan_digest": None if state.info is None else state.info.plan_digest,
        "bytes": state.num_bytes,
        "fault": None if state.fault is None else dataclasses.asdict(state.fault),
    }
