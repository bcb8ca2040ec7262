"""Documents stay true: links lead somewhere, options exist, tables of keys are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_cli_surface import SURFACE

from eth_cli import serde
from eth_cli.cluster_file import ClusterFile, DeviceTypeEntry, NetworkEntry, NodeEntry
from eth_cli.errors import ConfigError
from eth_cli.plan import Pipeline, Plan, Stage
from eth_cli.profile.table import ComputeEntry, LinkEntry, Profile, ProfiledModel
from eth_cli.serde import Record

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHER_PROGRAMS = {"--fix", "--reference", "--write", "--only", "--samples-per-device"} | {
    *("--clusters", "--first", "--quick")
}
"""Options in documents that are not of `eth`."""


def text_of(name: str) -> str:
    """A document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "#")):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve()
        assert other.exists(), f"{path.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    known = {option for options in SURFACE.values() for option in options}
    known |= {"--help", "--version"} | OTHER_PROGRAMS
    unknown = set(OPTION.findall(path.read_text(encoding="utf-8"))) - known
    assert not unknown


@pytest.mark.parametrize(
    "record",
    [
        *(ClusterFile, DeviceTypeEntry, NodeEntry, NetworkEntry),
        *(Profile, ProfiledModel, ComputeEntry, LinkEntry),
        *(Plan, Pipeline, Stage),
    ],
    ids=lambda record: record.__name__,
)
def test_every_key_is_described(record: type[Record]) -> None:
    text = text_of("docs/formats.md")
    described = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", text))))
    keys = {field.alias or name for name, field in record.model_fields.items()}
    missing = keys - described
    assert not missing


def test_what_formats_md_shows_can_be_read() -> None:
    text = text_of("docs/formats.md")
    blocks = re.findall(r"```(json|yaml)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["yaml", "json", "json"]
    cluster = serde.validate(ClusterFile, serde.parse_yaml(blocks[0][1], "doc"), "doc").resolve()
    assert len(cluster.devices) == 11
    plan = serde.validate(Plan, serde.parse_json(blocks[2][1], "doc"), "doc")
    assert plan.num_blocks == 8
    profile = serde.parse_json(blocks[1][1], "doc")
    with pytest.raises(ConfigError, match="every kind needs one"):
        serde.validate(Profile, profile, "doc")  # shortened, and said so
    assert "shortened" in text
    (entry,) = profile["compute"]
    profile["compute"] = [entry | {"block": group["kind"]} for group in profile["model"]["blocks"]]
    assert serde.validate(Profile, profile, "doc").model.num_blocks == 26
