"""No rule that leaves candidates out loses the optimum: each switched off, and all at once.

The exhaustive search is asked alone, without plans from the quick searches that could hide what it
lost, and the whole planner as users ask it. `pytest -m slow` does the same for more instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cache

import pytest
from oracle.brute_force import INFINITE, BruteForce
from oracle.instances import Instance, make_whole_instance
from oracle.memory_check import check_fits
from oracle.test_whole_space import instance as whole_instance

from eth_cli.errors import ConfigError, InfeasibleError
from eth_cli.search.exhaust import Best, Exhaustive
from eth_cli.search.planner import Search, SearchOptions, SearchReport, search
from eth_cli.search.pruning import NAMES, RULES, Pruning
from eth_cli.search.spaces import all_families

ENOUGH = 20_000_000
"""Candidates: more than any of these instances has."""
OFF = [(), *((name,) for name in NAMES)]
"""Rules to switch off together: none, each alone."""


def instance(seed: int, num_devices: int = 4) -> Instance:
    return make_whole_instance(seed, max_devices=num_devices, max_blocks=5)


@cache
def optimum_s(seed: int, num_devices: int = 4) -> float:
    """By brute force, which has no rule of the search; infinite: no plan fits [s]."""
    return BruteForce(*instance(seed, num_devices), spare_recompute=False).run()


def options(seed: int, off: Collection[str], num_devices: int = 4) -> SearchOptions:
    total = instance(seed, num_devices)[2]
    return SearchOptions(global_batch_size=total, no_prune=frozenset(off), budget=ENOUGH)


def exhausted(seed: int, off: Collection[str], num_devices: int = 4) -> Best | None:
    """What the exhaustive search alone finds, from nothing; None: nothing can be used."""
    cluster, profile, _ = instance(seed, num_devices)
    problem = Search(profile, cluster, options(seed, off, num_devices)).problem
    if not problem.kinds:
        return None
    families = all_families(problem).families
    assert families is not None
    best = Best()
    assert Exhaustive(problem, families, best, budget=ENOUGH).run(), (seed, off)
    return best


def planned(seed: int, off: Collection[str], *, budget: int = ENOUGH) -> SearchReport | None:
    """What the planner finds; None: no plan."""
    cluster, profile, total = instance(seed)
    chosen = SearchOptions(global_batch_size=total, no_prune=frozenset(off), budget=budget)
    try:
        return search(profile, cluster, chosen)
    except InfeasibleError:
        return None


def check_exhausted(seeds: range, off: Collection[str], num_devices: int = 4) -> Counter[str]:
    """Every seed's optimum is found; what was left out on the way."""
    pruned: Counter[str] = Counter()
    for seed in seeds:
        best = exhausted(seed, off, num_devices)
        found_s = INFINITE if best is None else best.time_s
        assert found_s == pytest.approx(optimum_s(seed, num_devices), rel=1e-9), (seed, off)
        pruned.update({} if best is None else best.pruned)
    assert not pruned.keys() & set(off), off
    return pruned


def check_planned(seeds: range, off: Collection[str]) -> None:
    for seed in seeds:
        report = planned(seed, off)
        if report is None:
            assert optimum_s(seed) == INFINITE, (seed, off)
            continue
        cluster, profile, _ = instance(seed)
        check_fits(report.plan, profile, cluster)
        assert report.step_time_s == pytest.approx(optimum_s(seed), rel=1e-9), (seed, off)
        assert report.status == "optimal", (seed, off)
        assert not report.pruned.keys() & set(off)


@pytest.mark.parametrize("off", OFF)
def test_exhaustive_search_finds_the_optimum_without_a_rule(off: tuple[str, ...]) -> None:
    pruned = check_exhausted(range(20), off)
    if not off:
        # Each of them has something to leave out here, so that switching it off is a test.
        assert pruned.keys() == set(NAMES) - {"price"}


def test_exhaustive_search_finds_the_optimum_without_any_rule() -> None:
    assert not check_exhausted(range(12), NAMES, num_devices=3)


@pytest.mark.parametrize("off", OFF)
def test_plan_is_the_optimum_without_a_rule(off: tuple[str, ...]) -> None:
    check_planned(range(10), off)


def test_without_prices_the_bound_is_weaker_and_the_status_honest() -> None:
    """The rule of the certificate, which is asked where the exhaustive search is not."""
    num_weaker = 0
    for seed in range(20):
        usual, without = planned(seed, (), budget=0), planned(seed, ("price",), budget=0)
        if usual is None or without is None:
            assert usual is without
            continue
        assert without.step_time_s == usual.step_time_s
        assert without.bound_s <= usual.bound_s <= optimum_s(seed) * (1 + 1e-9)
        if without.step_time_s > optimum_s(seed) * (1 + 1e-9):
            assert without.status == "feasible"
        num_weaker += without.bound_s < usual.bound_s
        assert "price" not in without.pruned
    assert num_weaker > 0


def test_without_a_rule_the_budget_still_ends_the_search() -> None:
    """Nothing but the budget ends it here; what it has then is a plan, called feasible."""
    ended = 0
    for seed in range(10):
        report = planned(seed, NAMES, budget=200)
        if report is not None:
            assert report.step_time_s >= optimum_s(seed) * (1 - 1e-9)
            assert report.bound_s <= optimum_s(seed) * (1 + 1e-9)
            ended += report.status == "feasible"
    assert ended > 0


def test_without_a_rule_the_time_limit_still_ends_the_search() -> None:
    cluster, profile, total = make_whole_instance(3_009, max_devices=6, max_blocks=8)
    ticks = iter(range(10**9))
    chosen = SearchOptions(
        global_batch_size=total, no_prune=frozenset(NAMES), budget=10**12, time_limit_s=2_000.0
    )
    report = search(profile, cluster, chosen, clock=lambda: float(next(ticks)))
    assert report.wall_s < 4_000
    assert report.bound_s <= report.step_time_s


def test_a_plan_says_which_rules_were_off() -> None:
    report = planned(0, ("memory", "bound"))
    assert report is not None
    assert report.plan.provenance is not None
    assert report.plan.provenance.options["no_prune"] == ["bound", "memory"]
    plain = planned(0, ())
    assert plain is not None
    assert plain.plan.provenance is not None
    assert "no_prune" not in plain.plan.provenance.options


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'like-node' is no rule \(did you mean like-nodes\?\)"):
        planned(0, ("bound", "like-node"))


def test_every_rule_has_a_switch_a_reason_and_one_name() -> None:
    assert len(set(NAMES)) == len(RULES)
    for name in NAMES:
        off = Pruning.without([name])
        assert [f for f in Pruning.__dataclass_fields__ if not getattr(off, f)] == [
            name.replace("-", "_")
        ]
    assert all(rule.leaves_out and rule.why for rule in RULES)


@pytest.mark.slow
@pytest.mark.parametrize("off", [*OFF, NAMES])
def test_exhaustive_search_finds_the_optimum_without_a_rule_on_more(off: tuple[str, ...]) -> None:
    if off == NAMES:
        check_exhausted(range(12, 500), off, num_devices=3)
    else:
        check_exhausted(range(20, 500), off)


@pytest.mark.slow
@pytest.mark.parametrize("off", OFF)
def test_plan_is_the_optimum_without_a_rule_on_more(off: tuple[str, ...]) -> None:
    check_planned(range(10, 500), off)


@pytest.mark.slow
@pytest.mark.parametrize("off", OFF[1:])
def test_on_larger_instances_the_plan_is_the_same_or_not_called_optimal(
    off: tuple[str, ...],
) -> None:
    """Up to 6 devices or 8 blocks with the usual budget, which may end before the proof.

    That the plans with all rules are the optimum is what `test_whole_space` tests.
    """
    num_proved = num_plans = 0
    for seed in range(100):
        cluster, profile, total = whole_instance(seed)
        usual = SearchOptions(global_batch_size=total)
        without = SearchOptions(global_batch_size=total, no_prune=frozenset(off))
        try:
            best_s = search(profile, cluster, usual).step_time_s
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                search(profile, cluster, without)
            continue
        report = search(profile, cluster, without)
        assert report.step_time_s >= best_s * (1 - 1e-9), seed
        assert report.bound_s <= best_s * (1 + 1e-9), seed
        if report.status == "optimal":
            assert report.step_time_s == pytest.approx(best_s, rel=1e-9), seed
        num_proved += report.status == "optimal"
        num_plans += 1
    assert num_proved >= 0.8 * num_plans
