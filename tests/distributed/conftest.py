"""One pool of processes for all tests that train by plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import RankPool
from distributed.training import RankResult, train

from eth_cli.launch.config import RunOptions
from eth_cli.model import ModelSpec
from eth_cli.plan import Plan

RunPlan = Callable[..., list[RankResult]]


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Processes that play ranks."""
    torch.set_num_threads(1)
    pool = RankPool(tmp_path_factory.mktemp("rendezvous"))
    yield pool
    pool.stop()


@pytest.fixture
def run_plan(pool: RankPool, tmp_path: Path) -> RunPlan:
    """Train by a plan on as many processes as it has ranks."""

    def run(
        plan: Plan,
        spec: ModelSpec,
        options: RunOptions,
        source: Any,
        *,
        root: Path = tmp_path,
        stop_after: int | None = None,
        timeout_s: float = 60.0,
    ) -> list[RankResult]:
        return pool.run(
            train,
            plan,
            spec,
            options,
            str(root),
            source,
            stop_after,
            num_ranks=len(plan.ranks),
            timeout_s=timeout_s,
        )

    return run
