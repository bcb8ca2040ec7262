"""Legal plans that the runtime cannot execute yet are refused with what to do instead."""

from __future__ import annotations

from builders import make_plan

from eth_cli.launch.limits import unsupported


def test_plan_of_the_simplest_kind_is_supported() -> None:
    assert unsupported(make_plan()) == ()


def test_case_33_half_precision_is_refused_clearly() -> None:
    for dtype in ("fp16", "bf16"):
        (fault,) = unsupported(make_plan().model_copy(update={"dtype": dtype}), file="p.json")
        assert (fault.file, fault.field) == ("p.json", "dtype")
        assert f"is {dtype}, but only fp32 training is implemented" in fault.message


def test_everything_that_is_not_supported_is_named_at_once() -> None:
    plan = make_plan().model_copy(update={"sharded_optimizer": True})
    first, second = plan.pipelines
    stage = first.stages[1].model_copy(update={"devices": ("b:0", "b:2")})
    wide = first.model_copy(update={"stages": (first.stages[0], stage)})
    plan = plan.model_copy(update={"pipelines": (wide, second)})
    assert [fault.field for fault in unsupported(plan)] == [
        "pipelines[0].stages[1].devices",
        "sharded_optimizer",
    ]
