"""Text as samples, and every way in which data can be bad."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eth_cli.errors import ConfigError
from eth_cli.launch import dataset
from eth_cli.launch.dataset import IGNORED_LABEL, TokenSource, WindowedTokens, open_source


def open_text(path: Path, *, seq_len: int = 4) -> TokenSource:
    return open_source(str(path), seq_len=seq_len, vocab_size=256)


def text_of(source: TokenSource) -> bytes:
    """The bytes that all windows hold together."""
    parts = []
    for index in range(source.num_samples):
        tokens, labels = source.sample(index)
        num_valid = source.num_valid(index)
        assert np.array_equal(tokens[1:num_valid], labels[: num_valid - 1])
        assert (labels[num_valid:] == IGNORED_LABEL).all()
        assert num_valid == (labels != IGNORED_LABEL).sum()
        parts.append(bytes([*tokens[:num_valid], labels[num_valid - 1]]))
    return b"".join(parts)


@pytest.mark.parametrize(("num_bytes", "num_samples"), [(5, 1), (6, 1), (7, 2), (10, 2), (13, 3)])
def test_windows_hold_every_byte_once(tmp_path: Path, num_bytes: int, num_samples: int) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(bytes(range(97, 97 + num_bytes)))
    source = open_text(path)
    assert source.num_samples == num_samples
    # A single byte that is left over has no label, so no window is made for it.
    kept = num_bytes - (num_bytes % 5 == 1)
    assert text_of(source) == path.read_bytes()[:kept]


def test_sample_outside_the_data_is_an_error() -> None:
    source = WindowedTokens(np.arange(10, dtype=np.uint8), seq_len=4, digest="")
    with pytest.raises(IndexError, match="sample 2 of 2"):
        source.sample(2)


def test_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.txt", "planet"), ("a.txt", "hello"), ("c.md", "not this")):
        (tmp_path / name).write_text(text)
    assert text_of(open_text(tmp_path)) == b"hello\nplanet"


def test_built_in_text_is_long_and_the_same_every_time() -> None:
    first, second = (open_source(None, seq_len=128, vocab_size=300) for _ in range(2))
    assert first.num_samples == second.num_samples > 1000
    assert np.array_equal(first.sample(7)[0], second.sample(7)[0])


def test_cache_is_filled_once_and_follows_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("first text")
    assert text_of(open_text(path)) == b"first text"
    cached = list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.bin"))
    assert len(cached) == 1
    monkeypatch.setattr(dataset, "_fill_cache", lambda *_: pytest.fail("the cache is not used"))
    assert text_of(open_text(path)) == b"first text"
    monkeypatch.undo()
    path.write_text("other, longer")
    assert text_of(open_text(path)) == b"other, longer"


def test_the_digest_is_of_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in (("one", "same text"), ("two", "same text"), ("folder/a", "same texu")):
        (tmp_path / f"{name}.txt").write_text(text)
    one, two, other = (open_text(tmp_path / f"{name}.txt") for name in ("one", "two", "folder/a"))
    assert one.digest == two.digest == f"sha256:{hashlib.sha256(b'same text').hexdigest()}"
    assert other.digest != one.digest
    assert open_text(tmp_path / "one.txt").digest == one.digest  # from the cache
    whole = open_text(tmp_path).digest
    assert (
        whole == f"sha256:{hashlib.sha256(b'same text' + bytes([10]) + b'same text').hexdigest()}"
    )
    assert open_source(None, seq_len=4, vocab_size=256).digest.startswith("sha256:")


def test_text_longer_than_a_chunk_with_a_character_across_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_CHUNK_BYTES", 4)
    path = tmp_path / "data.txt"
    text = "abc€def€".encode()
    path.write_bytes(text)
    assert text_of(open_text(path)) == text


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "no such file or folder"),
        (lambda path: path.write_bytes(b""), "has 0 tokens|is empty"),
        (lambda path: path.write_bytes(b"abcd"), "has 4 tokens, fewer than one sample of"),
        (lambda path: path.write_bytes(b"good then \xff bad"), r"not UTF-8 text \(byte 10\)"),
        (lambda path: path.write_bytes(b"cut short \xe2\x82"), r"not UTF-8 text \(byte 10\)"),
        (Path.mkdir, r"holds no \*\.txt file"),
        (os.mkfifo, "is neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [3, 2**20])
def test_bad_data_names_file_and_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], object],
    message: str,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(dataset, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "data.txt"
    make(path)
    with pytest.raises(ConfigError, match=message) as error:
        open_text(path)
    (fault,) = error.value.faults
    assert fault.file == str(path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs 256 tokens .* vocab_size is 255"):
        open_source(None, seq_len=4, vocab_size=255)


def test_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("some text")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file where a folder should be
    with pytest.raises(ConfigError, match=r"token cache cannot be written.*XDG_CACHE_HOME"):
        open_text(path)
