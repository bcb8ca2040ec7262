"""Rules by which a search leaves candidates out, each with its name, its reason and a switch.

No rule decides what the best plan is: each leaves out only what cannot be better than a plan that
is known or still to come. So any of them can be switched off, to measure what it saves; the search
then looks at more within the same budget, and may have to end without a proof.

What makes a plan illegal is no rule and has no switch: a device over its memory, shares that are
not the whole batch, more pipelines than asked for. Neither have choices of the quick searches
(`heuristic`, `mixes`, `refine`) that nobody claims to be exact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

from eth_cli.errors import ConfigError
from eth_cli.faults import did_you_mean

OPTION = "--no-prune"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One reason to leave candidates out."""

    name: str
    leaves_out: str
    """What it leaves out, and counts."""
    why: str
    """Why the optimum is not among it."""


RULES = (
    Rule(
        name="bound",
        leaves_out="stages, pipelines, sets of pipelines with their shares, and placements that "
        "take no less than the best plan known, by a lower bound on their time",
        why="whatever is built on them takes at least the bound",
    ),
    Rule(
        name="capacity",
        leaves_out="pipelines and sets of them that the devices left over cannot complete to the "
        "whole batch in less than the best plan's time",
        why="the most that those devices do within a time is a bound on every plan with them",
    ),
    Rule(
        name="dominated",
        leaves_out="of sorts of pipelines within a time, one that takes no fewer devices of any "
        "kind than another of the same micro-batch size and finishes no more",
        why="the other can take its place in every mix",
    ),
    Rule(
        name="recompute",
        leaves_out="stages that recompute where the same blocks on the same devices have room for "
        "as many micro-batches without",
        why="recomputation costs time and gives nothing but memory",
    ),
    Rule(
        name="memory",
        leaves_out="stages without room for one micro-batch, before others are put in front, and "
        "pipelines with room for fewer than the devices left over leave to them",
        why="no pipeline with such a stage is legal, whatever stands in front",
    ),
    Rule(
        name="like-pipelines",
        leaves_out="shares and placements that differ only in which of equal pipelines has which",
        why="the step time does not depend on the order of pipelines",
    ),
    Rule(
        name="like-nodes",
        leaves_out="placements that differ only in which of the nodes with the same devices and "
        "links is used first",
        why="such nodes can change names and no time changes",
    ),
    Rule(
        name="price",
        leaves_out="intervals of paces and numbers of micro-batches in which no pipeline does more "
        "samples than its devices are worth",
        why="they stand against no bound; it is about the proof at large scale, never the plan",
    ),
)
"""All rules, in the order in which they are told."""

NAMES = tuple(rule.name for rule in RULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """Which rules hold; by default all. A field a rule, with ``_`` for the ``-`` of its name."""

    bound: bool = True
    capacity: bool = True
    dominated: bool = True
    recompute: bool = True
    memory: bool = True
    like_pipelines: bool = True
    like_nodes: bool = True
    price: bool = True

    @classmethod
    def without(cls, names: Collection[str]) -> Pruning:
        """All rules but these. Raises ConfigError for a name that is no rule's."""
        check_rules(names)
        return cls(**{f.name: f.name.replace("_", "-") not in names for f in fields(cls)})


ALL_RULES = Pruning()


def check_rules(names: Collection[str]) -> None:
    """Raise ConfigError for the first name that is no rule's; it lists the rules."""
    for name in names:
        if name not in NAMES:
            raise ConfigError.single(
                OPTION,
                "",
                f"{name[:40]!r} is no rule{did_you_mean(name, NAMES)}; "
                f"the rules are {', '.join(NAMES)}",
            )
