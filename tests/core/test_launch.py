"""Launch lines: explicit method, K as each engine counts it, podman's flags, no token in them."""

from __future__ import annotations

import itertools
import json
import shlex

import pytest

from speculators_core.conversion.card import card, with_serving
from speculators_core.conversion.export import export
from speculators_core.errors import CheckpointError, InputError
from speculators_core.launch import Served, commands, lines
from speculators_core.params import ExportParams, LaunchParams
from tests import tiny

DRAFT = Served(
    algorithm="eagle3", model="me/my_head_v2", verifier="org/model", speculative_tokens=4
)


def test_vllm_is_told_the_method_whatever_the_name():
    """A24: vLLM guesses it from the path."""
    words = shlex.split(lines(DRAFT).vllm)
    assert words[:3] == ["vllm", "serve", "org/model"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "me/my_head_v2", "num_speculative_tokens": 4}
    for algorithm in ("dflash", "eagle"):
        served = DRAFT.model_copy(update={"algorithm": algorithm})
        assert f'"method": "{algorithm}"' in lines(served).vllm
    with pytest.raises(InputError, match="medusa"):
        lines(DRAFT.model_copy(update={"algorithm": "medusa"}))


def test_aux_layers_that_nobody_named_are_noted(tiny_verifier, tmp_path):
    for aux, noted in (((2, 4, 5), False), (None, True)):
        config = tiny.draft_config(tiny_verifier, aux_layers=aux)
        draft = tiny.build_speculator(tmp_path / str(noted), tiny_verifier, config=config)
        found = commands(LaunchParams(speculator=str(draft)))
        assert any("names no aux layers" in note for note in found.notes) is noted
        written = tmp_path / f"exported {noted}"
        export(ExportParams(speculator=str(draft), accept_losses=True), written)
        found = commands(LaunchParams(speculator=str(written)))
        assert any("names no aux layers" in note for note in found.notes) is noted


def test_a_directory_that_is_not_there_is_told_from_an_empty_one(tmp_path):
    for place, hint in ((tmp_path, "is this a checkpoint"), (tmp_path / "x", "no such directory")):
        with pytest.raises(CheckpointError, match=hint):
            commands(LaunchParams(speculator=str(place)))


def test_podman_gets_devices_mounts_and_the_token_by_name_only(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    asked = LaunchParams(speculator="x", gpus="0,2", port=9000, image="quay.io/me/vllm:1")
    words = shlex.split(lines(DRAFT, asked).podman)
    assert words[:3] == ["podman", "run", "--rm"]
    assert {"--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=2", "9000:8000"} <= set(words)
    assert words[words.index("--env") + 1] == "HF_TOKEN" and "hf_secret" not in " ".join(words)
    assert words[words.index("quay.io/me/vllm:1") + 1 :][:2] == ["serve", "org/model"]
    assert words[-2:] == ["--tensor-parallel-size", "2"]
    local = DRAFT.model_copy(update={"model": "/data/my head", "verifier": "/data/model"})
    line = lines(local).podman
    words = shlex.split(line)
    assert "/data/my head:/models/model:ro" in words and "/data/model:/models/verifier:ro" in words
    assert "--env" not in words and '"model": "/models/model"' in line
    assert words[words.index("serve") + 1] == "/models/verifier"
    assert "registry.redhat.io/rhaii/vllm-cuda-rhel9" in words


def test_sglang_counts_the_root_and_reads_only_its_own_layout():
    assert lines(DRAFT).sglang is None
    found = lines(DRAFT.model_copy(update={"layout": "specforge"}))
    assert found.vllm is None and found.podman is None
    words = shlex.split(found.sglang)
    flags = dict(itertools.pairwise(words))
    assert flags["--speculative-num-draft-tokens"] == "5"  # K = 4 and the root
    assert flags["--speculative-num-steps"] == "4"
    assert flags["--speculative-algorithm"] == "EAGLE3"


def test_an_mtp_head_is_to_be_stitched_first():
    found = lines(DRAFT.model_copy(update={"algorithm": "mtp"}))
    assert (found.vllm, found.podman, found.sglang) == (None, None, None)
    assert any("stitch-mtp" in note for note in found.notes)


def test_a_directory_tells_what_it_is(tiny_speculator, tiny_verifier, tmp_path):
    found = commands(LaunchParams(speculator=str(tiny_speculator)))
    assert str(tiny_verifier) in found.vllm and any("--verifier-name" in n for n in found.notes)
    asked = LaunchParams(
        speculator=str(tiny_speculator), verifier_name="org/m", speculative_tokens=7
    )
    assert "vllm serve org/m" in commands(asked).vllm and ": 7}" in commands(asked).vllm
    config = tiny.draft_config(tiny_verifier, norm_before_residual=False, norm_output=False)
    plain = tiny.build_speculator(tmp_path / "plain", tiny_verifier, config=config)
    export(ExportParams(speculator=str(plain)), tmp_path / "out")
    back = commands(LaunchParams(speculator=str(tmp_path / "out"), verifier_name="org/m"))
    assert "--model-path org/m" in back.sglang
    with pytest.raises(CheckpointError):
        commands(LaunchParams(speculator=str(tiny_verifier)))


def test_a_card_moves_house_with_its_launch_lines():
    text = card("d", "A draft.", {"Verifier": "m"}, DRAFT, tags=("eagle3",), notes=("one. ", "two"))
    moved = with_serving(text, DRAFT.model_copy(update={"model": "other/place"}))
    assert "other/place" in moved and "me/my_head_v2" not in moved
    assert moved.startswith(text[: text.index("## Serve it")])
    assert with_serving("no such section", DRAFT) == "no such section"
    assert "base_model: org/model" in text
