"""From templates to devices: which device plays which stage.

`place` is quick and good: whole pipelines inside a node where they fit, else consecutive stages
together, or all first stages together, all second ones, and so on. `placements` lists every way
that the model can tell apart, for small clusters. Both are deterministic, and take nodes in the
order of `order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from eth_cli.cluster import Cluster, Device, Link
from eth_cli.search.order import canonical_nodes
from eth_cli.search.placed import PlacedPipeline, PlacedStage
from eth_cli.search.pruning import ALL_RULES, Pruning
from eth_cli.search.templates import Kind, Template


class Share(NamedTuple):
    """A template with its number of micro-batches."""

    template: Template
    micro_batches: int


class Free:
    """Devices that are not taken yet, by node and type, in order of their index."""

    def __init__(self, cluster: Cluster, excluded: Collection[str] = ()) -> None:
        self.nodes = canonical_nodes(cluster)
        self.devices: list[dict[str, list[Device]]] = [{} for _ in self.nodes]
        index = {name: i for i, name in enumerate(self.nodes)}
        for device in cluster.devices.values():
            if device.id not in excluded:
                by_type = self.devices[index[device.node]]
                by_type.setdefault(device.type, []).append(device)
        self.node_kind = _node_kinds(cluster, self.nodes, self.devices)
        """Nodes of the same number are alike in devices and links."""
        self._states: list[tuple[tuple[str, int], ...] | None] = [None] * len(self.nodes)

    def count(self, node: int, device_type: str) -> int:
        """Free devices of a type in a node."""
        return len(self.devices[node].get(device_type, ()))

    def state(self, node: int) -> tuple[tuple[str, int], ...]:
        """Free devices of a node by type."""
        state = self._states[node]
        if state is None:
            state = tuple([(t, len(d)) for t, d in self.devices[node].items()])
            self._states[node] = state
        return state

    def leaves_room(
        self, node: int, device_type: str, width: int, to_come: Mapping[tuple[str, int], int]
    ) -> bool:
        """Whether the groups still to come have room after one is taken from a node.

        Exact for widths of which each divides the next: a node of n devices has n // w groups of
        width w, and a wider group takes the place of several.
        """
        wide = {w: n for (t, w), n in to_come.items() if t == device_type and n and w > 1}
        for w in wide:
            # What is left over beyond groups of that width may be taken without a look around.
            if w <= width or self.count(node, device_type) % w >= width:
                continue
            needed = sum(n * (v // w) for v, n in wide.items())
            room = sum(
                (self.count(i, device_type) - width * (i == node)) // w
                for i in range(len(self.nodes))
            )
            if room < needed:
                return False
        return True

    def give_back(self, node: int, device_type: str, group: Sequence[Device]) -> None:
        """Undo the last `take` from a node."""
        self.devices[node][device_type][:0] = group
        self._states[node] = None

    def take(self, node: int, device_type: str, width: int) -> tuple[Device, ...]:
        """The first free devices of a type in a node."""
        devices = self.devices[node][device_type]
        taken = tuple(devices[:width])
        del devices[:width]
        self._states[node] = None
        return taken


def _node_kinds(
    cluster: Cluster, names: Sequence[str], devices: Sequence[Mapping[str, Sequence[Device]]]
) -> list[int]:
    """By node the first node that it can change places with: same devices, same links to all."""
    links: dict[str, dict[str, Link]] = {name: {} for name in names}
    for override in cluster.network.overrides:
        first, last = override.between[0], override.between[-1]
        links[first][last] = links[last][first] = override.link

    def seen_from(node: str, other: str) -> dict[str, Link]:
        return {"" if n == node else n: link for n, link in links[node].items() if n != other}

    candidates: dict[object, list[int]] = {}
    kinds = []
    for i, name in enumerate(names):
        mine = tuple(sorted((t, len(d)) for t, d in devices[i].items()))
        like = candidates.setdefault(mine, [])
        twin = next(
            (j for j in like if seen_from(name, names[j]) == seen_from(names[j], name)), None
        )
        if twin is None:
            like.append(i)
        kinds.append(i if twin is None else twin)
    return kinds


def place(
    shares: Sequence[Share],
    kinds: Sequence[Kind],
    cluster: Cluster,
    *,
    bundles: Sequence[Sequence[int]] | None = None,
    excluded: Collection[str] = (),
) -> tuple[PlacedPipeline, ...] | None:
    """Devices for every stage; None: a tensor-parallel group found no node with room for it.

    Args:
        bundles: shares by index that are placed together, all first stages, then all second ones,
            which keeps the owners of a segment near each other; None: each alone, which keeps
            neighbouring stages near.
    """
    free = Free(cluster, excluded)
    if bundles is None:
        bundles = [(i,) for i in range(len(shares))]
    # Long pipelines first: they are the hardest to keep together.
    ordered = sorted(bundles, key=lambda b: -max(len(shares[i].template.stages) for i in b))
    chosen: dict[tuple[int, int], tuple[Device, ...]] = {}
    to_come = Counter(
        (kinds[stage.kind].device_type, stage.tensor_parallel)
        for share in shares
        for stage in share.template.stages
    )
    for bundle in ordered:
        slots = sorted(
            ((i, s) for i in bundle for s in range(len(shares[i].template.stages))),
            key=lambda slot: slot[1],
        )
        wanted = [
            (kinds[stage.kind].device_type, stage.tensor_parallel)
            for stage in (shares[i].template.stages[s] for i, s in slots)
        ]
        current = -1
        for at, slot in enumerate(slots):
            device_type, width = wanted[at]
            to_come[device_type, width] -= 1
            if (
                current < 0
                or free.count(current, device_type) < width
                or not free.leaves_room(current, device_type, width, to_come)
            ):
                current = _best_node(free, wanted[at : at + _LOOK_AHEAD], to_come)
                if current < 0:
                    return None
            chosen[slot] = free.take(current, device_type, width)
    return tuple(
        _placed(share, [chosen[i, s] for s in range(len(share.template.stages))])
        for i, share in enumerate(shares)
    )


_LOOK_AHEAD = 64
"""Stages ahead that the choice of a node considers; no node is much larger."""


def _best_node(
    free: Free, ahead: Sequence[tuple[str, int]], to_come: Mapping[tuple[str, int], int]
) -> int:
    """The node that holds most of the coming stages in a row; of equals the one left fullest."""
    best, best_key = -1, (0, 0)
    keys: dict[tuple[tuple[str, int], ...], tuple[int, int]] = {}
    for node in range(len(free.nodes)):
        # Of nodes that have the same left, which most have, one says what all do.
        state = free.state(node)
        key = keys.get(state)
        if key is None:
            key = keys[state] = _run_in_node(dict(state), ahead)
        run = key[0]
        if run and (best < 0 or key > best_key) and free.leaves_room(node, *ahead[0], to_come):
            best, best_key = node, key
    return best


def _run_in_node(left: dict[str, int], ahead: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """How many coming stages a node holds in a row, and how little is left of it then."""
    run = 0
    for device_type, width in ahead:
        if left.get(device_type, 0) < width:
            break
        left[device_type] -= width
        run += 1
    return run, -sum(left.values())


def _placed(share: Share, devices: Sequence[tuple[Device, ...]]) -> PlacedPipeline:
    template = share.template
    return PlacedPipeline(
        template.micro_batch_size,
        share.micro_batches,
        tuple(
            PlacedStage(stage.start, stage.stop, group, stage.recompute)
            for stage, group in zip(template.stages, devices, strict=True)
        ),
    )


def placements(
    shares: Sequence[Share],
    kinds: Sequence[Kind],
    cluster: Cluster,
    *,
    keep: Callable[[int, PlacedPipeline], bool] = lambda _, __: True,
    excluded: Collection[str] = (),
    pruning: Pruning = ALL_RULES,
    prune: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[PlacedPipeline, ...]]:
    """Every placement up to renaming of what is alike: devices of a type in a node, nodes of the
    same devices and links, pipelines of the same template and share.

    Two rules leave out what is alike: a node is used for the first time only after all nodes like
    it that stand before, and equal pipelines (which must stand next to each other in ``shares``)
    have lists of node indices that do not fall. The placement of a class whose list is smallest
    meets both, so every class comes out; rarely one comes twice. Either can be switched off.

    Args:
        keep: asked of every pipeline, with its index, when its last stage is placed; no placement
            with one that it says no to comes out.
        pruning: whether ``like_nodes`` and ``like_pipelines`` hold.
        prune: told the name of the rule for each node that it leaves out at a stage.
    """
    free = Free(cluster, excluded)
    like_nodes, like_pipelines = pruning.like_nodes, pruning.like_pipelines
    slots = [
        (i, kinds[stage.kind].device_type, stage.tensor_parallel)
        for i, share in enumerate(shares)
        for stage in share.template.stages
    ]
    first_slot = [0]
    for share in shares:
        first_slot.append(first_slot[-1] + len(share.template.stages))
    touched = [0] * len(free.nodes)
    nodes: list[int] = []
    groups: list[tuple[Device, ...]] = []

    def with_room(device_type: str, width: int) -> Iterator[int]:
        fresh: set[int] = set()
        for node in range(len(free.nodes)):
            if free.count(node, device_type) < width:
                continue
            if like_nodes and not touched[node]:
                if free.node_kind[node] in fresh:
                    prune("like-nodes")
                    continue
                fresh.add(free.node_kind[node])
            yield node

    def descend() -> Iterator[tuple[PlacedPipeline, ...]]:
        at = len(nodes)
        if at == len(slots):
            yield tuple(
                _placed(share, groups[first_slot[i] : first_slot[i + 1]])
                for i, share in enumerate(shares)
            )
            return
        i, device_type, width = slots[at]
        for node in with_room(device_type, width):
            nodes.append(node)
            if like_pipelines and not _rises(nodes, first_slot, shares, i):
                prune("like-pipelines")
            else:
                group = free.take(node, device_type, width)
                groups.append(group)
                touched[node] += 1
                is_last = at + 1 == first_slot[i + 1]
                if not is_last or keep(i, _placed(shares[i], groups[first_slot[i] :])):
                    yield from descend()
                touched[node] -= 1
                groups.pop()
                free.give_back(node, device_type, group)
            nodes.pop()

    yield from descend()


def _rises(nodes: list[int], first_slot: Sequence[int], shares: Sequence[Share], i: int) -> bool:
    """Whether a pipeline equal to the one before has no smaller list of nodes, as far as known."""
    if i == 0 or shares[i] != shares[i - 1]:
        return True
    mine = nodes[first_slot[i] :]
    before = nodes[first_slot[i - 1] : first_slot[i]][: len(mine)]
    return mine >= before
