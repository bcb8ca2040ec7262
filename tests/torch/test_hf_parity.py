"""Every family against `transformers`: logits in fp32, weights carried over by our names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import SEQ_LEN, VOCABULARY, config

from eth_cli.hf_config import MODEL_TYPES, write_config
from eth_cli.model import ModelSpec
from eth_cli.model_sources import load_model
from eth_cli.models.build import build_block
from eth_cli.models.hf_weights import block_pieces, fill_block, tensors_of

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SEEDS = range(8)


def their_model(fields: dict[str, Any], seed: int) -> Any:
    """A model of `transformers` with random weights, norms and biases too."""
    torch.manual_seed(seed)
    own = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(own).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def our_blocks(spec: ModelSpec, model_type: str, state: dict[str, torch.Tensor]) -> list[Any]:
    """Our blocks with the weights of a state dict."""
    blocks = []
    for index in range(spec.num_blocks):
        block = build_block(spec, index, dtype=torch.float32)
        fill_block(block, spec, index, model_type=model_type, read=state.__getitem__)
        blocks.append(block)
    return blocks


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logits_equal_those_of_transformers(model_type: str, seed: int, tmp_path: Path) -> None:
    fields = config(model_type, seed)
    model = their_model(fields, seed)
    # What transformers itself writes is read, as well as what a person may write.
    model.config.save_pretrained(tmp_path)
    (tmp_path / "short.json").write_text(json.dumps(fields), encoding="utf-8")
    spec = load_model(str(tmp_path))
    assert load_model(str(tmp_path / "short.json")).model_copy(update={"name": spec.name}) == spec
    state = model.state_dict()
    x = tokens = torch.randint(VOCABULARY, (2, SEQ_LEN))
    blocks = our_blocks(spec, model_type, state)
    for block in blocks:
        x = block(x)
    with torch.no_grad():
        expected = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert expected.std() > 0.05
    assert float((x.detach() - expected).abs().max()) <= 1e-5
    # And back: the same tensors, bit by bit, under the same names.
    back: dict[str, torch.Tensor] = {}
    for index, block in enumerate(blocks):
        for name, pieces in block_pieces(spec, index, model_type=model_type).items():
            back |= dict(tensors_of(block.get_parameter(name).detach(), pieces))
    expected_names = set(state) - ({"lm_head.weight"} if spec.tied else set())
    assert set(back) == expected_names
    assert all(torch.equal(back[name], state[name]) for name in back)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_configuration_that_is_written_reads_back_equal(model_type: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config(model_type, seed)), encoding="utf-8")
        spec = load_model(str(path))
        written = write_config(spec, prefer=model_type)
        assert written["model_type"] == model_type
        path.write_text(json.dumps(written), encoding="utf-8")
        assert load_model(str(path)) == spec
        # To transformers it is the same model, too.
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs.save_pretrained(tmp_path)
        assert load_model(str(path)) == spec
