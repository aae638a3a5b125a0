"""EAGLE-3 drafts with Qwen3 layers in vLLM: what it drafts with them, and what it can't load."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from speculators_core.checkpoint import EMBEDDING
from speculators_core.config import Eagle3Config
from speculators_core.decode.eagle import load_eagle
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.errors import InputError
from speculators_core.models.verifier import load_verifier
from speculators_core.params import DeployParams, SamplingParams
from tests import tiny
from tests.serving import ServingLab
from tests.workers.test_vllm_families import PROMPT, drafted_steps
from workers import preflight


def test_biased_layers_are_served_by_the_reference_engine_alone(
    tmp_path: Path, tiny_pair_of_qwen3: tuple[Path, Path]
) -> None:
    """vLLM 0.32 has no bias at a Qwen3 layer's output projection."""
    verifier, speculator = tiny_pair_of_qwen3
    values = Eagle3Config.load(speculator).model_dump()
    values["transformer_layer_config"]["attention_bias"] = True
    biased = Eagle3Config.model_validate(values)
    tiny.build_speculator(tmp_path / "biased", verifier, config=biased)
    params = DeployParams(
        verifier=str(verifier), speculator=str(tmp_path / "biased"), max_model_len=512
    )
    with pytest.raises(InputError, match="no bias at the output projection of Qwen3") as caught:
        preflight.examine(params)
    assert caught.value.hint == "deploy it with the reference engine"
    for fine in (
        params.model_copy(update={"engine": "reference"}),
        params.model_copy(update={"speculator": str(speculator)}),
    ):
        assert preflight.examine(fine).method == "eagle3"


@pytest.mark.prove
@pytest.mark.vllm
def test_vllm_drafts_with_qwen3_layers_what_the_reference_engine_drafts(
    tiny_pair_of_qwen3: tuple[Path, Path], serving_lab: ServingLab
) -> None:
    """Two layers, the whole vocabulary, and the embedding left to the verifier."""
    verifier, speculator = tiny_pair_of_qwen3
    deployed = serving_lab.deploy(
        verifier=str(verifier),
        speculator=str(speculator),
        max_model_len=512,
        max_num_seqs=4,
        dtype="float32",
    )
    served = drafted_steps(serving_lab.ready(deployed), serving_lab)
    serving_lab.stop(deployed)
    loaded = load_verifier(verifier)
    decoder = SpeculativeDecoder(loaded, load_eagle(speculator, loaded), 3)
    steps = decoder.generate(PROMPT, SamplingParams(max_tokens=32), stop_ids=())
    here = {step.context_len: list(step.drafted) for step in steps if step.drafted}
    both = [(drafted, here[len(t)]) for t, drafted in served if len(t) in here]
    assert len(both) >= 20
    right = sum(theirs == ours for theirs, ours in both)
    assert right >= 0.9 * len(both), both  # near-ties may fall either way


@pytest.fixture(scope="module")
def tiny_pair_of_qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A verifier, and a random draft of two Qwen3 layers without an embedding of its own."""
    place = tmp_path_factory.mktemp("qwen3")
    verifier = tiny.build_verifier(place / "verifier")
    config = tiny.draft_config(verifier, layers=2, kind="qwen3", draft_vocab=tiny.VOCAB)
    speculator = tiny.build_speculator(place / "speculator", verifier, config=config)
    tensors = load_file(speculator / "model.safetensors")
    del tensors[EMBEDDING]
    save_file(tensors, speculator / "model.safetensors")
    return verifier, speculator
