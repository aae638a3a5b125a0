"""DFlash drafts and MTP heads that are in speculators format already: read, checked, normalised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.errors import CheckpointError, InputError, PairingError
from speculators_core.models.draft_config import read_draft_config
from speculators_core.params import ConvertParams
from tests.core.layouts import families
from tests.core.layouts.families import Family, config_of, with_mtp

FAMILY = Family(layers=2, seed=2, dtype="bfloat16")
FILE = "model.safetensors"


def converted(checkpoint: Path, verifier: Path, directory: Path, **more: Any):
    given = {"checkpoint": str(checkpoint), "verifier": str(verifier), **more}
    return convert(ConvertParams(validate_on_verifier=False, **given), directory)


def changed(directory: Path, layers: dict[str, Any] | None = None, **top: Any) -> None:
    """Change config.json; None takes a field away."""
    config = config_of(directory)
    config |= top
    config["transformer_layer_config"] |= layers or {}
    for block in (config, config["transformer_layer_config"]):
        for name in [name for name, value in block.items() if value is None]:
            del block[name]
    (directory / "config.json").write_text(json.dumps(config))


def with_tensors(directory: Path, *drop: str, more: dict[str, torch.Tensor] | None = None) -> None:
    tensors = load_file(directory / FILE)
    for name in drop:
        del tensors[name]
    save_file(tensors | (more or {}), directory / FILE)


@pytest.fixture
def dflash(tmp_path: Path) -> tuple[Path, Path]:
    """A verifier, and a DFlash draft for it in speculators format."""
    verifier = families.verifier(tmp_path / "verifier", FAMILY)
    converted(families.dflash(tmp_path / "zlab", FAMILY), verifier, tmp_path / "draft")
    return verifier, tmp_path / "draft"


@pytest.fixture
def mtp(tmp_path: Path) -> tuple[Path, Path]:
    model = with_mtp(tmp_path / "model", FAMILY, "qwen3_5_moe")
    converted(model, model, tmp_path / "head")
    return model, tmp_path / "head"


@pytest.fixture
def reduced(dflash: tuple[Path, Path]) -> tuple[Path, Path]:
    """The DFlash draft over a part of the vocabulary: with a map and a head of its own."""
    ids = torch.arange(3, 96, 4)
    kept = torch.zeros(96, dtype=torch.bool)
    kept[ids] = True
    head = torch.randn(len(ids), 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {"d2t": ids - torch.arange(len(ids)), "t2d": kept, "lm_head.weight": head}
    with_tensors(dflash[1], more=tensors)
    changed(dflash[1], draft_vocab_size=len(ids))
    return dflash


@pytest.mark.parametrize("kind", ["dflash", "mtp", "reduced"])
def test_converting_what_was_converted_changes_nothing(request, tmp_path, kind) -> None:
    verifier, draft = request.getfixturevalue(kind)
    found = inspect(draft, verifier)
    assert found.layout == f"speculators-{'mtp' if kind == 'mtp' else 'dflash'}"
    result = converted(draft, verifier, tmp_path / "again")
    assert result.deployable is (kind != "mtp")
    before, after = load_file(draft / FILE), load_file(tmp_path / "again" / FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(tmp_path / "again") == config_of(draft)
    assert (
        read_draft_config(tmp_path / "again").algorithm
        == config_of(draft)["speculators_model_type"]
    )


@pytest.mark.parametrize(("side", "other"), [("t2d", "d2t"), ("d2t", "t2d")])
def test_one_side_of_a_dflash_drafts_map_gives_the_other(tmp_path, reduced, side, other) -> None:
    whole = load_file(reduced[1] / FILE)
    with_tensors(reduced[1], side)
    converted(reduced[1], reduced[0], tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / FILE)[side], whole[side])


def test_a_part_of_the_vocabulary_needs_its_map_and_its_head(reduced) -> None:
    with_tensors(reduced[1], "d2t", "t2d")
    with pytest.raises(CheckpointError, match="d2t is missing"):
        inspect(*reversed(reduced))
    with_tensors(reduced[1], "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"d2t is missing|lm_head\.weight is missing"):
        inspect(*reversed(reduced))


@pytest.mark.parametrize(
    ("layers", "written", "becomes"),
    [
        ({"layer_types": None}, False, True),
        ({"layer_types": ["full_attention"] * 2}, False, True),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, False, False),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}, True, True),
    ],
)
def test_blocks_of_full_attention_are_not_read_as_causal(dflash, layers, written, becomes) -> None:
    """Their converter writes false, which vLLM 0.32 takes for every layer."""
    changed(dflash[1], layers, sliding_window_non_causal=written)
    found = inspect(dflash[1], dflash[0]).config["sliding_window_non_causal"]
    assert found.value is becomes


def test_what_a_config_leaves_out_is_read_off_the_tensors(tmp_path, dflash, mtp) -> None:
    silent = dict.fromkeys(
        ["hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"], None
    )
    for (verifier, draft), more in (
        (dflash, {"intermediate_size": None, "num_hidden_layers": None, "vocab_size": None}),
        (mtp, {"num_experts": None, "moe_intermediate_size": None, "rope_parameters": None}),
    ):
        whole = config_of(draft)["transformer_layer_config"]
        changed(draft, silent | more)
        converted(draft, verifier, tmp_path / f"again-{draft.name}")
        read = config_of(tmp_path / f"again-{draft.name}")["transformer_layer_config"]
        assert {name: read[name] for name in {**silent, **more} if name != "rope_parameters"} == {
            name: whole[name] for name in {**silent, **more} if name != "rope_parameters"
        }
        assert read["rope_parameters"]["rope_theta"] == whole["rope_parameters"]["rope_theta"]


def test_a_dflash_draft_without_its_layers_is_asked_for_them(dflash) -> None:
    changed(dflash[1], aux_hidden_state_layer_ids=None)
    with pytest.raises(CheckpointError, match="does not say which verifier states") as caught:
        inspect(dflash[1], dflash[0])
    assert "--aux-layers" in caught.value.hint
    told = inspect(dflash[1], dflash[0], settled={"aux_layers": [1, 3, 5]})
    assert told.config["aux_hidden_state_layer_ids"].value == [1, 3, 5]


def test_the_convention_may_be_corrected(dflash) -> None:
    stated = config_of(dflash[1])["aux_hidden_state_layer_ids"]
    told = inspect(dflash[1], dflash[0], settled={"aux_convention": "output"})
    assert told.config["aux_hidden_state_layer_ids"].value == [k + 1 for k in stated]


def test_k_is_at_most_what_a_block_drafts(dflash) -> None:
    most = config_of(dflash[1])["block_size"] - 1
    told = inspect(dflash[1], dflash[0], settled={"speculative_tokens": 2})
    assert told.config["speculative_tokens"].value == 2
    with pytest.raises(InputError, match=f"drafts {most} at most"):
        inspect(dflash[1], dflash[0], settled={"speculative_tokens": most + 1})


@pytest.mark.parametrize(
    ("settled", "kind"),
    [
        ({"aux_layers": [1]}, "mtp"),
        ({"rope_theta": 5.0}, "mtp"),
        ({"norm_output": False}, "dflash"),
        ({"norm_before_residual": True}, "dflash"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(request, settled, kind) -> None:
    verifier, draft = request.getfixturevalue(kind)
    with pytest.raises(InputError, match="means nothing for a draft of algorithm"):
        inspect(draft, verifier, settled=settled)


def test_what_they_write_and_nothing_reads_is_named_as_unused(tmp_path, dflash, mtp) -> None:
    nan = torch.full((96, 32), torch.nan).bfloat16()
    with_tensors(mtp[1], more={"verifier_lm_head.weight": nan, "lm_head.weight": nan.clone()})
    with_tensors(dflash[1], more={"verifier_norm.weight": torch.ones(32).bfloat16()})
    for verifier, draft in (dflash, mtp):
        unused = {row.source for row in inspect(draft, verifier).tensors if row.how == "unused"}
        assert unused and all("verifier_" in name or name == "lm_head.weight" for name in unused)
        converted(draft, verifier, tmp_path / f"again-{draft.name}")
        assert not unused & load_file(tmp_path / f"again-{draft.name}" / FILE).keys()


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_what_has_no_place_or_is_missing_is_refused(request, tmp_path, kind) -> None:
    verifier, draft = request.getfixturevalue(kind)
    changed(draft, novelty=True)
    with pytest.raises(CheckpointError, match="a field novelty that no version"):
        inspect(draft, verifier)
    changed(draft, novelty=None)
    name = next(n for n in load_file(draft / FILE) if n.endswith("post_attention_layernorm.weight"))
    with_tensors(draft, more={"markov.weight": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"markov\.weight .* has no place"):
        inspect(draft, verifier)
    with_tensors(draft, "markov.weight", name)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        converted(draft, verifier, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_another_verifiers_draft_is_refused(request, tmp_path, kind) -> None:
    _, draft = request.getfixturevalue(kind)
    other = Family(hidden=48, layers=2, seed=2)
    with pytest.raises(PairingError, match="hidden size"):
        inspect(draft, families.verifier(tmp_path / "other", other))
