"""Every kind of data is trained on, and resumed in the middle of an epoch under another plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import RankPool
from distributed.training import SEQ_LEN, make_pipeline, make_plan, make_spec, merged, train
from unit.launch.data_files import write_jsonl, write_megatron, write_tokenizer

from eth_cli.launch.config import DataOptions, DataPath, RunFolder, RunOptions
from eth_cli.launch.data.opening import Data, open_data

pytestmark = pytest.mark.distributed

SPEC = make_spec(tied=True).model_copy(update={"vocab_size": 290})
PLAN_A = make_plan([make_pipeline([3], share=(2, 2)), make_pipeline([], share=(3, 1))])
PLAN_B = make_plan([make_pipeline([1, 4], share=(1, 1)), make_pipeline([], share=(2, 3))])
STEPS, HALF = 8, 4
WORDS = "the cat sat on the mat with the other cats "


def text(folder: Path) -> DataOptions:
    (folder / "data.txt").write_text(WORDS * 5)
    return DataOptions(paths=(DataPath(path=str(folder / "data.txt")),))


def jsonl(folder: Path) -> DataOptions:
    documents = [WORDS[: 5 + 7 * i % 40] for i in range(40)]
    path = write_jsonl(folder / "data.jsonl", documents, field="body")
    return DataOptions(
        paths=(DataPath(path=str(path)),),
        tokenizer=str(write_tokenizer(folder / "tokenizer.json", size=289)),
        text_field="body",
        ignore_borders=True,
    )


def megatron(folder: Path) -> DataOptions:
    documents = [[[(7 * i + j) % 290 for j in range(5 + i)]] for i in range(18)]
    prefix = write_megatron(folder / "data", documents)
    return DataOptions(paths=(DataPath(path=str(prefix)),), ignore_borders=True)


def several(folder: Path) -> DataOptions:
    parts = [*text(folder).paths, *megatron(folder).paths]
    weighed = zip(parts, (0.7, 0.3), strict=True)
    return DataOptions(paths=tuple(p.model_copy(update={"weight": w}) for p, w in weighed))


def samples_of(folder: RunFolder) -> dict[int, list[int]]:
    """Samples by step, of all pipelines, in the order of ranks."""
    samples: dict[int, list[int]] = {}
    for path in sorted(folder.samples.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            samples.setdefault(record["step"], []).extend(record["samples"])
    return samples


@pytest.mark.parametrize("kind", [text, jsonl, megatron, several], ids=lambda kind: kind.__name__)
def test_case_39_data_go_on_under_another_plan(
    pool: RankPool, tmp_path: Path, kind: Callable[[Path], DataOptions]
) -> None:
    data_options = kind(tmp_path)

    def opened() -> Data:
        return open_data(data_options, seq_len=SEQ_LEN, vocab_size=SPEC.vocab_size)

    def run(plan: Any, name: str, resume: bool = False, stop_after: int | None = None) -> Any:
        options = RunOptions(
            steps=STEPS, sample_log=True, epsilon=1e-5, resume=resume, data=data_options
        )
        args = (plan, SPEC, options, str(tmp_path / name), opened().train, stop_after)
        return pool.run(train, *args, num_ranks=len(plan.ranks))

    num_samples = opened().train.num_samples
    assert 7 * HALF % num_samples != 0  # stopped within an epoch
    assert num_samples < 7 * STEPS  # and every run sees more than one
    whole = run(PLAN_A, "whole")
    run(PLAN_A, "parts", stop_after=HALF)
    resumed = run(PLAN_B, "parts", resume=True)

    # Sample i of step k is the same, whatever the plan and whoever started.
    assert samples_of(RunFolder(tmp_path / "parts")) == samples_of(RunFolder(tmp_path / "whole"))
    losses = [m.loss for m in whole[0].metrics]
    assert [m.loss for m in resumed[0].metrics] == pytest.approx(losses[HALF:], rel=1e-5)
    assert [m.tokens for m in resumed[0].metrics] == [m.tokens for m in whole[0].metrics[HALF:]]
    weights = merged(whole, "weights")
    for name, weight in merged(resumed, "weights").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-6)
    shutil.rmtree(tmp_path / "parts")
