"""What a legal plan may ask for that the runtime cannot execute yet.

The launcher refuses such a plan before it starts a worker, and each worker checks again: one rule,
in one place. Rules that make a plan illegal as such live in `eth_cli.plan`.
"""

from __future__ import annotations

from eth_cli.errors import Fault
from eth_cli.plan import Plan


def unsupported(plan: Plan, *, file: str = "plan.json") -> tuple[Fault, ...]:
    """Everything in a plan that the runtime does not implement, each with what to do instead."""
    spec = plan.model_spec
    if spec is None:
        return ()
    faults = []
    for i, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            width = stage.tensor_parallel
            counts = {"heads": spec.num_heads, "key and value heads": spec.num_kv_heads}
            faults += [
                Fault(
                    file=file,
                    field=f"pipelines[{i}].stages[{s}].devices",
                    message=f"has {width} devices, which cannot share {count} {what} of "
                    f"{spec.name} evenly; use a number of devices that divides {count}",
                )
                for what, count in counts.items()
                if count % width
            ]
    return tuple(faults)
