"""What has to move between two plans, by hand; and which of like devices makes that least."""

from __future__ import annotations

import itertools
import random

import pytest
from builders import make_cluster, make_profile

from eth_cli.cluster import Cluster
from eth_cli.search.cost import CostModel
from eth_cli.search.moves import Holdings, Moves
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.settle import assignment, settle

PROFILE = make_profile(num_layers=2)
EMBEDDING, LAYER, HEAD = 2_000_003, 3_000_017, 2_500_009
RATE = 16
"""Bytes per parameter."""
CLUSTER = make_cluster(nodes={"a": {"fast": 4}, "b": {"fast": 4}, "c": {"slow": 2}})


def stage(start: int, stop: int, *devices: str, cluster: Cluster = CLUSTER) -> PlacedStage:
    """Blocks on a group of devices."""
    return PlacedStage(start, stop, tuple(cluster.devices[d] for d in devices))


def pipeline(*stages: PlacedStage) -> PlacedPipeline:
    """Four micro-batches of one sample."""
    return PlacedPipeline(1, 4, stages)


OLD = (
    pipeline(stage(0, 2, "a:0"), stage(2, 4, "a:1")),
    pipeline(stage(0, 3, "b:0"), stage(3, 4, "b:1")),
)


def test_nothing_moves_where_nothing_changes() -> None:
    moves = Holdings(PROFILE, OLD).moves(OLD)
    assert moves == Moves(num_kept=8, num_sent=0, num_read=0, sent_bytes=0, read_bytes=0)


def test_a_lost_node_is_sent_by_the_others_or_read() -> None:
    new = (pipeline(stage(0, 3, "a:0"), stage(3, 4, "a:1")),)
    kept = Holdings(PROFILE, OLD, gone={"b:0", "b:1"}).moves(new)
    assert kept == Moves(num_kept=3, num_sent=1, num_read=0, sent_bytes=LAYER * RATE, read_bytes=0)
    # Without b, only a:1 held block 2; without a:1 it is nowhere any more.
    lost = Holdings(PROFILE, OLD, gone={"a:1", "b:0", "b:1"})
    moves = lost.moves((pipeline(stage(0, 3, "a:0"), stage(3, 4, "c:0")),))
    assert moves == Moves(
        num_kept=2, num_sent=0, num_read=2, sent_bytes=0, read_bytes=(LAYER + HEAD) * RATE
    )
    assert moves.moved_bytes == moves.read_bytes
    assert lost.moved_bytes((pipeline(stage(0, 4, "a:0")),)) == (LAYER + HEAD) * RATE


def test_a_tensor_parallel_part_is_what_is_missing_of_it() -> None:
    whole = Holdings(PROFILE, (pipeline(stage(0, 4, "a:0")),), widths=(1, 2))
    halves = (pipeline(stage(0, 4, "a:0", "a:1")),)
    everything = EMBEDDING + 2 * LAYER + HEAD
    moves = whole.moves(halves)
    assert (moves.num_kept, moves.num_sent) == (4, 4)
    assert moves.sent_bytes == pytest.approx(everything / 2 * RATE, abs=RATE)
    back = Holdings(PROFILE, halves, gone={"a:1"}, widths=(1,))
    moves = back.moves((pipeline(stage(0, 4, "a:0")),))
    assert moves.num_read == 4, "half of each block was on the device that is gone"
    assert moves.read_bytes == pytest.approx(everything / 2 * RATE, abs=RATE)


def test_a_tied_weight_moves_once() -> None:
    tied = PROFILE.model_copy(
        update={
            "model": PROFILE.model.model_copy(
                update={"tied_blocks": ((0, 3),), "tied_parameters": 1_900_000}
            )
        }
    )
    old = (pipeline(stage(0, 3, "a:0"), stage(3, 4, "a:1")),)
    moves = Holdings(tied, old).moves((pipeline(stage(0, 4, "a:0")),))
    assert moves.sent_bytes == (HEAD - 1_900_000) * RATE, "a:0 has the tied weight already"
    moves = Holdings(tied, old).moves((pipeline(stage(0, 4, "b:0")),))
    total = EMBEDDING + 2 * LAYER + HEAD - 1_900_000
    assert moves.sent_bytes == total * RATE


@pytest.mark.parametrize("seed", range(40))
def test_assignment_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(0, 5)
    columns = rng.randint(rows, 6)
    costs = [[rng.randint(0, 20) for _ in range(columns)] for _ in range(rows)]
    chosen = assignment(costs)
    assert len(set(chosen)) == rows
    least = min(
        sum(costs[r][c] for r, c in enumerate(way))
        for way in itertools.permutations(range(columns), rows)
    )
    assert sum(costs[r][c] for r, c in enumerate(chosen)) == least


def test_devices_and_like_nodes_change_places_for_the_least_to_move() -> None:
    holdings = Holdings(PROFILE, OLD)
    crossed = (  # the same plan on the other node, and on devices in another order
        pipeline(stage(0, 2, "b:3"), stage(2, 4, "b:2")),
        pipeline(stage(0, 3, "a:2"), stage(3, 4, "a:1")),
    )
    assert holdings.moved_bytes(crossed)
    settled = settle(crossed, CLUSTER, holdings)
    assert holdings.moved_bytes(settled) == 0
    model = CostModel(PROFILE, CLUSTER)
    assert model.evaluate(settled).step_time_s == model.evaluate(crossed).step_time_s


def test_settling_keeps_off_what_is_taken() -> None:
    holdings = Holdings(PROFILE, OLD, gone={"a:0"})
    new = (
        pipeline(stage(0, 2, "b:2"), stage(2, 4, "b:3")),
        pipeline(stage(0, 3, "a:2"), stage(3, 4, "a:3")),
    )
    settled = settle(new, CLUSTER, holdings, excluded={"a:0"}, fixed=[1])
    assert settled[1] == new[1]
    used = [d.id for p in settled for s in p.stages for d in s.devices]
    assert len(set(used)) == 4
    assert "a:0" not in used
    assert holdings.moved_bytes(settled) <= holdings.moved_bytes(new)
