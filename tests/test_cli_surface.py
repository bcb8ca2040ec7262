"""The command line as users' scripts know it. A new option is added here on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from eth_cli.cli import RULES, app, main
from eth_cli.search.pruning import NAMES

ROOT = Path(__file__).resolve().parents[1]

SURFACE = {
    "profile": [
        "--analytic",
        "--cluster",
        "--dtype",
        "--micro-batch-sizes",
        "--model",
        "--output",
        "--seq-len",
        "-o",
    ],
    "plan": [
        "--cluster",
        "--compare",
        "--dtype",
        "--exclude",
        "--explain",
        "--from",
        "--frontier",
        "--frontier-svg",
        "--global-batch-size",
        "--json",
        "--lost",
        "--max-gap",
        "--max-pipelines",
        "--max-step-time",
        "--micro-batch-size",
        "--model",
        "--no-prune",
        "--no-recompute",
        "--objective",
        "--output",
        "--pin",
        "--profile",
        "--seq-len",
        "--strategy",
        "--tensor-parallel",
        "--time-limit",
        "--what-if",
        "-o",
    ],
    "simulate": [
        "--bucket-size",
        "--cluster",
        "--json",
        "--no-overlap",
        "--profile",
        "--trace",
        "plan",
    ],
    "run": [
        "--backend",
        "--bucket-size",
        "--checkpoint-every",
        "--clip",
        "--cluster",
        "--data",
        "--data-cache",
        "--dry-run",
        "--grad-sync",
        "--ignore-borders",
        "--keep",
        "--loss-chunk",
        "--lr",
        "--model",
        "--out",
        "--profile",
        "--reduce-dtype",
        "--rehearse",
        "--resume",
        "--seed",
        "--shard-optimizer",
        "--steps",
        "--text-field",
        "--tokenizer",
        "--warmup",
        "plan",
    ],
    "report": ["--against", "--html", "--json", "--trace", "run_dir"],
    "checkpoint list": ["--json", "run_dir"],
    "checkpoint verify": ["--json", "--step", "run_dir"],
}


def surface() -> dict[str, list[str]]:
    """Every command's options and arguments."""
    return {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands_of(typer.main.get_command(app))
    }


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with its name, those of a group with the group's before it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def test_commands_and_options_are_the_known_ones() -> None:
    assert surface() == SURFACE


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    sections = dict(
        (section.split("\n", 1) for section in text.split("\n## ")[1:]),
    )
    for command, options in SURFACE.items():
        for option in options:
            if option.startswith("-"):
                assert f"`{option}" in sections[f"eth {command}"], (command, option)


def test_rules_of_the_search_are_named_wherever_they_are_told() -> None:
    assert RULES == NAMES
    for document in ("cli.md", "search.md"):
        text = (ROOT / "docs" / document).read_text(encoding="utf-8")
        assert all(f"`{name}`" in text for name in NAMES), document


def test_version_and_help() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).stdout.startswith("eth ")
    text = runner.invoke(app, ["--help"]).stdout
    assert all(command.split()[0] in text for command in SURFACE)
    assert "ETH_DEBUG" in text


def test_without_arguments_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["pln"], "pln"),
        (["plan"], "--cluster"),
        (["run", "p.json", "--steps"], "--steps"),
        (["simulate", "p.json", "extra", "--cluster", "c", "--profile", "p"], "extra"),
        (["report"], "RUN_DIR"),
    ],
)
def test_wrong_usage_is_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
