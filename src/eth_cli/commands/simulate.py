"""`eth simulate`: a plan as given -> its predicted step time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eth_cli import serde
from eth_cli.cluster import Cluster
from eth_cli.cluster_file import read_cluster
from eth_cli.commands import arguments
from eth_cli.commands.inputs import check_fits, naming_file
from eth_cli.plan import Plan, read_plan
from eth_cli.profile.table import read_profile
from eth_cli.search.simulate import Simulation, simulate
from eth_cli.stdout import is_stdout


def run_simulate(
    *,
    plan_path: Path,
    cluster_path: Path,
    profile_path: Path,
    overlap: bool,
    bucket_bytes: int,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Simulate a plan, searched or hand-made, and show or write the result.

    A plan that needs more memory than a device has is simulated too, with a warning and
    ``fits: false``: whoever asks "what if" wants to know how long it would take.

    Raises:
        ConfigError: an input is wrong, or the files do not belong together.
    """
    from eth_cli.render.console import print_json, print_note, print_warning

    if trace is not None:
        arguments.output_file("--trace", trace, inputs=(plan_path, cluster_path, profile_path))
    plan = read_plan(plan_path)
    cluster = read_cluster(cluster_path)
    profile = read_profile(profile_path)
    check_fits(
        plan,
        plan_path,
        cluster=cluster,
        cluster_path=cluster_path,
        profile=profile,
        profile_path=profile_path,
    )
    with naming_file("plan", plan_path), naming_file("profile", profile_path):
        simulation = simulate(plan, profile, cluster, overlap=overlap, bucket_bytes=bucket_bytes)
    is_shown = True
    if trace is not None:
        from eth_cli.trace import write_trace

        write_trace(trace, plan, predicted=simulation.spans)
        is_shown = not is_stdout(trace)
        if is_shown:
            print_note(f"wrote {trace}")
    for excess in simulation.excesses:
        print_warning(f"{plan_path}: {excess}")
    if as_json and is_shown:
        print_json(serde.dump_json(simulation_data(plan, simulation)))
    elif is_shown:
        _show(plan, simulation, cluster)


def _show(plan: Plan, simulation: Simulation, cluster: Cluster) -> None:
    from eth_cli.render.console import output_width, print_result
    from eth_cli.render.gantt import gantt
    from eth_cli.render.plan import plan_view

    title = f"{plan.model} on {cluster.name}, as given"
    print_result(*plan_view(plan, simulation, cluster, title=title))
    labels = {place.rank: f"{place.device} p{place.pipeline}s{place.stage}" for place in plan.ranks}
    print_result("", gantt(simulation.spans, labels, width=output_width()))


def simulation_data(plan: Plan, simulation: Simulation) -> dict[str, Any]:
    """A simulation as plain data, for ``--json``."""
    return {
        "step_time_s": simulation.step_time_s,
        "tokens_per_s": simulation.tokens_per_s,
        "terms": dict(simulation.terms),
        "fits": not simulation.excesses,
        "critical_pipeline": simulation.critical_pipeline,
        "memory": [serde.to_data(memory) for memory in simulation.memory],
        "stages": [
            {
                "pipeline": figures.pipeline,
                "stage": figures.stage,
                "devices": list(plan.pipelines[figures.pipeline].stages[figures.stage].devices),
                "forward_s": figures.forward_s,
                "backward_s": figures.backward_s,
                "busy_share": figures.busy_share,
                "num_in_flight": figures.num_in_flight,
                "memory_bytes": figures.memory.total_bytes,
                "capacity_bytes": figures.capacity_bytes,
            }
            for figures in simulation.stages
        ],
    }
