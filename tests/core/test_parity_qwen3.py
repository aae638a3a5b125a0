"""EAGLE-3 drafts with Qwen3 layers, beside speculators 0.9.0: ours load there, theirs load here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.checkpoint import load_speculator
from speculators_core.config import Eagle3Config
from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.errors import CheckpointError
from tests import tiny
from tests.core import layouts
from tests.core.layouts import AFTER, Shape
from tests.core.test_parity import assert_load_alike, inputs, our_logits, params, their_logits

pytest.importorskip("speculators", reason="speculators 0.9.0 is not installed")

from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

QWEN3 = Shape(kind="qwen3")


def with_layer(config, **changes):
    values = config.model_dump()
    values["transformer_layer_config"] |= changes
    return Eagle3Config.model_validate(values)


@pytest.mark.parametrize(
    ("layers", "changes"),
    [(1, {}), (2, {"attention_bias": True}), (3, {"rms_norm_eps": 1e-2})],
    ids=["1", "2 biased", "3 with a large eps"],
)
def test_a_draft_of_qwen3_layers_saved_here_gives_the_same_logits_there(
    tmp_path, tiny_verifier, layers, changes
):
    config = with_layer(tiny.draft_config(tiny_verifier, layers=layers, kind="qwen3"), **changes)
    directory = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    ours = our_logits(load_speculator(directory), *inputs())
    assert (ours - their_logits(directory, *inputs())).abs().max() < 1e-4
    plain = with_layer(config, model_type="llama")
    llama = load_speculator(tiny.build_speculator(tmp_path / "l", tiny_verifier, config=plain))
    llama.load_state_dict(load_speculator(directory).state_dict(), strict=False)
    assert (ours - our_logits(llama, *inputs())).abs().max() > 1e-2  # the head norms count


@torch.no_grad()
def made_there(directory, verifier, **changes):
    """A draft that speculators makes, fills with random values and saves."""
    layers = Qwen3Config(
        hidden_size=tiny.HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=tiny.HEADS, num_key_value_heads=tiny.KV_HEADS,
        head_dim=tiny.HEAD_DIM, vocab_size=tiny.VOCAB, max_position_embeddings=512, **changes,
    )  # fmt: skip
    layers._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=tiny.DRAFT_VOCAB,
        norm_before_residual=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(tiny.AUX_LAYERS),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(verifier), architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in model.named_parameters():
        drawn = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + 0.3 * drawn if "norm" in name else 0.2 * drawn)
    model.t2d[::4] = True
    model.d2t.copy_(3 * torch.arange(tiny.DRAFT_VOCAB))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("biased", [False, True])
def test_a_draft_of_qwen3_layers_made_there_gives_the_same_logits_here(
    tmp_path, tiny_verifier, biased
):
    directory = made_there(tmp_path / "theirs", tiny_verifier, attention_bias=biased)
    theirs = their_logits(directory, *inputs())
    assert (our_logits(load_speculator(directory), *inputs()) - theirs).abs().max() < 1e-4
    done = convert(params(directory, tiny_verifier), tmp_path / "ours")
    assert (our_logits(load_speculator(tmp_path / "ours"), *inputs()) - theirs).abs().max() < 1e-4
    assert biased == any("attention_bias is true" in warning for warning in done.warnings)
    assert done.deployable and not done.doubts


def test_conversions_of_qwen3_drafts_load_there_as_the_files_themselves(tmp_path):
    for i in range(6):
        shape = replace(
            QWEN3,
            layers=1 + i % 3,
            head_dim=(8, 16)[i % 2],
            draft_vocab=(32, 128)[i // 3],
            dtype=("float32", "bfloat16")[i % 2],
        )
        verifier = layouts.verifier(tmp_path / f"v{i}", shape, ends=True)
        draft = layouts.weights(shape, i, embedding=True)
        source = layouts.speculators(
            tmp_path / f"s{i}", shape, draft, ids=AFTER, name=str(verifier)
        )
        convert(params(source, verifier), tmp_path / f"o{i}")
        assert_load_alike(tmp_path / f"o{i}", source)
        written = load_file(tmp_path / f"o{i}" / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in draft.items())


def inspected(tmp_path, shape, draft=None, **layer):
    source = layouts.speculators(
        tmp_path / "s", shape, draft or layouts.weights(shape), ids=AFTER, layer=layer
    )
    return inspect(str(source), str(layouts.verifier(tmp_path / "v", shape)))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_type_that_is_not_said_is_told_by_the_tensors(tmp_path, kind):
    """vLLM would take silence for Llama, speculators for Qwen3."""
    found = inspected(tmp_path, Shape(kind=kind), model_type=None).config["model_type"]
    assert (found.value, found.origin) == (kind, "tensors")


def test_a_layer_type_that_the_tensors_deny_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"k_norm.weight .* no EAGLE-3 draft of llama layers"):
        inspected(tmp_path / "a", QWEN3, model_type="llama")
    with pytest.raises(CheckpointError, match=r"k_norm\.weight is missing"):
        inspected(tmp_path / "b", Shape(), model_type="qwen3")


def test_another_layer_type_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="of type 'gemma2', expected llama or qwen3"):
        inspected(tmp_path, QWEN3, model_type="gemma2")


def test_heads_that_are_not_said_are_read_off_the_tensors(tmp_path):
    """transformers would take 32 heads of 128, vLLM H / heads."""
    found = inspected(tmp_path, QWEN3, head_dim=None, num_key_value_heads=None).config
    assert found["head_dim"].value == QWEN3.head_dim
    assert found["num_key_value_heads"].value == QWEN3.kv_heads
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        Eagle3Config.parse(config, where="config.json")


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ({"layer_types": ["full_attention"] * 3}, None),
        ({}, None),
        ({"max_window_layers": 1}, ["full_attention", "sliding_attention", "sliding_attention"]),
    ],
    ids=["kinds said", "the usual 28 layers see all", "all but the first slide"],
)
def test_a_window_holds_for_the_layers_that_a_qwen3_config_means(tmp_path, said, kinds):
    window = {"use_sliding_window": True, "sliding_window": 64}
    found = inspected(tmp_path, replace(QWEN3, layers=3), **window, **said).config
    assert (found["layer_types"].value if "layer_types" in found else None) == kinds
