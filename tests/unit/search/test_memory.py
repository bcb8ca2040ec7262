"""Peak memory of a stage, term by term."""

from __future__ import annotations

import pytest
from unit.search.problems import profile_of

from eth_cli.profile.table import Profile
from eth_cli.search.blocks import BlockTables
from eth_cli.search.memory import StageMemory, max_in_flight, stage_memory

PROFILE = profile_of(
    blocks={"x": [(1.0, 2.0), (1.5, 2.5), (1.7, 2.9)]},
    parameters=[1_100, 700, 1_300],
    activations=[20_000, 31_000, 5_000],
    micro_batch_sizes=(1, 3),
    boundary_bytes=640,
    tied=(0, 2),
    tied_parameters=300,
)


def test_every_term_by_hand() -> None:
    table = BlockTables(PROFILE).table("x", 1, 3)
    memory = stage_memory(PROFILE, table, start=1, stop=3, num_in_flight=2)
    assert memory.parameters_bytes == 16 * 2_000
    assert memory.activations_bytes == 3 * 36_000 * 2
    assert memory.boundary_bytes == 2 * 1 * 640 * 3
    assert memory.process_bytes == 77
    assert memory.recompute_bytes == 0
    assert memory.total_bytes == 32_000 + 216_000 + 3_840 + 77


def test_a_weight_tied_inside_a_stage_is_held_once() -> None:
    table = BlockTables(PROFILE).table("x", 1, 1)
    whole = stage_memory(PROFILE, table, start=0, stop=3, num_in_flight=1)
    assert whole.parameters_bytes == 16 * (3_100 - 300)
    assert whole.boundary_bytes == 0
    middle = stage_memory(PROFILE, table, start=1, stop=2, num_in_flight=1)
    assert middle.boundary_bytes == 2 * 2 * 640


@pytest.mark.parametrize("capacity", [40_000, 96_000, 97_000, 150_000, 1_000_000])
@pytest.mark.parametrize("recompute", [False, True])
def test_max_in_flight_is_the_largest_number_that_fits(capacity: int, recompute: bool) -> None:
    table = BlockTables(PROFILE).table("x", 1, 1)

    def total(number: int) -> int:
        return stage_memory(
            PROFILE, table, start=0, stop=2, num_in_flight=number, recompute=recompute
        ).total_bytes

    most = max_in_flight(
        PROFILE, table, start=0, stop=2, capacity_bytes=capacity, recompute=recompute, limit=9
    )
    assert 0 <= most <= 9
    if most:
        assert total(most) <= capacity
    if most < 9:
        assert total(most + 1) > capacity


def test_of_the_workspaces_of_a_stage_the_largest_counts_once() -> None:
    workspaces = {kind: 1_000 + 7 * b for b, kind in enumerate(PROFILE.model.kinds)}
    compute = tuple(
        e.model_copy(update={"workspace_bytes": workspaces[e.block]}) for e in PROFILE.compute
    )
    profile = Profile(**(dict(PROFILE) | {"compute": compute}))

    def memory(of: Profile, stop: int) -> StageMemory:
        table = BlockTables(of).table("x", 1, 3)
        return stage_memory(of, table, start=0, stop=stop, num_in_flight=2)

    for stop in (1, 2, 3):
        assert memory(profile, stop).workspace_bytes == 1_000 + 7 * (stop - 1)
        assert memory(profile, stop).total_bytes - memory(PROFILE, stop).total_bytes == (
            1_000 + 7 * (stop - 1)
        )
