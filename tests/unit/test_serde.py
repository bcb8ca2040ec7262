"""Reading and writing files: what is refused, what a fault says, the same bytes every time."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from eth_cli import serde
from eth_cli.errors import ConfigError
from eth_cli.faults import FieldError, format_location, shown
from eth_cli.serde import Record


class Wheel(Record):
    """A part with a rule of its own."""

    label_keys = ("side",)

    side: Literal["left", "right"]
    size_m: Annotated[float, Field(gt=0)]


class Cart(Record):
    """A small format."""

    name: Annotated[str, Field(min_length=1)]
    wheels: Annotated[tuple[Wheel, ...], Field(min_length=1, max_length=4)]
    loads: dict[str, int] = {}
    owner: str | None = None


GOOD: dict[str, Any] = {"name": "c", "wheels": [{"side": "left", "size_m": 0.5}]}


def faults(data: Any) -> list[tuple[str, str]]:
    """Field and message of every fault of a cart."""
    with pytest.raises(ConfigError) as error:
        serde.validate(Cart, data, "cart.json")
    assert {fault.file for fault in error.value.faults} == {"cart.json"}
    return [(fault.field, fault.message) for fault in error.value.faults]


def wheel(**keys: Any) -> dict[str, Any]:
    """A cart with one wheel that is changed."""
    return GOOD | {"wheels": [GOOD["wheels"][0] | keys]}


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (GOOD | {"name": ""}, "name", "must not be empty"),
        (GOOD | {"name": 3}, "name", "must be a text, not 3; put it in quotes"),
        (GOOD | {"name": None}, "name", "must be a text, not nothing (null)"),
        (GOOD | {"wheels": []}, "wheels", "must have at least 1 entry, not 0"),
        (GOOD | {"wheels": GOOD["wheels"] * 5}, "wheels", "must have at most 4 entries, not 5"),
        (GOOD | {"wheels": {}}, "wheels", "must be a list, not a mapping"),
        (
            GOOD | {"wheels": ["left"]},
            "wheels[0]",
            'must be a mapping of keys to values, not "left"',
        ),
        (GOOD | {"loads": {"a": 1.5}}, "loads.a", "must be a whole number, not 1.5"),
        (GOOD | {"loads": {"a b": True}}, 'loads["a b"]', "must be a whole number, not true"),
        (wheel(size_m="big"), "wheels[0].size_m", 'must be a number, not "big" (side left)'),
        (wheel(size_m=-2), "wheels[0].size_m", "must be greater than 0, not -2 (side left)"),
        (
            wheel(size_m=float("nan")),
            "wheels[0].size_m",
            "must be a finite number, not nan (side left)",
        ),
        (wheel(side="top"), "wheels[0].side", "must be 'left' or 'right', not \"top\" (side top)"),
    ],
)
def test_a_fault_says_what_must_be_and_what_is(data: Any, field: str, message: str) -> None:
    assert faults(data) == [(field, message)]


def test_an_unknown_key_lists_the_valid_ones_and_the_nearest() -> None:
    found = faults(GOOD | {"ownr": "me"})
    assert found == [
        ("ownr", "unknown key (did you mean owner?); valid keys are name, wheels, loads, owner")
    ]
    assert faults(wheel(xyzzy=1)) == [
        ("wheels[0].xyzzy", "unknown key; valid keys are side, size_m (side left)")
    ]


def test_a_misspelt_key_is_one_fault_though_the_right_one_is_missing_too() -> None:
    assert [field for field, _ in faults({"nam": "c", "wheels": GOOD["wheels"]})] == ["nam"]
    assert faults({"wheels": GOOD["wheels"]}) == [("name", "is missing")]


def test_every_fault_is_found_in_one_reading() -> None:
    data = {"name": 1, "wheels": [{"side": "up"}, {"size_m": -1, "side": "left"}], "x": 2}
    assert [field for field, _ in faults(data)] == [
        "name",
        "wheels[0].side",
        "wheels[0].size_m",
        "wheels[1].size_m",
        "x",
    ]


@pytest.mark.parametrize("text", ["[1]", "3", '"a"', "null", "true"])
def test_only_a_mapping_is_a_file(text: str) -> None:
    with pytest.raises(ConfigError, match="mapping of keys to values"):
        serde.validate(Cart, serde.parse_json(text, "f"), "f")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1, "a": 2}', '"a" stands twice'),
        ('{"a": ', "line 1: is not valid JSON"),
        ("{\n'a': 1}", "line 2"),
        ("[" * 100_000, "nested too deeply"),
        ("9" * 5000, "too many digits"),
    ],
)
def test_broken_json_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        serde.parse_json(text, "f.json")
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", 'line 2: is not valid YAML: the key "a" stands twice'),
        ("a: &x 1\nb: *x", "line 2: is not valid YAML: aliases"),
        ("1: a", "the key 1 must be a text"),
        ("? {a: b}\n: c", "the key a mapping must be a text"),
        ("on: true", "the key true must be a text"),
        ("<<: {a: 1}", "line 1: is not valid YAML"),
        ("a: !!python/object:x.Y {}", "line 1"),
        ("a: [1", "not valid YAML"),
        ("a: " + "[" * 9_000, "nested too deeply"),
    ],
)
def test_broken_or_tricky_yaml_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        serde.parse_yaml(text, "f.yaml")
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_yaml_types_other_than_plain_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="set; write texts"):
        serde.validate(Cart, serde.parse_yaml("name: !!set {a}\nwheels: []", "f"), "f")


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"a\xffb", "is not UTF-8 text (byte 1)")],
)
def test_text_that_cannot_be_read(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        serde.read_text(path)
    assert says in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        serde.read_text(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        serde.read_text(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read"):
        serde.read_text(tmp_path / ("x" * 300))
    monkeypatch.setattr(serde, "MAX_FILE_BYTES", 3)
    (tmp_path / "large").write_text("four")
    with pytest.raises(ConfigError, match="has more than 3 bytes"):
        serde.read_text(tmp_path / "large")
    # A device says no size and may have no end.
    with pytest.raises(ConfigError, match="has more than 3 bytes"):
        serde.read_text("/dev/zero")


def test_writing_is_whole_and_the_same_bytes(tmp_path: Path) -> None:
    cart = serde.validate(Cart, GOOD, "f")
    serde.write_json(tmp_path / "a.json", cart)
    serde.write_json(tmp_path / "b.json", cart)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert serde.read_json(tmp_path / "a.json", Cart) == cart
    assert "owner" not in json.loads((tmp_path / "a.json").read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]
    with pytest.raises(ConfigError, match="cannot be written"):
        serde.write_json(tmp_path / "none" / "a.json", cart)


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("there/real.json")
    for text in ("one", "two"):  # The first makes the file that the link has waited for.
        serde.write_text(link, text)
        assert (tmp_path / "there/real.json").read_text() == text
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["link.json", "real.json", "there"]


def test_what_is_no_file_of_its_own_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        serde.write_text(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        serde.write_text(tmp_path, "text")


def test_a_device_that_is_written_to_stays_one(tmp_path: Path) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))  # a /dev/full of our own
        os.close(os.open(full, os.O_WRONLY))
    except OSError:
        pytest.skip("devices can be made by root only, on a file system that allows them")
    with pytest.raises(ConfigError, match="full: cannot be written: No space left"):
        serde.write_text(full, "text")
    assert stat.S_ISCHR(full.stat().st_mode)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_stdout_by_its_path_is_stdout(tmp_path: Path, kind: str) -> None:
    script = (
        "import sys; from eth_cli import serde, stdout; print('a'); "
        "serde.write_text('/dev/stdout', 'b'); print('c'); print(stdout.is_stdout(sys.argv[1]))"
    )
    with open(tmp_path / "out", "w+") as out:
        done = subprocess.run(
            [sys.executable, "-c", script, "/dev/stdin"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if kind == "pipe" else out,
            text=True,
            timeout=60,
            check=True,
        )
        out.seek(0)
        said = done.stdout if kind == "pipe" else out.read()
    assert said == "a\nbc\nFalse\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError) as error:
        serde.write_text(tmp_path / "f.json", "text")
    expected = f"{tmp_path / 'f.json'}: cannot be written: Read-only file system"
    assert str(error.value) == expected


def test_a_digest_follows_content_and_not_order() -> None:
    assert serde.digest({"a": 1, "b": [2]}) == serde.digest({"b": [2], "a": 1})
    assert serde.digest({"a": 1}) != serde.digest({"a": 2})


def test_places_and_values_stay_on_one_line() -> None:
    assert format_location(("nodes", 0, "type", "a\nb")) == 'nodes[0].type["a\\nb"]'
    assert shown("x" * 500) == '"' + "x" * 56 + "..."
    assert shown([]) == "an empty list"
    assert shown(10**5000) == "a huge number"


def test_a_types_own_faults_keep_their_places() -> None:
    error = FieldError([(("a", 1), "is wrong"), ((), "is odd")])
    found = serde.config_error(error, Cart, "f").faults
    assert [(fault.field, fault.message) for fault in found] == [
        ("a[1]", "is wrong"),
        ("", "is odd"),
    ]
