"""Which links are measured, and what is found: made-up networks with known answers."""

from __future__ import annotations

from collections.abc import Mapping

from builders import make_cluster

from eth_cli.profile import survey
from eth_cli.profile.survey import Findings, Place, Probe, ProbeResult, Transfer


def places(**counts: int) -> tuple[Place, ...]:
    return tuple(Place(name=n, kind=n[0], num_devices=c) for n, c in counts.items())


def measured(
    probes: tuple[Probe, ...], rates: Mapping[Transfer, float], usual: float, *, shared: bool
) -> list[ProbeResult]:
    return [
        ProbeResult(
            probe=probe,
            rates_bytes_per_s=tuple(
                rates.get(t, usual) / (len(probe.transfers) if shared else 1)
                for t in probe.transfers
            ),
        )
        for probe in probes
    ]


def found(
    nodes: tuple[Place, ...], rates: Mapping[Transfer, float], *, shared: bool = True
) -> Findings:
    results = measured(survey.probes(nodes), rates, 1e9, shared=shared)
    results += measured(survey.confirmations(nodes, results), rates, 1e9, shared=shared)
    return survey.findings(nodes, results)


SIX = places(a0=1, a1=1, a2=1, a3=1, a4=1, b0=2)


def test_every_class_and_every_node_is_probed_with_few_probes() -> None:
    many = places(**{f"a{i}": 2 for i in range(60)}, **{f"b{i}": 1 for i in range(40)})
    chosen = survey.probes(many)
    assert len(chosen) < 200 < 100 * 99
    assert len(chosen) == len(set(chosen))
    singles = {probe.transfers[0] for probe in chosen if len(probe.transfers) == 1}
    names = {place.name for place in many}
    assert {a for a, b in singles if a != b} == {b for a, b in singles if a != b} == names
    first = {(a[0] if a != b else "", b[0]) for a, b in (p.transfers[0] for p in chosen[:5])}
    assert first == set(survey.classes_of(many))


def test_even_links_have_no_deviation_and_sharing_is_told_from_none() -> None:
    for shared in (True, False):
        result = found(SIX, {}, shared=shared)
        assert (result.deviations, result.unmeasured) == ((), ())
        assert result.shares_nic("a") is shared
    assert found(places(a0=1, a1=1), {}).shares_nic("a") is None


def test_a_slow_link_and_a_slow_sender_are_told_apart() -> None:
    (link,) = found(SIX, {("a1", "a2"): 3e8}).deviations
    assert (link.transfer, link.node, link.rate_bytes_per_s) == (("a1", "a2"), None, 3e8)
    (node,) = found(SIX, {("a1", p.name): 3e8 for p in SIX if p.name != "a1"}).deviations
    assert (node.node, node.usual_bytes_per_s) == ("a1", 1e9)


def test_a_disturbed_probe_is_no_deviation() -> None:
    results = measured(survey.probes(SIX), {("a1", "a2"): 3e8}, 1e9, shared=True)
    again = survey.confirmations(SIX, results)
    assert Probe(transfers=(("a1", "a2"),)) in again
    assert survey.findings(SIX, results).deviations == ()
    results += measured(again, {}, 1e9, shared=True)
    assert survey.findings(SIX, results).deviations == ()


def test_what_time_did_not_allow_is_named() -> None:
    results = measured(survey.probes(SIX)[:1], {}, 1e9, shared=True)
    assert survey.findings(SIX, results).unmeasured == survey.classes_of(SIX)[1:]


def test_nodes_with_the_same_devices_are_of_one_kind() -> None:
    cluster = make_cluster(nodes={"a": {"fast": 2}, "b": {"slow": 1, "fast": 1}, "c": {"fast": 2}})
    assert [p.kind for p in survey.places_of(cluster)] == ["2xfast", "1xfast+1xslow", "2xfast"]
