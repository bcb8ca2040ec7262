"""Legal plans that the runtime cannot execute are refused with what to do instead."""

from __future__ import annotations

from builders import make_plan

from eth_cli.launch.limits import unsupported
from eth_cli.model_sources import load_model
from eth_cli.plan import Plan


def wide_plan(devices: tuple[str, ...]) -> Plan:
    plan = make_plan()
    first, second = plan.pipelines
    stage = first.stages[1].model_copy(update={"devices": devices})
    wide = first.model_copy(update={"stages": (first.stages[0], stage)})
    return plan.model_copy(update={"pipelines": (wide, second)})


def test_plan_of_the_simplest_kind_is_supported() -> None:
    assert unsupported(make_plan()) == ()


def test_case_33_half_precision_is_supported() -> None:
    for dtype in ("fp16", "bf16"):
        assert unsupported(make_plan().model_copy(update={"dtype": dtype})) == ()


def test_devices_that_cannot_share_all_heads_are_told_at_once() -> None:
    plan = wide_plan(("b:0", "b:2", "b:3"))
    spec = load_model("llama-tiny").model_copy(update={"num_heads": 8, "num_kv_heads": 4})
    faults = unsupported(plan.model_copy(update={"model_spec": spec}), file="p.json")
    assert [(f.file, f.field) for f in faults] == [("p.json", "pipelines[0].stages[1].devices")] * 2
    assert "has 3 devices, which cannot share 8 heads" in faults[0].message
    assert "cannot share 4 key and value heads" in faults[1].message
    assert "use a number of devices that divides 4" in faults[1].message
    plan = wide_plan(("b:0", "b:2"))
    assert unsupported(plan.model_copy(update={"model_spec": spec})) == ()
