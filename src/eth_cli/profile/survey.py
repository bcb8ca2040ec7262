"""Which links of a cluster to measure, and what the measurements say of all the others. Pure.

A cluster of n nodes has n (n - 1) directed links; measuring each takes too long, and most are
alike. Links fall into classes: inside nodes of one kind, or from nodes of one kind to those of
another. A few of each class are probed, and every node once as sender and once as receiver, which
is O(nodes + kinds^2) probes. A probe that is off the rate that is usual in its class is suspect: it
is repeated, and its ends are tried with others, so that a slow link and a slow node are told apart.

Directions are told apart too: what a node sends and what it gets may be limited differently.
Left out: contention inside the network, which shows only when many nodes talk at once.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from eth_cli.cluster import Cluster

NUM_CLASS_PROBES = 3
"""Links of each class that are probed, where it has so many."""
TOLERANCE = 0.2
"""Part of its class's usual rate by which a link may differ before it is suspect."""

Transfer = tuple[str, str]
"""Names of the nodes that send and receive; one name twice: between two devices of the node."""
LinkClass = tuple[str, str]
"""Kinds of the sender and the receiver of links between nodes; ("", kind): inside the nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A node as far as its links go."""

    name: str
    kind: str
    """Equal for nodes with the same devices."""
    num_devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Transfers to be measured while all of them go on at once."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What a probe has found."""

    probe: Probe
    rates_bytes_per_s: tuple[float, ...]
    """Rate of long messages of each transfer [bytes/s]."""

    @property
    def single(self) -> Transfer | None:
        """The transfer, where it was alone."""
        return self.probe.transfers[0] if len(self.probe.transfers) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """A link, or all links of a node in one direction, off what is usual in its class."""

    transfer: Transfer
    """The link; of a slow node one that shows it."""
    node: str | None
    """The node that sends or receives slowly; None: this link alone."""
    rate_bytes_per_s: float
    usual_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What is known of all links."""

    usual_bytes_per_s: dict[LinkClass, float]
    """Rate of the links of each class that was probed [bytes/s]."""
    deviations: tuple[Deviation, ...]
    """Confirmed ones: off in every probe, and there were two or more."""
    nic_shares: dict[str, float]
    """By kind of node: what two transfers of one node carry together, from 0 (no more than one:
    they share the NIC) to 1 (each as much as alone)."""
    unmeasured: tuple[LinkClass, ...]
    """Classes without a probe: time was up."""

    def shares_nic(self, kind: str) -> bool | None:
        """Whether transfers of a node share its NIC; None: it was not measured."""
        share = self.nic_shares.get(kind)
        return None if share is None else share < 0.5


def places_of(cluster: Cluster) -> tuple[Place, ...]:
    """The nodes of a cluster; those with the same numbers of the same types are of one kind."""
    found = []
    for node in cluster.nodes:
        counts: Counter[str] = Counter()
        for group in node.devices:
            counts[group.type] += group.count
        kind = "+".join(f"{count}x{name}" for name, count in sorted(counts.items()))
        found.append(Place(name=node.name, kind=kind, num_devices=node.num_devices))
    return tuple(found)


def classes_of(places: Sequence[Place]) -> tuple[LinkClass, ...]:
    """Every class that has a link, those inside nodes first, in order of nodes."""
    kinds = Counter(place.kind for place in places)
    several = {place.kind for place in places if place.num_devices > 1}
    inside = [("", kind) for kind in kinds if kind in several]
    between = [(a, b) for a in kinds for b in kinds if a != b or kinds[a] > 1]
    return (*inside, *between)


def probes(places: Sequence[Place], *, per_class: int = NUM_CLASS_PROBES) -> tuple[Probe, ...]:
    """What to measure, the most telling first, so that a measurement cut short is worth most.

    One link of each class, sharing of the NIC for each kind of node, each node, then further links
    of each class.
    """
    members: dict[str, list[str]] = {}
    for place in places:
        members.setdefault(place.kind, []).append(place.name)
    links = [_links(places, members, c)[:per_class] for c in classes_of(places)]
    wanted: list[tuple[Transfer, ...]] = [(some[0],) for some in links]
    for names in members.values():
        others = [place.name for place in places if place.name != names[0]][:2]
        if len(others) == 2:
            together = tuple((names[0], other) for other in others)
            # What each carries alone is what both together are held against.
            wanted += [*((transfer,) for transfer in together), together]
    for names in members.values():
        ring = zip(names, [*names[1:], names[0]], strict=True)
        wanted += [(pair,) for pair in ring if pair[0] != pair[1]]
    wanted += [((p.name, p.name),) for p in places if p.num_devices > 1]
    wanted += [(transfer,) for some in links for transfer in some]
    return tuple(Probe(transfers=transfers) for transfers in dict.fromkeys(wanted))


def confirmations(places: Sequence[Place], results: Sequence[ProbeResult]) -> tuple[Probe, ...]:
    """Second probes of suspect links, and of their ends with other nodes."""
    suspects = _suspects(places, results)
    senders = {sender for sender, _ in suspects}
    receivers = {receiver for _, receiver in suspects}
    names = [place.name for place in places]
    wanted: list[Transfer] = []
    for sender, receiver in suspects:
        wanted.append((sender, receiver))
        if sender == receiver:
            continue
        others = [n for n in names if n not in (sender, receiver)]
        wanted += [(sender, n) for n in others if n not in receivers][:1]
        wanted += [(n, receiver) for n in others if n not in senders][:1]
    return tuple(Probe(transfers=(transfer,)) for transfer in dict.fromkeys(wanted))


def findings(places: Sequence[Place], results: Sequence[ProbeResult]) -> Findings:
    """What all results, those of the confirmations included, say."""
    usual = _usual(places, results)
    kind = {place.name: place.kind for place in places}
    alone = _alone(results)
    shares: dict[str, float] = {}
    for result in results:
        transfers = result.probe.transfers
        if len(transfers) < 2 or any(t not in alone for t in transfers):
            continue
        rates = [statistics.median(alone[t]) for t in transfers]
        extra = (sum(result.rates_bytes_per_s) - max(rates)) / (sum(rates) - max(rates))
        shares[kind[transfers[0][0]]] = min(1.0, max(0.0, extra))
    return Findings(
        usual_bytes_per_s=usual,
        deviations=_deviations(places, results),
        nic_shares=shares,
        unmeasured=tuple(c for c in classes_of(places) if c not in usual),
    )


def _links(
    places: Sequence[Place], members: dict[str, list[str]], link_class: LinkClass
) -> list[Transfer]:
    """Links of a class, each of the first ones between other nodes as far as there are."""
    source, target = link_class
    if not source:
        return [(p.name, p.name) for p in places if p.kind == target and p.num_devices > 1]
    senders, receivers = members[source], members[target]
    shift = 1 if source == target else 0
    return [(name, receivers[(i + shift) % len(receivers)]) for i, name in enumerate(senders)]


def _alone(results: Sequence[ProbeResult]) -> dict[Transfer, list[float]]:
    """All rates of each link that were measured while nothing else went on."""
    found: dict[Transfer, list[float]] = {}
    for result in results:
        if result.single is not None:
            found.setdefault(result.single, []).append(result.rates_bytes_per_s[0])
    return found


def _class_of(kind: dict[str, str], transfer: Transfer) -> LinkClass:
    sender, receiver = transfer
    return ("" if sender == receiver else kind[sender], kind[receiver])


def _usual(places: Sequence[Place], results: Sequence[ProbeResult]) -> dict[LinkClass, float]:
    """The upper median of each class's links: disturbances only ever slow a link down."""
    kind = {place.name: place.kind for place in places}
    rates: dict[LinkClass, list[float]] = {}
    for transfer, found in _alone(results).items():
        rates.setdefault(_class_of(kind, transfer), []).append(max(found))
    return {link_class: statistics.median_high(found) for link_class, found in rates.items()}


def _off(places: Sequence[Place], results: Sequence[ProbeResult]) -> dict[Transfer, bool]:
    """Whether each link that was measured is off its class in every probe."""
    usual = _usual(places, results)
    kind = {place.name: place.kind for place in places}
    return {
        transfer: all(
            abs(rate / usual[_class_of(kind, transfer)] - 1) > TOLERANCE for rate in rates
        )
        for transfer, rates in _alone(results).items()
    }


def _suspects(places: Sequence[Place], results: Sequence[ProbeResult]) -> list[Transfer]:
    return [transfer for transfer, off in _off(places, results).items() if off]


def _deviations(places: Sequence[Place], results: Sequence[ProbeResult]) -> tuple[Deviation, ...]:
    """Confirmed deviations; those that one node explains are told once, of that node."""
    off, alone = _off(places, results), _alone(results)
    usual = _usual(places, results)
    kind = {place.name: place.kind for place in places}
    told: dict[tuple[str, int] | Transfer, Deviation] = {}
    for transfer in (t for t, is_off in off.items() if is_off and len(alone[t]) > 1):
        blamed: tuple[str, int] | None = None
        for end, name in enumerate(transfer):
            same = [t for t in off if t[end] == name and t[0] != t[1]]
            if transfer[0] != transfer[1] and len(same) > 1 and all(off[t] for t in same):
                blamed = blamed or (name, end)
        told.setdefault(
            blamed or transfer,
            Deviation(
                transfer=transfer,
                node=None if blamed is None else blamed[0],
                rate_bytes_per_s=statistics.median(alone[transfer]),
                usual_bytes_per_s=usual[_class_of(kind, transfer)],
            ),
        )
    return tuple(told.values())
