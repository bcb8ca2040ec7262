"""What to run where, independent of how: a plan as ranks on hosts. Pure.

A backend (`launch.backends`) turns a `Job` into commands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from eth_cli.launch.config import RunFolder
from eth_cli.plan import Plan, RankPlace

WORKER = "eth_cli.launch.runtime.worker"
"""The module that every rank runs, with the run folder as its argument."""

THIS_MACHINE = "localhost"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTask:
    """What one machine runs: consecutive ranks, one process each."""

    host: str
    """Address of the machine; `THIS_MACHINE` where no other is meant."""
    nodes: tuple[str, ...]
    """Nodes of the plan that this machine plays; more than one only when they are emulated."""
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A program on all ranks of a plan."""

    name: str
    tasks: tuple[NodeTask, ...]
    """In the order of ranks: those of the first task come first."""
    module: str
    args: tuple[str, ...]
    folder: RunFolder
    places: tuple[RankPlace, ...]
    """Where each rank stands in the plan, for messages."""

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return sum(task.num_ranks for task in self.tasks)


def make_job(plan: Plan, folder: RunFolder, *, module: str = WORKER) -> Job:
    """The job that executes a plan in a run folder.

    Emulated devices are processes anywhere, so a plan of only such runs on this machine, however
    many nodes it names; so does a plan of one node.
    """
    num_ranks = Counter(place.device.rpartition(":")[0] for place in plan.ranks)
    nodes = tuple(num_ranks)  # in the order of ranks
    if len(nodes) == 1 or is_emulated(plan):
        tasks = [NodeTask(host=THIS_MACHINE, nodes=nodes, num_ranks=len(plan.ranks))]
    else:
        tasks = [
            NodeTask(host=_host_of(plan, node), nodes=(node,), num_ranks=count)
            for node, count in num_ranks.items()
        ]
    return Job(
        name=plan.model,
        tasks=tuple(tasks),
        module=module,
        args=(str(folder.root),),
        folder=folder,
        places=plan.ranks,
    )


def is_emulated(plan: Plan) -> bool:
    """Whether every device of a plan is known to be played by a paced process."""
    cluster = plan.cluster
    return cluster is not None and all(
        cluster.type_of(place.device).emulated for place in plan.ranks
    )


def _host_of(plan: Plan, node: str) -> str:
    host = None if plan.cluster is None else plan.cluster.nodes_by_name[node].host
    return node if host is None else host
