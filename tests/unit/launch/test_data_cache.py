"""The token cache: filled once, whole or absent, never stale."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from unit.launch.data_files import ids_of, open_source, write_jsonl, write_tokenizer

from eth_cli.errors import ConfigError
from eth_cli.launch.data import cache
from eth_cli.launch.data.cache import Cache, Writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text("first text")
    return path


def entries(root: Path | None = None) -> list[Path]:
    root = root or Path(os.environ["XDG_CACHE_HOME"]) / "eth" / "tokens"
    return [folder for folder in root.iterdir() if folder.is_dir()]


def test_it_is_filled_once_and_follows_the_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytes(ids_of(open_source(path))) == b"first text"
    (entry,) = entries()
    assert {p.name for p in entry.iterdir()} == {"tokens.bin", "ends.bin", "entry.json"}
    monkeypatch.setattr(cache, "_make", lambda *_a, **_k: pytest.fail("the cache is not used"))
    assert bytes(ids_of(open_source(path))) == b"first text"
    monkeypatch.undo()
    path.write_text("other, longer")
    assert bytes(ids_of(open_source(path))) == b"other, longer"


def test_it_lies_where_it_is_told(path: Path, tmp_path: Path) -> None:
    root = tmp_path / "here" / "and there"
    open_source(path, cache=str(root))
    assert len(entries(root)) == 1
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "eth").exists()


def test_what_decides_about_tokens_makes_entries_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    data = write_jsonl(tmp_path / "data.jsonl", ["the cat sat", "on the mat"])
    tokenizer = tmp_path / "tokenizer.json"
    for special in ("<|endoftext|>", "</s>"):
        write_tokenizer(tokenizer, special=[special])
        open_source(data, tokenizer=str(tokenizer), vocab_size=300)
    open_source(data)
    data.write_text(data.read_text().replace("text", "body"))
    open_source(data, text_field="body")
    assert len(entries()) == 4


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin", "entry.json"])
def test_an_entry_that_lost_a_file_is_made_again(path: Path, name: str) -> None:
    open_source(path)
    (entry,) = entries()
    (entry / name).unlink()
    assert bytes(ids_of(open_source(path))) == b"first text"
    assert (entry / name).exists()


def test_what_failed_or_was_killed_leaves_no_entry(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Writer, "finish", fail)
    with pytest.raises(KeyboardInterrupt):
        open_source(path)
    assert entries() == []
    monkeypatch.undo()
    # Killed: its folder stays, under a name that nobody opens.
    monkeypatch.setattr(shutil, "rmtree", lambda *_a, **_k: None)
    monkeypatch.setattr(Writer, "finish", fail)
    with pytest.raises(KeyboardInterrupt):
        open_source(path)
    monkeypatch.undo()
    assert bytes(ids_of(open_source(path))) == b"first text"


def _open(root: str, path: str, results: multiprocessing.Queue[int]) -> None:
    made = []
    make = cache._make

    def counting(*args: object, **kwargs: object) -> None:
        made.append(1)
        make(*args, **kwargs)  # type: ignore[arg-type] # passed on

    setattr(cache, "_make", counting)  # noqa: B010 # in this process only
    open_source(path, cache=root)
    results.put(len(made))


def test_processes_that_ask_at_once_make_it_once(path: Path, tmp_path: Path) -> None:
    path.write_text("some text " * 200_000)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = (str(tmp_path / "cache"), str(path), results)
    processes = [context.Process(target=_open, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    try:
        assert sum(results.get(timeout=60) for _ in processes) == 1
    finally:
        for process in processes:
            process.join(timeout=30)
    assert len(entries(tmp_path / "cache")) == 1


def test_a_cache_that_cannot_be_written_says_what_to_do(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token cache cannot be written: .*--data-cache"):
        open_source(path, cache=str(path))  # a file where a folder should be


def test_many_documents_and_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_FLUSH_DOCUMENTS", 3)
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, 900, size=rng.integers(0, 6)) for _ in range(50)]
    file = tmp_path / "file"
    file.touch()

    def fill(writer: Writer) -> None:
        for number, tokens in enumerate(documents):
            for half in np.array_split(tokens, 2):
                writer.add(half, lambda i, n=number: f"document {n}")  # type: ignore[misc] # bound
            writer.end_document()

    entry = Cache(tmp_path / "cache").entry([file], "how", fill, dtype=np.uint16)
    whole = np.concatenate(documents)
    assert entry.tokens[0 : len(whole)].tolist() == whole.tolist()
    ends = np.cumsum([len(d) for d in documents if len(d)])
    assert len(entry.ends) == entry.facts.num_documents == len(ends)
    assert entry.ends[0 : len(ends)].tolist() == ends.tolist()
    assert entry.facts.largest is not None
    assert entry.facts.largest.id == whole.max()
    number = next(i for i, d in enumerate(documents) if whole.max() in d)
    assert entry.facts.largest.at == f"document {number}"
