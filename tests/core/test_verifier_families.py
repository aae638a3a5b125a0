"""Verifiers of many families, tiny and random: what training takes from them is their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from speculators_core.data.states import InProcess
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.ngram import NgramDrafter
from speculators_core.errors import CheckpointError, PairingError
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import SamplingParams
from speculators_core.training.loss import TargetHead
from speculators_core.training.packing import Document, pack
from tests import tiny

LAYERS = 3
SHAPE = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 253,
    "eos_token_id": 255,
}
WINDOW = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW, "head_dim": None},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "final_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": WINDOW, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "head_dim": None},
    "cohere2": {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_norm_eps": 1e-5},
    "olmo2": {"head_dim": None},
    "glm4": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "phi": {"head_dim": None, "layer_norm_eps": 1e-5},
}
SLIDING = [name for name, own in FAMILIES.items() if "sliding_window" in own]


def config_of(family: str, **changes: Any) -> Any:
    values = {**SHAPE, **FAMILIES.get(family, {}), **changes}
    return AutoConfig.for_model(family, **{k: v for k, v in values.items() if v is not None})


def saved(model: Any, directory: Path) -> Path:
    """With norms away from 1, as trained ones are, and a tokenizer beside."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.data += noise - 0.5
    model.save_pretrained(directory)
    tiny.byte_tokenizer().save_pretrained(directory)
    return directory


def build(family: str, directory: Path, **changes: Any) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return saved(AutoModelForCausalLM.from_config(config_of(family, **changes)), directory)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verifier]:
    folder = tmp_path_factory.mktemp("families")
    return {family: load_verifier(build(family, folder / family)) for family in FAMILIES}


def prompts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three of different lengths, all of them the assistant's."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(0, 250, (n,), generator=generator) for n in (40, 11, 23)]
    return [(one, torch.ones_like(one, dtype=torch.bool)) for one in ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_from_stored_states_are_the_models_own_logits(verifiers, family: str) -> None:
    """A7, with scaled and capped logits, norms that mean 1 + w, tied heads, sliding windows."""
    verifier = verifiers[family]
    verifier.check_head()
    documents = prompts()
    for (ids, _), states in zip(
        documents, InProcess(verifier, [1, 2]).states(documents), strict=True
    ):
        shown = verifier.model(ids[None], output_hidden_states=True)
        torch.testing.assert_close(
            verifier.logits(states.final), shown.logits[0], atol=1e-3, rtol=1e-3
        )
        aux = torch.cat([shown.hidden_states[k][0] for k in (1, 2)], dim=-1)
        torch.testing.assert_close(states.aux, aux, atol=1e-4, rtol=1e-4)
        assert torch.equal(states.best[:-1].long(), shown.logits[0, :-1].argmax(-1))


@pytest.mark.parametrize("family", SLIDING)
def test_windows_are_those_of_the_family(verifiers, family: str, tmp_path: Path) -> None:
    """A window shorter than the prompt changes the states behind it, and no state before."""
    verifier = verifiers[family]
    wide = load_verifier(build(family, tmp_path / family, sliding_window=128))
    assert verifier.facts.sliding_window == WINDOW
    (ids, _) = prompts()[0]
    near, far = (v.states(ids[None], [LAYERS])[LAYERS][0] for v in (verifier, wide))
    torch.testing.assert_close(near[:WINDOW], far[:WINDOW], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(near[-1], far[-1], atol=1e-2)


def test_capped_attention_is_capped(tmp_path: Path) -> None:
    """transformers' fast attention leaves Gemma 2's cap out without a word."""
    directory = build("gemma2", tmp_path / "g", attn_logit_softcapping=0.05)
    verifier = load_verifier(directory)
    exact = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    (ids, _) = prompts()[0]
    expected = exact.model(ids[None], output_hidden_states=True).hidden_states[2]
    found = verifier.states(ids[None], [2])[2]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2", "llama"])
def test_a_target_is_the_models_own_distribution(verifiers, family: str) -> None:
    """Over the draft vocabulary, renormalised: softmax of scaled or capped logits."""
    verifier = verifiers[family]
    kept = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    kept[::4] = True
    head = TargetHead(verifier.final_norm, verifier.lm_head, kept, verifier.logit_rule)
    documents = prompts()[:1]
    (states,) = InProcess(verifier, [1, 2]).states(documents)
    (ids, mask) = documents[0]
    batch = pack([Document(ids, mask, states)])
    shown = verifier.model(ids[None]).logits[0, batch.starts + 1][:, kept]
    found = head.targets(batch).probabilities
    torch.testing.assert_close(found, shown.softmax(-1), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", SLIDING)
def test_the_reference_engine_keeps_the_windows(verifiers, family: str) -> None:
    """Its cache keeps all tokens of every layer; the mask hides what a window does not show."""
    verifier = verifiers[family]
    prompt = prompts()[0][0].tolist()
    plain = SpeculativeDecoder(verifier, NgramDrafter(), 3)
    sampling = SamplingParams(max_tokens=24)
    said = [t for step in plain.generate(prompt, sampling, ()) for t in step.emitted]
    logits = verifier.model(torch.tensor([[*prompt, *said]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2)
    near = best.values[:, 0] - best.values[:, 1] < 1e-3
    assert bool(((best.indices[:, 0] == torch.tensor(said)) | near).all())
    assert len(said) > 2 * WINDOW


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "qwen3_moe"])
def test_the_ends_alone_are_those_of_the_whole(verifiers, family: str) -> None:
    whole = verifiers[family]
    ends = load_verifier(whole.facts.path, ends_only=True)
    assert len(ends.layers) == 0 and ends.fingerprint == whole.fingerprint
    ends.check_head()
    assert torch.equal(ends.embedding, whole.embedding)
    state = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ends.logits(state), whole.logits(state))


def test_an_unknown_rule_of_logits_is_refused_by_name(tmp_path: Path) -> None:
    directory = build("phi", tmp_path / "phi")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.bias"] = torch.ones_like(tensors["lm_head.bias"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PairingError, match="PhiForCausalLM does something to its logits"):
        load_verifier(directory).check_head()


def test_a_language_model_that_cannot_stand_alone_is_found_in_its_wrapper(tmp_path: Path) -> None:
    """A9, A13: vocab_size only in text_config, and no class for the text model by itself."""
    text = {**SHAPE, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 4}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        directory = saved(AutoModelForImageTextToText.from_config(config), tmp_path / "vl")
    assert "vocab_size" not in json.loads((directory / "config.json").read_text())
    verifier = load_verifier(directory)
    assert verifier.facts.vocab_size == tiny.VOCAB and len(verifier.layers) == LAYERS
    verifier.check_head()
    documents = prompts()[:1]
    states = InProcess(verifier, [1]).states(documents)[0]
    shown = verifier.model(documents[0][0][None]).logits[0]
    torch.testing.assert_close(verifier.logits(states.final), shown, atol=1e-3, rtol=1e-3)


def test_what_a_gemma_config_leaves_out_is_what_transformers_fills_in(tmp_path: Path) -> None:
    """A13: google/gemma-3-4b-it names five fields of its language model."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "sliding_window": 1024,
    }
    outer = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    facts = read_verifier(tmp_path)
    real = AutoConfig.for_model(**text)
    for name in (
        *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window"),
    ):
        assert getattr(facts, name) == getattr(real, name), name
    assert facts.rope_parameters["rope_theta"] == 1e6  # of the layers that see everything


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_rotary_positions_and_ties_of_gemma_are_read(verifiers, family: str) -> None:
    facts = verifiers[family].facts
    assert facts.tie_word_embeddings
    assert set(facts.rope_parameters) >= {"rope_theta", "rope_type"}


def test_a_quantised_model_is_used_as_it_is_where_it_can_be_run(tmp_path: Path) -> None:
    """FP8 in blocks, which transformers runs everywhere: not the weights that were quantised."""
    directory = build("llama", tmp_path / "fp8", hidden_size=128, intermediate_size=256)
    file, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if "_proj" in name]:
        scale = tensors[name].abs().max() / 448
        scales = torch.full([-(-size // 128) for size in tensors[name].shape], float(scale))
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scales
    save_file(tensors, file, metadata={"format": "pt"})
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": block}))
    verifier = load_verifier(directory)
    assert verifier.facts.quantization == "fp8"
    name = "model.layers.1.mlp.up_proj.weight"
    scale = tensors[name.replace("weight", "weight_scale_inv")][0, 0]
    found = verifier.model.get_parameter(name)
    torch.testing.assert_close(found.float(), tensors[name].float() * scale)
    verifier.check_head()


def test_a_quantised_model_that_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    directory = build("llama", tmp_path / "awq")
    file = directory / "config.json"
    block = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": block}))
    assert read_verifier(directory).quantization == "awq"
    with pytest.raises(CheckpointError, match="quantised with awq, which can't be run here"):
        load_verifier(directory)
