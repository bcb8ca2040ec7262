"""Plans of parts of a cluster: what is tried, what is kept, what it costs."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from builders import make_cluster, make_profile

from eth_cli.cluster import Cluster
from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.profile.table import Profile
from eth_cli.search.again import Answer, SearchAgain
from eth_cli.search.cheapest import find_cheapest
from eth_cli.search.economics import check_prices, cost_of, price_per_hour
from eth_cli.search.explore import MAX_SEARCHES, Explorer, Search
from eth_cli.search.frontier import Frontier
from eth_cli.search.parts import groups_of
from eth_cli.search.planner import SearchOptions, SearchReport, search

PRICES = {"fast": 3.5, "slow": 0.4}
PROFILE = make_profile()
OPTIONS = SearchOptions(global_batch_size=8, budget=2_000)


def priced(cluster: Cluster, prices: dict[str, float]) -> Cluster:
    """The cluster with prices per hour."""
    types = {
        name: t.model_copy(update={"price_per_hour": prices.get(name)})
        for name, t in cluster.device_types.items()
    }
    return cluster.model_copy(update={"device_types": types})


class CountingSearch:
    """Searches, and remembers what it was asked."""

    def __init__(self, cluster: Cluster) -> None:
        self.replanner = SearchAgain(PROFILE, cluster, OPTIONS)
        self.asked: list[frozenset[str]] = []

    def __call__(self, excluded: Collection[str]) -> Answer:
        self.asked.append(frozenset(excluded))
        return self.replanner.without(excluded)


def explored_by(
    asking: Search,
    cluster: Cluster,
    whole: SearchReport,
    *,
    profile: Profile = PROFILE,
    excluded: Collection[str] = (),
) -> Frontier:
    """The frontier after the way from nothing to the whole cluster."""
    explorer = Explorer(
        profile=profile, cluster=cluster, whole=whole, search=asking, excluded=excluded
    )
    explorer.climb()
    return explorer.frontier()


@pytest.fixture(scope="module")
def small() -> tuple[Cluster, SearchReport]:
    """Four devices, and the plan of all of them."""
    cluster = priced(make_cluster(), PRICES)
    return cluster, search(PROFILE, cluster, OPTIONS)


@pytest.fixture(scope="module")
def explored(small: tuple[Cluster, SearchReport]) -> tuple[Frontier, CountingSearch]:
    """Its frontier."""
    cluster, whole = small
    asking = CountingSearch(cluster)
    return explored_by(asking, cluster, whole), asking


def test_every_point_is_the_plan_of_its_devices(
    explored: tuple[Frontier, CountingSearch], small: tuple[Cluster, SearchReport]
) -> None:
    frontier, asking = explored
    assert frontier.num_searches == len(asking.asked) + 1
    assert len(set(asking.asked)) == len(asking.asked), "a part was searched twice"
    for point in frontier.points:
        used = {place.device for place in point.report.plan.ranks}
        assert not used & point.left_out
        assert sum(point.used.values()) == len(used) == point.num_devices
        assert all(point.used[t] <= point.offered[t] for t in point.used)
    assert frontier.points[-1].step_time_s == small[1].step_time_s


def test_the_frontier_is_what_nothing_beats(explored: tuple[Frontier, CountingSearch]) -> None:
    frontier, _ = explored
    on = [p for p in frontier.points if frontier.is_fastest(p)]
    assert 2 <= len(on) < len(frontier.points)
    times = [p.step_time_s for p in on]
    assert times == sorted(times, reverse=True)
    for point in frontier.points:
        better = [
            q
            for q in frontier.points
            if q.num_devices <= point.num_devices and q.step_time_s < point.step_time_s
        ]
        assert bool(better) == (point not in on)


@pytest.mark.parametrize("num_nodes", [1, 3, 40])
@pytest.mark.parametrize("num_types", [1, 2, 3])
def test_the_number_of_searches_is_bounded(num_nodes: int, num_types: int) -> None:
    types = ("fast", "slow", "mid")[:num_types]
    nodes = {f"{t}{i}": {t: 3} for t in types for i in range(num_nodes)}
    cluster = make_cluster(nodes=nodes)
    groups = groups_of(cluster, (), max_searches=MAX_SEARCHES)
    assert [g.levels[-1] for g in groups] == [3 * num_nodes] * num_types
    assert all(list(g.levels) == sorted(set(g.levels)) for g in groups)
    whole = search(make_profile(), make_cluster(), OPTIONS)
    calls = []

    def no_plan(excluded: Collection[str]) -> Answer:
        calls.append(excluded)
        return InfeasibleError("none", binding="none", suggestion="")

    frontier = explored_by(
        no_plan, cluster, _renamed(whole, cluster), profile=make_profile(types=types)
    )
    assert len(calls) < MAX_SEARCHES
    assert frontier.num_searches == len(calls) + 1


def _renamed(whole: SearchReport, cluster: Cluster) -> SearchReport:
    """Some plan of a cluster: the exploration looks at its devices only."""
    from dataclasses import replace

    from builders import make_pipeline, make_plan

    device = next(iter(cluster.devices))
    plan = make_plan(pipelines=[make_pipeline(devices=(device,))])
    return replace(whole, plan=plan)


def test_excluded_devices_are_never_offered(small: tuple[Cluster, SearchReport]) -> None:
    cluster, _ = small
    whole = search(
        PROFILE,
        cluster,
        SearchOptions(global_batch_size=8, budget=2_000, excluded=frozenset({"a:1"})),
    )
    asking = CountingSearch(cluster)
    frontier = explored_by(asking, cluster, whole, excluded={"a:1"})
    assert all("a:1" in excluded for excluded in asking.asked)
    assert all("a:1" in point.left_out for point in frontier.points)


def test_costs_by_hand(small: tuple[Cluster, SearchReport]) -> None:
    cluster, whole = small
    cost = cost_of(cluster, whole.plan, 1.8)
    assert cost is not None
    assert cost.per_hour == pytest.approx(2 * 3.5 + 2 * 0.4)
    assert cost.per_step == pytest.approx(7.8 * 1.8 / 3600)
    assert cost.tokens_per_dollar == pytest.approx(8 * 128 / (7.8 * 1.8 / 3600))
    assert price_per_hour(priced(cluster, {"fast": 3.5}), ["a:0", "b:1"]) is None


def test_a_missing_price_names_the_type(small: tuple[Cluster, SearchReport]) -> None:
    cluster = priced(small[0], {"fast": 3.5})
    with pytest.raises(ConfigError, match=r"^c.yaml: device_types.slow.price_per_hour: is missing"):
        check_prices(cluster, file="c.yaml")
    check_prices(cluster, file="c.yaml", excluded={"b:0", "b:1"})


def test_prices_are_in_no_digest(small: tuple[Cluster, SearchReport]) -> None:
    assert small[0].digest() == make_cluster().digest()


def test_the_cheapest_plan_is_cheaper_than_all_that_were_tried(
    small: tuple[Cluster, SearchReport],
) -> None:
    cluster, whole = small
    found = find_cheapest(PROFILE, cluster, whole, CountingSearch(cluster))
    costs = [p.cost.per_step for p in found.frontier.points if p.cost is not None]
    assert found.point.cost is not None
    assert found.point.cost.per_step == min(costs)
    assert found.point.step_time_s > whole.step_time_s, "slow devices are the cheaper ones here"
    assert found.frontier.num_searches <= MAX_SEARCHES


def test_a_limit_on_the_step_time_is_kept(small: tuple[Cluster, SearchReport]) -> None:
    cluster, whole = small
    limit = 1.2 * whole.step_time_s
    found = find_cheapest(PROFILE, cluster, whole, CountingSearch(cluster), max_step_time_s=limit)
    assert found.point.step_time_s <= limit
    with pytest.raises(InfeasibleError, match="--max-step-time"):
        find_cheapest(PROFILE, cluster, whole, CountingSearch(cluster), max_step_time_s=1e-4)
