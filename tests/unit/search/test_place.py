"""Placement: neighbours together, and every distinguishable way exactly once."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from unit.search.problems import cluster_of

from eth_cli.cluster import Cluster, Link, LinkOverride
from eth_cli.search.place import Share, place, placements
from eth_cli.search.placed import PlacedPipeline
from eth_cli.search.pruning import Pruning
from eth_cli.search.templates import Kind, Template, TemplateStage

KINDS = (Kind("x", 9, 10**9), Kind("y", 9, 10**9))


def _share(kinds: str, micro_batches: int = 2) -> Share:
    stages = tuple(TemplateStage("xy".index(kind), s, s + 1) for s, kind in enumerate(kinds))
    return Share(Template(1, stages), micro_batches)


def _nodes(pipelines: tuple[PlacedPipeline, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(s.devices[0].node for s in p.stages) for p in pipelines)


def test_case_52_pipelines_stay_inside_nodes_where_they_fit() -> None:
    cluster = cluster_of({"x": 2}, {"x": 2}, {"y": 2})
    placed = place([_share("xx"), _share("xx"), _share("yy")], KINDS, cluster)
    assert placed is not None
    assert _nodes(placed) == (("n0", "n0"), ("n1", "n1"), ("n2", "n2"))


def test_by_column_keeps_owners_of_a_segment_together() -> None:
    cluster = cluster_of({"x": 2}, {"x": 2})
    placed = place([_share("xx"), _share("xx")], KINDS, cluster, bundles=[range(2)])
    assert placed is not None
    assert _nodes(placed) == (("n0", "n1"), ("n0", "n1"))


def test_nodes_of_odd_sizes_and_mixed_types() -> None:
    cluster = cluster_of({"x": 3}, {"x": 1, "y": 2}, {"y": 1})
    placed = place([_share("xxx"), _share("xyy"), _share("y")], KINDS, cluster)
    assert placed is not None
    assert _nodes(placed) == (("n0",) * 3, ("n1",) * 3, ("n2",))
    ids = [d.id for p in placed for s in p.stages for d in s.devices]
    assert len(set(ids)) == 7


def test_no_room_for_a_group_is_none() -> None:
    wide = Share(Template(1, (TemplateStage(0, 0, 1, tensor_parallel=2),)), 1)
    assert place([wide], KINDS, cluster_of({"x": 1}, {"x": 1})) is None
    placed = place([wide], KINDS, cluster_of({"x": 1}, {"x": 2}))
    assert placed is not None
    assert [d.id for d in placed[0].stages[0].devices] == ["n1:0", "n1:1"]


Shares = list[Share]


def _class(shares: Shares, nodes: list[tuple[str, ...]], alike: list[str]) -> object:
    """The same for placements that differ by names of nodes alike and order of equal shares."""
    forms = []
    for order in itertools.permutations(alike):
        name = dict(zip(alike, order, strict=True))
        forms.append(
            sorted(
                (share, tuple(name.get(node, node) for node in mine))
                for share, mine in zip(shares, nodes, strict=True)
            )
        )
    return tuple(min(forms))


def _all_classes(shares: Shares, cluster: Cluster, alike: list[str]) -> set[object]:
    types = [KINDS[s.kind].device_type for share in shares for s in share.template.stages]
    classes: set[object] = set()
    for chosen in itertools.permutations(cluster.devices.values(), len(types)):
        if [d.type for d in chosen] == types:
            nodes = iter(d.node for d in chosen)
            split = [tuple(next(nodes) for _ in share.template.stages) for share in shares]
            classes.add(_class(shares, split, alike))
    return classes


@pytest.mark.parametrize("off", [(), ("like-nodes",), ("like-pipelines",)])
def test_placements_list_every_class(off: tuple[str, ...]) -> None:
    two, three = ["n0", "n1"], ["n0", "n1", "n2"]
    cases: list[tuple[Cluster, Shares, list[str]]] = [
        (cluster_of({"x": 2}, {"x": 2}), [_share("xx"), _share("x")], two),
        (cluster_of({"x": 2}, {"x": 2}), [_share("x"), _share("x"), _share("x")], two),
        (cluster_of({"x": 1, "y": 1}, {"x": 1, "y": 1}), [_share("xy"), _share("xy")], two),
        (cluster_of({"x": 2}, {"x": 1, "y": 1}), [_share("xyx")], []),
        (cluster_of({"x": 1}, {"x": 1}, {"x": 1}), [_share("xx"), _share("x", 1)], three),
    ]
    num_found = num_classes = 0
    left_out: Counter[str] = Counter()
    pruning = Pruning.without(off)
    for cluster, shares, alike in cases:
        found = list(
            placements(
                shares,
                KINDS,
                cluster,
                pruning=pruning,
                prune=lambda rule: left_out.update([rule]),
            )
        )
        for pipelines in found:
            ids = [d.id for p in pipelines for s in p.stages for d in s.devices]
            assert len(set(ids)) == len(ids)
        listed = {_class(shares, list(_nodes(pipelines)), alike) for pipelines in found}
        expected = _all_classes(shares, cluster, alike)
        assert listed == expected
        num_found += len(found)
        num_classes += len(expected)
    # A class may come twice, but the rules leave out most of what is alike.
    num_usual = sum(len(list(placements(shares, KINDS, c))) for c, shares, _ in cases)
    assert num_usual <= 1.2 * num_classes
    assert num_found > num_usual if off else num_found == num_usual
    assert left_out.keys() == {"like-nodes", "like-pipelines"} - set(off)


def test_an_override_sets_only_the_nodes_apart_that_it_tells_apart() -> None:
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    both = LinkOverride(between=("n0", "n1"), link=link)
    # n0 and n1 may still change places, n2 with none of them.
    cluster = cluster_of({"x": 1}, {"x": 1}, {"x": 1}, overrides=(both,))
    found = sorted(_nodes(p)[0] for p in placements([_share("xx")], KINDS, cluster))
    assert found == [("n0", "n1"), ("n0", "n2"), ("n2", "n0")]


def test_keep_leaves_out_subtrees() -> None:
    cluster = cluster_of({"x": 1}, {"x": 2})
    shares = [_share("x", 3), _share("x", 2)]
    kept = list(
        placements(
            shares, KINDS, cluster, keep=lambda i, p: i > 0 or p.stages[0].devices[0].node == "n1"
        )
    )
    assert [_nodes(p) for p in kept] == [(("n1",), ("n0",)), (("n1",), ("n1",))]
