"""The HTML page of a report, in a real browser: nothing is loaded, nothing fails, all is drawn."""

from __future__ import annotations

import html.parser
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from builders import make_cluster
from run_folders import planned, write_run

from eth_cli.cli import main
from eth_cli.events import Scalar, write_events
from eth_cli.plan import Plan
from eth_cli.render.html import curves, svg
from eth_cli.render.html.page import report_page
from eth_cli.render.html.timeline import timeline
from eth_cli.report import build_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
HOSTILE = '</title><script>console.error("pwned")</script>"\'&'


def page_of(folder: Path, plan: Plan) -> str:
    return report_page(build_report(folder), plan)


class Elements(html.parser.HTMLParser):
    """Counts elements by name and class, and keeps texts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.classes: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        for name, value in attrs:
            if name == "class" and value:
                self.classes.update(value.split())
            if name in ("src", "href", "xlink:href") and value:
                self.addresses.append(value)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    plan = planned()
    text = page_of(write_run(tmp_path / "run", plan).root, plan)
    found = Elements(text)
    assert found.addresses == ["data:,"]
    assert found.names["script"] == 0
    assert "@import" not in text
    assert "url(" not in text
    assert not re.search(r"https?://", text)


def test_every_span_of_both_timelines_is_drawn(tmp_path: Path) -> None:
    plan = planned()
    report = build_report(write_run(tmp_path / "run", plan).root)
    drawn = Elements(timeline(plan, report.measured_spans, report.predicted_spans)).classes
    expected = Counter(
        span.name
        for span in (*report.measured_spans, *report.predicted_spans)
        if span.stop_s > span.start_s
    )
    assert expected["F"] == expected["B"] == 2 * 2 * (5 + 3)
    assert drawn["forward"] == expected["F"]
    assert drawn["backward"] == expected["B"]
    # Those of the least blocks are thinner than a pixel and follow each other.
    assert 0 < drawn["sync"] <= expected["SYNC"]
    assert drawn["optimizer"] == expected["OPTIMIZER"]
    assert (
        drawn["predicted"]
        == sum(drawn[name] for name in ("forward", "backward", "sync", "optimizer")) / 2
    )


def test_names_are_escaped(tmp_path: Path) -> None:
    cluster = make_cluster().model_copy(update={"name": HOSTILE})
    plan = planned().model_copy(update={"cluster": cluster})
    report = build_report(write_run(tmp_path / "run", plan).root)
    report = replace(
        report, model=HOSTILE, run_dir=tmp_path / HOSTILE.replace("/", "|"), notes=(HOSTILE,)
    )
    found = Elements(report_page(report, plan))
    assert found.names["script"] == 0
    assert sum(HOSTILE in text for text in found.texts) >= 3


def test_a_run_without_prediction_has_a_page_too(tmp_path: Path) -> None:
    plan = planned(predicted=False, cluster=False)
    folder = write_run(tmp_path / "run", plan, profile=False, skipped=(3,))
    found = Elements(page_of(folder.root, plan))
    assert found.classes["predicted"] == 1  # in a legend
    assert found.classes["forward"] > 0
    assert found.classes["expected"] == 0


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", planned())
    target = tmp_path / "report.html"
    with pytest.raises(SystemExit) as caught:
        main(["report", str(folder.root), "--html", str(target)])
    assert caught.value.code == 0
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "wrote" in capsys.readouterr().err


# --- Parts ----------------------------------------------------------------------------------------


def test_a_long_curve_keeps_its_peaks() -> None:
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[54_321] = (54_321, 1e6)
    points[77_777] = (77_777, -1e6)
    kept = curves.thinned(points)
    assert len(kept) <= curves.MAX_POINTS + 4
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert kept == sorted(kept)


def test_smoothing_keeps_a_constant_and_halves_noise() -> None:
    constant = curves.smoothed([(s, 3.5) for s in range(100)])
    assert [value for _, value in constant] == pytest.approx([3.5] * 100)
    noise = [(s, float((-1) ** s)) for s in range(600)]
    assert max(abs(value) for _, value in curves.smoothed(noise)[100:]) < 0.1


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.1, 3.2), (-5e-4, 2e-3), (0.0, 7e9)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = svg.ticks(low, high, 5)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-12 <= value <= high + (high - low) * 1e-9 for value in found)


def test_values_that_are_not_finite_are_left_out() -> None:
    def chart(points: list[tuple[int, float]]) -> str:
        curve = curves.Curve(name="x", points=points, text=str)
        return curves.chart(curve, width=300, height=100)

    assert "nan" not in chart([(1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0)])
    assert "no finite value" in chart([(1, float("nan"))])
    assert "circle" in chart([(7, 1.0)])


# --- In a browser ---------------------------------------------------------------------------------


def browse(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1280,1500",
            f"--user-data-dir={page.parent / 'browser'}",
            "--enable-logging=stderr",
            *arguments,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def pixels(path: Path) -> list[bytes]:
    """Rows of an 8-bit PNG without interlacing, unfiltered; three or four bytes a pixel."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, body, size = 8, b"", 0
    width = 0
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, chunk = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert (depth, interlaced) == (8, 0)
            size = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            body += chunk
        position += 12 + length
    return _unfiltered(zlib.decompress(body), width * size, size)


def _unfiltered(raw: bytes, stride: int, size: int) -> list[bytes]:
    rows: list[bytes] = []
    above = bytes(stride)
    for start in range(0, len(raw), stride + 1):
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + stride])
        for i in range(stride):
            left = row[i - size] if i >= size else 0
            corner = above[i - size] if i >= size else 0
            if kind == 1:
                row[i] = (row[i] + left) & 255
            elif kind == 2:
                row[i] = (row[i] + above[i]) & 255
            elif kind == 3:
                row[i] = (row[i] + (left + above[i]) // 2) & 255
            elif kind == 4:
                guess = left + above[i] - corner
                nearest = min((left, above[i], corner), key=lambda value: abs(value - guess))
                row[i] = (row[i] + nearest) & 255
        above = bytes(row)
        rows.append(above)
    return rows


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install one to see the page drawn")
@pytest.mark.timeout(240)
def test_a_real_browser_shows_the_page(tmp_path: Path) -> None:
    plan = planned()
    folder = write_run(tmp_path / "run", plan)
    write_events(folder.events_of(0), [Scalar(rank=0, name="peak_memory_bytes", value=3e8)])
    page = tmp_path / "report.html"
    page.write_text(page_of(folder.root, plan), encoding="utf-8")

    shot = tmp_path / "shot.png"
    done = browse(page, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    found = Elements(done.stdout)
    assert found.names["section"] >= 8
    assert found.classes["forward"] > 2 * 2 * (5 + 3)
    assert found.classes["curve"] == 4
    assert found.classes["stage"] == 4
    assert found.classes["memory"] == 4 + 4 + 1

    done = browse(page, f"--screenshot={shot}")
    assert "CONSOLE" not in done.stderr
    rows = pixels(shot)
    size = len(rows[0]) // 1280
    colours = Counter(row[i : i + 3] for row in rows[::3] for i in range(0, len(row), 3 * size))
    # The colours of forward, backward and of the loss curve, as the page's style has them.
    for name in ("4f8fe8", "2a58a8", "2a6fd6"):
        assert colours[bytes.fromhex(name)] > 20, name


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: install one to see errors reported")
@pytest.mark.timeout(120)
def test_the_browser_would_have_told_of_an_error(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>undefined_function()</script>", encoding="utf-8")
    assert "CONSOLE" in browse(page, "--dump-dom").stderr
