"""Drafts of other algorithms than EAGLE-3: what vLLM is told, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.conversion.convert import convert
from speculators_core.conversion.stitch import stitch_mtp
from speculators_core.errors import CheckpointError, InputError, PairingError
from speculators_core.params import ConvertParams, DeployParams, StitchParams
from tests.core.layouts import families
from tests.core.layouts.families import Family
from workers import preflight
from workers.vllm_server import Machine, arguments

FAMILY = Family(layers=2, seed=2)


def made(place: Path, algorithm: str, **changes) -> tuple[Path, Path]:
    """A verifier and a converted draft for it."""
    if algorithm == "mtp":
        verifier = checkpoint = families.with_mtp(place / "v", FAMILY, "qwen3_5", **changes)
    else:
        verifier = families.verifier(place / "v", FAMILY)
        checkpoint = getattr(families, algorithm)(place / "draft", FAMILY, **changes)
    params = ConvertParams(
        checkpoint=str(checkpoint), verifier=str(verifier), validate_on_verifier=False
    )
    convert(params, place / "my_head_v2")  # a name that tells vLLM nothing
    return verifier, place / "my_head_v2"


def deployment(verifier: Path, speculator: Path, **more) -> DeployParams:
    return DeployParams(
        verifier=str(verifier), speculator=str(speculator), max_model_len=512, **more
    )


def drafting(params: DeployParams) -> dict[str, object]:
    """What vLLM is told of the draft."""
    machine = Machine(cpu=True, cores=2, fast_bfloat16=False, openmp=None)
    words = arguments(params, preflight.examine(params), machine, "float32", 1, "m", None)
    told: dict[str, object] = json.loads(words[words.index("--speculative-config") + 1])
    return told


@pytest.mark.parametrize(("algorithm", "k"), [("dflash", 5), ("eagle", 3)])
def test_the_method_is_said_whatever_the_directory_is_called(tmp_path, algorithm, k) -> None:
    params = deployment(*made(tmp_path, algorithm))
    assert drafting(params) == {
        "method": algorithm,
        "model": str(tmp_path / "my_head_v2"),
        "num_speculative_tokens": k,
    }


@pytest.mark.parametrize("algorithm", ["dflash", "eagle"])
def test_the_reference_engine_refuses_other_algorithms_in_words(tmp_path, algorithm) -> None:
    params = deployment(*made(tmp_path, algorithm), engine="reference")
    with pytest.raises(InputError, match=f"drafts with EAGLE-3 .* with {algorithm}") as caught:
        preflight.examine(params)
    assert caught.value.hint == "deploy it with vLLM"


def test_an_mtp_head_is_deployed_inside_its_verifier_only(tmp_path) -> None:
    verifier, head = made(tmp_path, "mtp")
    with pytest.raises(PairingError, match="inside its verifier") as caught:
        preflight.examine(deployment(verifier, head))
    assert "stitch-mtp" in str(caught.value.hint)
    stitched = tmp_path / "stitched"
    stitch_mtp(StitchParams(speculator=str(head), verifier=str(verifier)), stitched)
    params = deployment(stitched, stitched, speculative_tokens=2)
    assert drafting(params) == {"method": "mtp", "num_speculative_tokens": 2}


@pytest.mark.parametrize("algorithm", ["dflash", "eagle"])
def test_a_draft_that_vllm_would_serve_broken_is_refused(tmp_path, algorithm) -> None:
    verifier, draft = made(tmp_path, algorithm)
    whole = load_file(draft / "model.safetensors")
    name = "layers.1.mlp.up_proj.weight"
    for tensors, why in (
        ({n: t for n, t in whole.items() if n != name}, "is missing"),
        ({**whole, "odd.weight": torch.ones(2)}, "no place"),
        ({**whole, name: torch.ones(3, 3)}, "expected"),
        ({**whole, name: torch.full_like(whole[name], torch.inf)}, "NaN or infinity"),
    ):
        save_file(tensors, draft / "model.safetensors")
        with pytest.raises(CheckpointError, match=why):
            preflight.examine(deployment(verifier, draft))


def test_a_head_of_its_own_that_vllm_would_not_read_is_refused(tmp_path) -> None:
    verifier, draft = made(tmp_path, "eagle")
    whole = load_file(draft / "model.safetensors")
    save_file({**whole, "lm_head.weight": torch.ones(2, 2)}, draft / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has no place"):
        preflight.examine(deployment(verifier, draft))


def test_a_draft_of_another_verifier_is_refused(tmp_path) -> None:
    _, draft = made(tmp_path, "dflash")
    other = families.verifier(tmp_path / "w", replace(FAMILY, vocab=100))
    with pytest.raises(PairingError, match="vocabulary 96"):
        preflight.examine(deployment(other, draft))
    shallow = families.verifier(tmp_path / "s", FAMILY, num_hidden_layers=5)
    with pytest.raises(PairingError, match=r"not all within 0\.\.5"):
        preflight.examine(deployment(shallow, draft))


def test_a_mixture_of_attentions_is_not_served(tmp_path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    pair = made(tmp_path, "dflash", layer_types=kinds, sliding_window=64)
    with pytest.raises(PairingError, match="mixes sliding and full attention"):
        preflight.examine(deployment(*pair))
