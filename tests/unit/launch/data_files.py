"""Files of training data as other programs write them, and what comes out when they are opened.

The writers use nothing of the project: formats are written down here a second time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eth_cli.launch.config import DataOptions, DataPath
from eth_cli.launch.data.opening import open_data
from eth_cli.launch.dataset import IGNORED_LABEL, TokenSource

MEGATRON_CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}


def write_megatron(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    *,
    dtype: str = "<u2",
) -> Path:
    """``prefix.bin`` and ``prefix.idx`` of documents, each a list of sequences of token ids."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    size = np.dtype(dtype).itemsize
    with open(f"{prefix}.bin", "wb") as tokens:
        for sequence in sequences:
            tokens.write(np.array(sequence, dtype=dtype).tobytes())
    borders = [0]
    for document in documents:
        borders.append(borders[-1] + len(document))
    with open(f"{prefix}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", MEGATRON_CODES[dtype]))
        index.write(struct.pack("<QQ", len(sequences), len(borders)))
        index.write(struct.pack(f"<{len(lengths)}i", *lengths))
        offsets = [sum(lengths[:i]) * size for i in range(len(lengths))]
        index.write(struct.pack(f"<{len(offsets)}q", *offsets))
        index.write(struct.pack(f"<{len(borders)}q", *borders))
    return prefix


def write_jsonl(path: Path, texts: Sequence[str], *, field: str = "text") -> Path:
    """A JSONL file, a document a line."""
    path.write_text("".join(json.dumps({field: text, "id": 3}) + "\n" for text in texts))
    return path


def write_tokenizer(
    path: Path, *, size: int = 270, special: Sequence[str] = ("<|endoftext|>",)
) -> Path:
    """A byte-level BPE tokenizer.json of so many tokens, special ones included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cats " * 9], trainer)
    tokenizer.save(str(path))
    return path


def open_source(
    *paths: Path | str, seq_len: int = 4, vocab_size: int = 256, **options: Any
) -> TokenSource:
    """What is trained on of some paths, each of which may be a path and its weight."""
    entries = tuple(DataPath(path=str(path)) for path in paths)
    return open_data(
        DataOptions(paths=entries, **options), seq_len=seq_len, vocab_size=vocab_size
    ).train


def ids_of(source: TokenSource) -> list[int]:
    """The tokens that all windows hold together; labels are checked on the way."""
    ids: list[int] = []
    for index in range(source.num_samples):
        tokens, labels = source.sample(index)
        num_valid = source.num_valid(index)
        assert np.array_equal(tokens[1:num_valid], labels[: num_valid - 1])
        assert (labels[num_valid:] == IGNORED_LABEL).all()
        assert num_valid == (labels != IGNORED_LABEL).sum()
        ids += [*tokens[:num_valid].tolist(), int(labels[num_valid - 1])]
    return ids
