"""Run folders written by hand from simulated spans, as a run that went as predicted leaves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from builders import make_cluster, make_plan, make_profile

from eth_cli.events import Span, write_events
from eth_cli.launch.config import RunFolder
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import write_profile
from eth_cli.search.simulate import simulate

EPOCH_S = 1_796_152_521.0
OVERHEAD_S = 0.003
"""Time of a written step beyond what is simulated."""


def planned(*, predicted: bool = True, cluster: bool = True) -> Plan:
    plan = make_plan()
    simulation = simulate(plan, make_profile(), make_cluster())
    changes: dict[str, object] = {}
    if predicted:
        changes["predicted"] = simulation.prediction()
    if cluster:
        changes["cluster"] = make_cluster()
    return plan.model_copy(update=changes)


def write_run(
    root: Path,
    plan: Plan,
    *,
    slowness: Sequence[float] = (9.0, 1.0, 1.0, 1.0),
    skipped: Sequence[int] = (),
    profile: bool = True,
) -> RunFolder:
    """A run folder whose steps took ``slowness`` times what the simulator says."""
    folder = RunFolder(root)
    folder.events.mkdir(parents=True)
    write_plan(folder.plan, plan)
    if profile:
        write_profile(folder.profile, make_profile())
    simulation = simulate(plan, make_profile(), make_cluster())
    lines = []
    start_s = EPOCH_S
    for step, factor in enumerate(slowness, start=1):
        length_s = simulation.step_time_s * factor + OVERHEAD_S
        spans = [
            replace(
                span,
                start_s=start_s + OVERHEAD_S + span.start_s * factor,
                stop_s=start_s + OVERHEAD_S + span.stop_s * factor,
                step=step,
            )
            for span in simulation.spans
            if not (step in skipped and span.name == "OPTIMIZER")
        ]
        for place in plan.ranks:
            own = [span for span in spans if span.rank == place.rank]
            whole = Span(
                rank=place.rank,
                name="STEP",
                start_s=start_s,
                stop_s=start_s + length_s,
                step=step,
            )
            write_events(folder.events_of(place.rank), [*own, whole])
        line: dict[str, object] = {"step": step, "tokens": 900, "step_time_s": length_s, "lr": 0.1}
        lines.append(
            line
            | (
                {"skipped": True}
                if step in skipped
                else {"loss": 5 - step / 4, "grad_norm": 1 / step}
            )
        )
        start_s += length_s
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
