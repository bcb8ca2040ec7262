"""Values on the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eth_cli.commands import arguments
from eth_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "number"), [("1", 1), (" 12 ", 12), ("1000000000", 10**9), (7, 7)]
)
def test_whole_numbers(text: str | int, number: int) -> None:
    assert arguments.whole_number("-x")(text) == number


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0", "0 is too small; the least is 1"),
        ("-3", "-3 is too small; the least is 1"),
        ("1000000001", "1000000001 is too large; the most is 1000000000"),
        ("1.0", "'1.0' is not a whole number"),
        ("1e3", "'1e3' is not a whole number"),
        ("1_000", "'1_000' is not a whole number"),
        ("٣", "not a whole number"),
        ("--1", "not a whole number"),
        ("", "'' is not a whole number"),
        ("9" * 5000, "not a whole number"),
    ],
)
def test_numbers_that_are_refused_with_both_numbers(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        arguments.whole_number("--steps")(text)
    assert str(error.value).startswith("--steps: ")
    assert says in str(error.value)
    assert len(str(error.value)) < 100


def test_lists_of_numbers() -> None:
    parse = arguments.whole_numbers("--sizes")
    assert parse("4,1,2") == (1, 2, 4)
    for text in ("", "1,", "1,1", "1;2"):
        with pytest.raises(ConfigError):
            parse(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "one", ""])
def test_real_numbers_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lr: "):
        arguments.real_number("--lr")(text)
    assert arguments.real_number("--lr")("1e-3") == 0.001


def test_choices_suggest_the_nearest() -> None:
    parse = arguments.choice("--strategy", ("hpp", "uneven-layers", "even"))
    assert parse("hpp") == "hpp"
    with pytest.raises(ConfigError, match=r"did you mean even\?"):
        parse("eve")


def test_outputs_are_checked_before_the_work(tmp_path: Path) -> None:
    good = tmp_path / "plan.json"
    assert arguments.output_file("-o", good) == good
    assert not good.exists()
    with pytest.raises(ConfigError, match="is a folder"):
        arguments.output_file("-o", tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        arguments.output_file("-o", tmp_path / "none" / "plan.json")


def test_an_output_does_not_replace_an_input(tmp_path: Path) -> None:
    cluster, link = tmp_path / "c.yaml", tmp_path / "link.yaml"
    cluster.write_text("name: c")
    link.symlink_to(cluster)
    for output in (cluster, link, tmp_path / "." / "c.yaml"):
        with pytest.raises(ConfigError, match=r"^-o: \S+ is read by this command too"):
            arguments.output_file("-o", output, inputs=(None, cluster))
    other = tmp_path / "plan.json"
    assert arguments.output_file("-o", other, inputs=(cluster, tmp_path / "absent")) == other
    # One device may well be both: what it gives is not what was written to it.
    null = Path("/dev/null")
    assert arguments.output_file("-o", null, inputs=(null,)) == null


def test_outputs_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^-o: .*name too long"):
        arguments.output_file("-o", tmp_path / ("x" * 300))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is a file, not a folder"):
        arguments.output_file("-o", tmp_path / "file" / "x.json")


def test_outputs_that_lead_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to("none/plan.json")
    with pytest.raises(ConfigError, match=r"the folder \S+/none does not exist"):
        arguments.output_file("-o", link)
    os.mkfifo(pipe)
    assert arguments.output_file("-o", pipe) == pipe
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"^-o: \S+/pipe cannot be written"):
        arguments.output_file("-o", pipe)


def test_paths_are_not_empty() -> None:
    assert arguments.path("--out")("a b") == Path("a b")
    for text in ("", " "):
        with pytest.raises(ConfigError, match=r"^--out: is empty"):
            arguments.path("--out")(text)
