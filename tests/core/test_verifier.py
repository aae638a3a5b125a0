"""The verifier's weights are found under whatever names a wrapper gives them, or loading stops."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.data.template import load_template
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier import load_verifier


def wrapped(verifier, directory, layers, head):
    """The verifier inside a multimodal wrapper: names under `layers` and `head`, more beside."""
    copy = shutil.copytree(verifier, directory)
    tensors = {"vision_tower.patch.weight": torch.zeros(3)}
    for name, tensor in load_file(copy / "model.safetensors").items():
        tensors[name.replace("model.", layers, 1).replace("lm_head.", head, 1)] = tensor
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((copy / "config.json").read_text())
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    return copy


@pytest.mark.parametrize(
    ("layers", "head"),
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")],
)
def test_a_language_model_inside_a_wrapper_is_the_same_model(tmp_path, tiny_verifier, layers, head):
    """A9"""
    plain = load_verifier(tiny_verifier)
    found = load_verifier(wrapped(tiny_verifier, tmp_path / "w", layers, head))
    assert torch.equal(found.final_norm.weight, plain.final_norm.weight)
    assert torch.equal(found.lm_head, plain.lm_head)
    ids = torch.arange(12)[None]
    assert torch.equal(found.model(ids).logits, plain.model(ids).logits)
    assert found.facts.hidden_size == plain.facts.hidden_size


def test_weights_that_are_not_found_stop_it(tmp_path, tiny_verifier):
    """A9: they would be random, and training and acceptance with them."""
    other = wrapped(tiny_verifier, tmp_path / "w", "backbone.", "backbone.head.")
    with pytest.raises(CheckpointError, match="weights lack"):
        load_verifier(other)


def test_a_tied_head_is_not_missing(tied_verifier):
    verifier = load_verifier(tied_verifier)
    assert torch.equal(verifier.lm_head, verifier.embedding)


@pytest.mark.parametrize("named", [[5, 7], 5])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_answer_ends_in_masks_by_the_tokens_that_end_it_in_the_engine(
    tmp_path, tiny_verifier, file, named
):
    shutil.copytree(tiny_verifier, tmp_path / "v")
    (tmp_path / "v" / "generation_config.json").unlink(missing_ok=True)
    there = tmp_path / "v" / file
    values = json.loads(there.read_text()) if there.exists() else {}
    there.write_text(json.dumps({**values, "eos_token_id": named}))
    verifier = load_verifier(tmp_path / "v")
    assert {5} <= set(verifier.stop_ids)
    assert load_template(verifier.facts).stops == set(verifier.stop_ids)


def test_a_broken_generation_config_is_named(tmp_path, tiny_verifier):
    shutil.copytree(tiny_verifier, tmp_path / "v")
    facts = load_verifier(tmp_path / "v").facts
    (tmp_path / "v" / "generation_config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="should be an object"):
        load_template(facts)
