"""Which of like devices plays which part of a plan, so that the least has to move.

Devices of a type in a node may change places, and so may nodes that are alike in devices and links:
the step takes as long. Both are assignment problems, one inside the other, solved exactly, the
outer one where the nodes with something to gain are few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from eth_cli.cluster import Cluster, Device
from eth_cli.search.moves import Holdings, Parts
from eth_cli.search.place import Free
from eth_cli.search.placed import PlacedPipeline

_MOST_NODES = 12
"""Like nodes up to which changing their places is tried."""


class _Part(NamedTuple):
    """One device's part in a plan."""

    pipeline: int
    stage: int
    place: int
    """In the stage's group."""
    device: Device
    needs: Parts


def settle(
    pipelines: Sequence[PlacedPipeline],
    cluster: Cluster,
    holdings: Holdings,
    *,
    excluded: Collection[str] = (),
    fixed: Collection[int] = (),
) -> tuple[PlacedPipeline, ...]:
    """The same pipelines on like devices with the fewest bytes to move.

    Args:
        excluded: ids of devices that must not be used.
        fixed: indices of pipelines whose devices stay.
    """
    parts = [
        _Part(i, s, place, device, holdings.needs(stage, place))
        for i, pipeline in enumerate(pipelines)
        for s, stage in enumerate(pipeline.stages)
        for place, device in enumerate(stage.devices)
        if i not in fixed
    ]
    taken = set(excluded) | {
        d.id for i in fixed for stage in pipelines[i].stages for d in stage.devices
    }
    free = Free(cluster, taken)
    contents: list[list[_Part]] = [[] for _ in free.nodes]
    index = {name: n for n, name in enumerate(free.nodes)}
    for part in parts:
        contents[index[part.device.node]].append(part)
    chosen: dict[tuple[int, int, int], Device] = {}
    for source, target in _node_moves(free, contents, holdings):
        for part, device in _inside(contents[source], free.devices[target], holdings)[1]:
            chosen[part[:3]] = device
    return tuple(
        pipeline._replace(
            stages=tuple(
                stage._replace(
                    devices=tuple(
                        chosen.get((i, s, place), device)
                        for place, device in enumerate(stage.devices)
                    )
                )
                for s, stage in enumerate(pipeline.stages)
            )
        )
        for i, pipeline in enumerate(pipelines)
    )


def _node_moves(
    free: Free, contents: Sequence[Sequence[_Part]], holdings: Holdings
) -> Iterator[tuple[int, int]]:
    """(node whose parts they are, node that plays them) for every node."""
    costs = [_inside(contents[n], free.devices[n], holdings)[0] for n in range(len(free.nodes))]
    for kind in sorted(set(free.node_kind)):
        alike = [n for n, k in enumerate(free.node_kind) if k == kind]
        # A node that has nothing to get has nothing to gain.
        movable = [n for n in alike if costs[n]]
        if not 1 < len(movable) <= _MOST_NODES:
            movable = []
        yield from ((n, n) for n in alike if n not in movable)
        if movable:
            table = [
                [_inside(contents[a], free.devices[b], holdings)[0] for b in movable]
                for a in movable
            ]
            for a, b in enumerate(assignment(table)):
                yield movable[a], movable[b]


def _inside(
    parts: Sequence[_Part], devices: dict[str, list[Device]], holdings: Holdings
) -> tuple[int, list[tuple[_Part, Device]]]:
    """The least bytes that a node's devices have to get for some parts, and who plays which."""
    total = 0
    found: list[tuple[_Part, Device]] = []
    for device_type in sorted({part.device.type for part in parts}):
        mine = [part for part in parts if part.device.type == device_type]
        candidates = devices.get(device_type, [])
        table = [[holdings.lacking_bytes(p.needs, d.id) for d in candidates] for p in mine]
        for row, column in enumerate(assignment(table)):
            total += table[row][column]
            found.append((mine[row], candidates[column]))
    return total, found


def assignment(costs: Sequence[Sequence[float]]) -> list[int]:
    """By row the column that it gets, each at most once, at the least total cost.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant, 1987), exact. There
    are at least as many columns as rows.
    """
    num_rows = len(costs)
    num_columns = len(costs[0]) if costs else 0
    # Row and column 0 stand for "none"; potentials keep all reduced costs at 0 or above.
    row_price = [0.0] * (num_rows + 1)
    column_price = [0.0] * (num_columns + 1)
    row_of = [0] * (num_columns + 1)
    for row in range(1, num_rows + 1):
        row_of[0] = row
        column = 0
        least = [float("inf")] * (num_columns + 1)
        before = [0] * (num_columns + 1)
        done = [False] * (num_columns + 1)
        while row_of[column]:
            done[column] = True
            current, nearest, step = row_of[column], 0, float("inf")
            for other in range(1, num_columns + 1):
                if done[other]:
                    continue
                reduced = costs[current - 1][other - 1] - row_price[current] - column_price[other]
                if reduced < least[other]:
                    least[other], before[other] = reduced, column
                if least[other] < step:
                    step, nearest = least[other], other
            for other in range(num_columns + 1):
                if done[other]:
                    row_price[row_of[other]] += step
                    column_price[other] -= step
                else:
                    least[other] -= step
            column = nearest
        while column:
            row_of[column] = row_of[before[column]]
            column = before[column]
    chosen = [0] * num_rows
    for column in range(1, num_columns + 1):
        if row_of[column]:
            chosen[row_of[column] - 1] = column - 1
    return chosen
