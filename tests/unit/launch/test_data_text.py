"""Text and JSONL, by bytes and by a tokenizer, and every way in which they can be bad."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.launch.data_files import ids_of, open_source, write_jsonl, write_tokenizer

from eth_cli.errors import ConfigError
from eth_cli.launch.data import texts, vocabulary
from eth_cli.launch.data.vocabulary import END, FileVocabulary
from eth_cli.launch.dataset import IGNORED_LABEL

TEXTS = ["the cat sat", "", "on the mat.\nthe end", "naïve €uro\n\n", "with the others " * 40]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    return write_tokenizer(tmp_path / "tokenizer.json")


def bytes_of(*paths: Path, **options: Any) -> bytes:
    return bytes(ids_of(open_source(*paths, **options)))


def test_folder_is_read_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.txt", "planet"), ("a.txt", "hello"), ("c.md", "not this")):
        (tmp_path / name).write_text(text)
    assert bytes_of(tmp_path) == b"hello\nplanet"


def test_built_in_text_is_long_and_the_same_every_time() -> None:
    first, second = (open_source(seq_len=128, vocab_size=300) for _ in range(2))
    assert first.num_samples == second.num_samples > 1000
    assert (first.sample(7)[0] == second.sample(7)[0]).all()
    assert first.digest == second.digest


def test_the_digest_is_of_the_text_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in (("one", "same text"), ("two", "same text"), ("folder/a", "same texu")):
        (tmp_path / f"{name}.txt").write_text(text)
    one, two, other = (open_source(tmp_path / f"{n}.txt") for n in ("one", "two", "folder/a"))
    assert one.digest == two.digest == f"sha256:{hashlib.sha256(b'same text').hexdigest()}"
    assert other.digest != one.digest
    assert open_source(tmp_path / "one.txt").digest == one.digest  # from the cache
    whole = hashlib.sha256(b"same text\nsame text").hexdigest()
    assert open_source(tmp_path).digest == f"sha256:{whole}"


def test_documents_of_jsonl_are_joined_by_a_new_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    assert bytes_of(path) == "\n".join(text for text in TEXTS if text).encode()
    other = write_jsonl(tmp_path / "other.jsonl", TEXTS, field="content")
    assert bytes_of(other, text_field="content") == bytes_of(path)


def test_a_folder_of_jsonl_is_one_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["three"])
    write_jsonl(tmp_path / "a.ndjson", ["one", "two"])
    assert bytes_of(tmp_path) == b"one\ntwo\nthree"


def test_borders_of_documents_can_be_ignored(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", ["abc", "de", "fghijk"])
    plain, masked = (open_source(path, seq_len=12, ignore_borders=x) for x in (False, True))
    # abc\nde\nfghijk: what joins two documents belongs to the first.
    assert bytes(plain.sample(0)[0].tolist()) == b"abc\nde\nfghij"
    labels = masked.sample(0)[1]
    assert [i for i, label in enumerate(labels) if label == IGNORED_LABEL] == [3, 6]
    assert (masked.num_valid(0), plain.num_valid(0)) == (10, 12)
    assert plain.digest != masked.digest


def test_a_tokenizer_encodes_documents_and_ends_them(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer))
    end = library.token_to_id("<|endoftext|>")
    expected = [i for text in TEXTS if text for i in [*library.encode(text).ids, end]]
    path = write_jsonl(tmp_path / "data.jsonl", TEXTS)
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "vocab_size": 270}
    found = ids_of(open_source(path, seq_len=4, **options))
    assert found == expected[: len(found)]
    assert len(expected) - len(found) <= 1
    assert max(found) >= 256  # pairs of bytes were merged
    (tmp_path / "folder").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "folder" / f"{i}.txt").write_text(text)
    assert ids_of(open_source(tmp_path / "folder", **options)) == found
    masked = open_source(path, ignore_borders=True, seq_len=4, **options)
    num_ignored = open_source(path, **options).num_samples * 4 - sum(
        masked.num_valid(i) for i in range(masked.num_samples)
    )
    assert num_ignored >= 2
    built_in = open_source(seq_len=4, **options)
    assert built_in.num_samples > 1000


def test_the_model_folder_of_a_tokenizer_says_what_ends_a_document(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    write_tokenizer(tmp_path / "tokenizer.json", special=["</s>", "<stop>"])
    assert FileVocabulary(tmp_path).end == [0]
    for eos in ("<stop>", {"content": "<stop>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert FileVocabulary(tmp_path).end == [1]
    for damaged in ('{"eos_token": ["x"]}', '{"eos_token": "none of it"}', "{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        assert FileVocabulary(tmp_path).end == [0]
    write_tokenizer(tmp_path / "tokenizer.json", special=["<none>"])
    assert FileVocabulary(tmp_path).end is None
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["cat", "cat"])
    options: dict[str, Any] = {"tokenizer": str(tmp_path), "vocab_size": 300, "seq_len": 1}
    alone = ids_of(open_source(write_jsonl(tmp_path / "b.jsonl", ["cat" * 2]), **options))
    assert ids_of(open_source(path, **options))[: len(alone)] == alone


@given(parts=st.lists(st.text("ab \n€", max_size=30), max_size=8), size=st.integers(1, 12))
def test_long_text_is_cut_the_same_way_however_it_comes(parts: list[str], size: int) -> None:
    text = "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_PIECE_CHARACTERS", size)
        pieces = list(vocabulary._cut([*parts, END, *parts]))
        assert pieces == list(vocabulary._cut([text, END, text]))
    end = pieces.index(END)
    assert "".join(str(p) for p in pieces[:end]) == text == "".join(map(str, pieces[end + 1 :]))
    for piece, following in itertools.pairwise(pieces[:end]):
        assert piece is not None
        assert 0 < len(piece) <= size
        if "\n" in piece:
            assert piece.endswith("\n")
        elif " " in piece[1:]:
            assert following is not None
            assert following.startswith(" ")


def test_text_longer_than_a_piece_is_encoded_line_by_line(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer

    monkeypatch.setattr(vocabulary, "_PIECE_CHARACTERS", 40)
    monkeypatch.setattr(texts, "_CHUNK_BYTES", 7)
    lines = [f"the cat {i} sat on the mat €\n" for i in range(9)]
    path = tmp_path / "data.txt"
    path.write_text("".join(lines))
    library = Tokenizer.from_file(str(tokenizer))
    expected = [i for line in lines for i in library.encode(line).ids]
    found = ids_of(open_source(path, tokenizer=str(tokenizer), vocab_size=270, seq_len=1))
    assert found == [*expected, library.token_to_id("<|endoftext|>")][: len(found)]


def test_text_longer_than_a_chunk_with_a_character_across_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_CHUNK_BYTES", 4)
    path = tmp_path / "data.txt"
    text = "abc€def€".encode()
    path.write_bytes(text)
    assert bytes_of(path) == text


# --- Bad data -------------------------------------------------------------------------------------


def refused(path: Path, **options: Any) -> tuple[str, str]:
    """Field and message of the one fault of some data, which names its file."""
    with pytest.raises(ConfigError) as error:
        open_source(path, **options)
    (fault,) = error.value.faults
    assert fault.file == str(path)
    assert len(str(error.value).splitlines()) == 1
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.tmp"))
    return fault.field, fault.message


def nothing(path: Path) -> None:
    pass


def mixed_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.txt").write_text("text")
    (path / "a.jsonl").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "no such file or folder"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"abcd"), "has 4 tokens, fewer than one sample of"),
        (lambda path: path.write_bytes(b"good then \xff bad"), "not UTF-8 text (byte 10)"),
        (lambda path: path.write_bytes(b"cut short \xe2\x82"), "not UTF-8 text (byte 10)"),
        (Path.mkdir, "holds no *.txt and no *.jsonl file"),
        (mixed_folder, "holds both *.jsonl and *.txt files"),
        (os.mkfifo, "is neither a file nor a folder"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [3, 2**20])
def test_bad_text_names_file_and_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], object],
    message: str,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(texts, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "data.txt"
    make(path)
    assert message in refused(path)[1]


GOOD = b'{"text": "good enough"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\n", "is empty; every line of a JSONL file is a JSON object"),
        (b"  \r\n", "is empty"),
        (b'{"text": "a \xff"}\n', "is not UTF-8 text (byte 12 of the line)"),
        (b'{"text": "a"\n', "is not valid JSON: Expecting ',' delimiter (column 13)"),
        (b'{"text": "cut sh\n', "is not valid JSON: Unterminated string"),
        (b'{"txt": "a", "id": 1}\n', "has no field 'text' (did you mean txt?), it has id, txt"),
        (b"{}\n", "has no field 'text', it has none; see --text-field"),
        (b'{"text": 5}\n', "the field 'text' is a number, not a text"),
        (b'{"text": null}\n', "the field 'text' is null, not a text"),
        (b'{"text": ["a"]}\n', "the field 'text' is a list, not a text"),
        (b'["a"]\n', "is not a JSON object but a list"),
        (b'{"text": "\\ud800"}\n', "holds half of a surrogate pair"),
        (b"[" * 100000 + b"\n", "is not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD * 2 + line + GOOD)
    field, text = refused(path)
    assert field == "line 3"
    assert message in text


def test_a_file_that_is_one_endless_line_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_LONGEST_LINE_BYTES", 64)
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b"x" * 1000)
    assert refused(path) == (
        "line 2",
        "is longer than 64 bytes; is this JSONL, a document a line?",
    )


def test_a_jsonl_file_in_a_folder_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "b.jsonl").write_bytes(b"5\n")
    with pytest.raises(ConfigError, match=r"b\.jsonl: line 1: is not a JSON object but a number"):
        open_source(tmp_path)


def test_vocabulary_without_room_for_bytes_is_refused() -> None:
    for tokenizer in (None, "bytes"):
        with pytest.raises(ConfigError, match=r"needs 256 tokens .* vocab_size is 255"):
            open_source(vocab_size=255, tokenizer=tokenizer)


def test_tokenizers_that_cannot_be_used(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(name: Path) -> str:
        with pytest.raises(ConfigError) as error:
            open_source(vocab_size=269, tokenizer=str(name))
        assert str(name) in str(error.value)
        assert len(str(error.value).splitlines()) == 1
        return str(error.value)

    assert "has 270 tokens, but the model's vocab_size is 269" in message(tokenizer)
    assert "no such tokenizer file" in message(tmp_path / "none.json")
    (tmp_path / "folder").mkdir()
    assert "no such tokenizer file" in message(tmp_path / "folder")
    for content in ("", "{}", '{"model": 3}', "text\nmore"):
        tokenizer.write_text(content)
        assert "is not a tokenizer.json that tokenizers can read" in message(tokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    assert "needs the tokenizers library; pip install 'eth-cli[hf]'" in message(tokenizer)
