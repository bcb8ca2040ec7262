"""What `eth run` makes of a plan and the files given with it, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_profile
from launch.launching import paced_plan

from eth_cli.cli import _run
from eth_cli.commands.run import complete_plan
from eth_cli.errors import ConfigError
from eth_cli.model_sources import load_model
from eth_cli.plan import Plan, write_plan
from eth_cli.profile.table import write_profile


def written(tmp_path: Path, plan: Plan) -> Path:
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    return path


def completed(path: Path, model: str | None) -> Plan:
    plan, _ = complete_plan(path, cluster_path=None, profile_path=None, model_source=model)
    return plan


def test_a_model_other_than_the_plans_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, paced_plan())
    arguments = ["--model", "llama-tiny", "--steps", "2", "--out", str(tmp_path / "run")]
    assert _run(["run", str(path), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: model_spec: is gpt-tiny, but --model gives llama-tiny" in line
    assert not (tmp_path / "run").exists()


def test_the_plans_own_model_may_be_given_again(tmp_path: Path) -> None:
    path = written(tmp_path, paced_plan())
    assert completed(path, "gpt-tiny") == completed(path, None)


def test_a_model_of_the_same_name_and_other_sizes_is_refused(tmp_path: Path) -> None:
    plan = paced_plan()
    assert plan.model_spec is not None
    wider = plan.model_spec.model_copy(update={"ffn_size": 96})
    path = written(tmp_path, plan.model_copy(update={"model_spec": wider}))
    with pytest.raises(ConfigError, match="is another gpt-tiny than the one that --model gives"):
        completed(path, "gpt-tiny")


def test_a_plan_without_a_model_is_named_after_the_one_that_is_trained(tmp_path: Path) -> None:
    path = written(tmp_path, paced_plan().model_copy(update={"model_spec": None, "model": "mine"}))
    plan = completed(path, "gpt-tiny")
    assert plan.model_spec == load_model("gpt-tiny")
    assert plan.model == "gpt-tiny"


def test_a_model_of_another_number_of_blocks_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, paced_plan().model_copy(update={"model_spec": None}))
    with pytest.raises(ConfigError, match="the model gpt2 "):
        completed(path, "gpt2")


def test_a_model_other_than_the_profiles_is_refused(tmp_path: Path) -> None:
    spec = load_model("gpt-tiny")
    profile = make_profile(num_layers=spec.num_layers)
    model = profile.model.model_copy(update={"spec": spec, "name": "gpt-tiny"})
    write_profile(tmp_path / "profile.json", profile.model_copy(update={"model": model}))
    unknown = {"model_spec": None, "model": "gpt-tiny", "seq_len": 128}
    path = written(tmp_path, paced_plan().model_copy(update=unknown))
    with pytest.raises(ConfigError, match=r"profile\.json: model\.spec: is gpt-tiny, but --model"):
        complete_plan(
            path,
            cluster_path=None,
            profile_path=tmp_path / "profile.json",
            model_source="llama-tiny",
        )
