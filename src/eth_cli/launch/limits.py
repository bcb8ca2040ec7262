"""What a legal plan may ask for that the runtime cannot execute yet.

The launcher refuses such a plan before it starts a worker, and each worker checks again: one rule,
in one place. Rules that make a plan illegal as such live in `eth_cli.plan`.
"""

from __future__ import annotations

from eth_cli.errors import Fault
from eth_cli.plan import Plan


def unsupported(plan: Plan, *, file: str = "plan.json") -> tuple[Fault, ...]:
    """Everything in a plan that the runtime does not implement, each with what to do instead."""
    faults = []
    for i, pipeline in enumerate(plan.pipelines):
        faults += [
            Fault(
                file=file,
                field=f"pipelines[{i}].stages[{s}].devices",
                message=f"has {stage.tensor_parallel} devices, but tensor parallelism is not "
                "implemented yet; give each stage one device",
            )
            for s, stage in enumerate(pipeline.stages)
            if stage.tensor_parallel > 1
        ]
    if plan.sharded_optimizer:
        faults.append(
            Fault(
                file=file,
                field="sharded_optimizer",
                message="is not implemented yet; set it to false",
            )
        )
    if plan.dtype != "fp32":
        faults.append(
            Fault(
                file=file,
                field="dtype",
                message=f"is {plan.dtype}, but only fp32 training is implemented yet; "
                "profile and plan with --dtype fp32",
            )
        )
    return tuple(faults)
