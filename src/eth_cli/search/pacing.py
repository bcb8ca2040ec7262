"""What a plan carries of its profile, so that it can be run without it."""

from __future__ import annotations

from eth_cli.cluster import Cluster
from eth_cli.model import ModelSpec
from eth_cli.plan import PacedBlock, PacedOptimizer, Pacing, Plan
from eth_cli.profile.table import Profile


def self_contained(
    plan: Plan, cluster: Cluster, profile: Profile, model_spec: ModelSpec | None
) -> Plan:
    """The plan with what `eth run` needs: cluster, model if known, times of emulated devices."""
    emulated = {name for name, t in cluster.device_types.items() if t.emulated}
    used = {
        (cluster.devices[stage.devices[0]].type, stage.tensor_parallel, pipeline.micro_batch_size)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    }
    played = {entry for entry in used if entry[0] in emulated}
    pacing = None
    if played:
        pacing = Pacing(
            blocks=tuple(
                PacedBlock(
                    device=e.device,
                    block=e.block,
                    tensor_parallel=e.tensor_parallel,
                    micro_batch_size=e.micro_batch_size,
                    forward_s=e.forward_s,
                    backward_s=e.backward_s,
                )
                for e in profile.compute
                if (e.device, e.tensor_parallel, e.micro_batch_size) in played
            ),
            optimizers=tuple(
                PacedOptimizer(
                    device=t, optimizer_s_per_parameter=profile.optimizer_s_per_parameter(t)
                )
                for t in sorted({entry[0] for entry in played})
            ),
        )
    return plan.model_copy(update={"cluster": cluster, "model_spec": model_spec, "pacing": pacing})
