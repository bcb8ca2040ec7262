"""Pipelines on real devices, as light values that a search makes by the thousand.

A `eth_cli.plan.Plan` is the checked and complete form of the same; `to_plan_pipelines` and
`from_plan` go between the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from eth_cli.cluster import Cluster, Device
from eth_cli.plan import Pipeline, Plan, Stage


class PlacedStage(NamedTuple):
    """Blocks ``[start, stop)`` on a tensor-parallel group of devices of one node."""

    start: int
    stop: int
    devices: tuple[Device, ...]
    recompute: bool = False


class PlacedPipeline(NamedTuple):
    """Stages and the share of the global batch that they get."""

    micro_batch_size: int
    micro_batches: int
    stages: tuple[PlacedStage, ...]

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Every stage's ``[start, stop)``."""
        return tuple((s.start, s.stop) for s in self.stages)


def from_plan(plan: Plan, cluster: Cluster) -> tuple[PlacedPipeline, ...]:
    """A plan's pipelines. The plan's devices must exist (`Plan.check_cluster`)."""
    return tuple(
        PlacedPipeline(
            pipeline.micro_batch_size,
            pipeline.micro_batches,
            tuple(
                PlacedStage(
                    *stage.blocks,
                    tuple(cluster.devices[device] for device in stage.devices),
                    stage.recompute,
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )


def to_plan_pipelines(pipelines: Iterable[PlacedPipeline]) -> tuple[Pipeline, ...]:
    """The same as records of a plan, in the order given."""
    return tuple(
        Pipeline(
            micro_batches=pipeline.micro_batches,
            micro_batch_size=pipeline.micro_batch_size,
            stages=tuple(
                Stage(
                    blocks=(stage.start, stage.stop),
                    devices=tuple(device.id for device in stage.devices),
                    recompute=stage.recompute,
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in pipelines
    )
