"""DFlash drafts, MTP heads and EAGLE heads: what is read, what is refused and why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.config import Eagle3Config
from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.conversion.stitch import stitch_mtp
from speculators_core.errors import CheckpointError, Conflict, PairingError, SpeclabError
from speculators_core.models.draft_config import read_draft_config
from speculators_core.params import ConvertParams, StitchParams
from tests.core.layouts import families
from tests.core.layouts.families import Family, config_of, drawn, with_mtp

FAMILY = Family(layers=2, seed=2)  # three verifier states, block of 6
FILE = "model.safetensors"


def converted(checkpoint: Path, verifier: Path, directory: Path, **more):
    given = {"checkpoint": str(checkpoint), "verifier": str(verifier), **more}
    return convert(ConvertParams(validate_on_verifier=False, **given), directory)


def with_tensors(directory: Path, *drop: str, **more: torch.Tensor) -> None:
    """Change a checkpoint's tensors; `__` stands for a dot."""
    tensors = load_file(directory / FILE)
    for name in drop:
        del tensors[name]
    save_file({**tensors, **{n.replace("__", "."): t for n, t in more.items()}}, directory / FILE)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A verifier, and a DFlash draft for it."""
    verifier = families.verifier(tmp_path / "verifier", FAMILY)
    return verifier, families.dflash(tmp_path / "draft", FAMILY)


def test_content_tells_the_families_apart(tmp_path, pair) -> None:
    made = {
        "dflash": pair[1],
        "mtp": with_mtp(tmp_path / "a", FAMILY, "qwen3_5"),
        "eagle": families.eagle(tmp_path / "eagle3-dflash", FAMILY),
    }
    assert {name: inspect(directory).layout for name, directory in made.items()} == {
        name: name for name in made
    }


def test_a_dflash_draft_without_its_block_in_the_config_is_known_by_its_tensors(pair) -> None:
    config = config_of(pair[1])
    del config["dflash_config"], config["architectures"]
    (pair[1] / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mask_token_id should be a token id"):
        inspect(pair[1], pair[0])


def test_every_tensor_of_a_dflash_draft_has_a_row(pair) -> None:
    found = inspect(pair[1], pair[0])
    rows = {row.target: row for row in found.tensors}
    assert {row.source for row in found.tensors} - {None} == load_file(pair[1] / FILE).keys()
    assert {name for name, row in rows.items() if row.how == "shared"} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }
    assert found.config["aux_hidden_state_layer_ids"].value == [2, 4, 6]  # z-lab counts outputs
    assert found.config["speculative_tokens"].value == found.config["block_size"].value - 1
    assert found.config["block_size"].origin == "checkpoint"


@pytest.mark.parametrize(
    ("kinds", "non_causal"), [("full_attention", True), ("sliding_attention", False)]
)
def test_blocks_are_masked_as_the_draft_was_trained(tmp_path, pair, kinds, non_causal) -> None:
    """vLLM 0.32 takes `sliding_window_non_causal: false` as causal for every layer."""
    changes = {"layer_types": [kinds] * 2, "sliding_window": 64}
    draft = families.dflash(tmp_path / "d", FAMILY, **changes)
    converted(draft, pair[0], tmp_path / "out")
    assert config_of(tmp_path / "out")["sliding_window_non_causal"] is non_causal


def test_a_mixture_of_attentions_is_converted_with_a_warning(tmp_path, pair) -> None:
    kinds = ["full_attention", "sliding_attention"]
    draft = families.dflash(tmp_path / "d", FAMILY, layer_types=kinds, sliding_window=64)
    result = converted(draft, pair[0], tmp_path / "out")
    assert any("causal" in warning for warning in result.warnings)
    assert config_of(tmp_path / "out")["sliding_window_non_causal"] is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, [2, 4, 6]), ({"aux_convention": "output"}, [3, 5, 7])],
)
def test_a_person_can_name_the_verifiers_states(tmp_path, pair, given, expected) -> None:
    converted(pair[1], pair[0], tmp_path / "out", aux_layers=(2, 4, 6), **given)
    assert config_of(tmp_path / "out")["aux_hidden_state_layer_ids"] == expected


def test_the_state_after_the_last_layer_is_kept(tmp_path, pair) -> None:
    block = {"mask_token_id": 1, "target_layer_ids": [1, 4, families.LAYERS - 1]}
    draft = families.dflash(tmp_path / "d", FAMILY, dflash_config=block)
    converted(draft, pair[0], tmp_path / "out")
    assert config_of(tmp_path / "out")["aux_hidden_state_layer_ids"] == [2, 5, families.LAYERS]


def one(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"layers__0__self_attn__g_proj__weight": one(4, 32)}, "Laguna's gate"),
        ({"layers__0__self_attn__qkv_proj__weight": one(96, 32)}, "Laguna's drafts fuse"),
        ({"aux_hidden_norms__0__weight": one(32)}, "Laguna's norms"),
        ({"layers__1__self_attn__attention_sink_bias": one(4)}, "attention sinks"),
        ({"embed_tokens__weight": one(96, 32)}, "takes its verifier's embedding"),
        ({"lm_head__weight": one(96, 32)}, "takes its verifier's head"),
        ({"markov__weight": one(96, 32)}, "no such tensor"),
    ],
)
def test_a_dflash_variant_that_can_not_be_expressed_is_refused(
    tmp_path, pair, tensors, why
) -> None:
    with_tensors(pair[1], **tensors)
    with pytest.raises(CheckpointError, match=why) as caught:
        converted(pair[1], pair[0], tmp_path / "out")
    assert next(iter(tensors)).replace("__", ".") in str(caught.value.where)
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dflash_config": {"use_swa": True}}, "dflash_config.use_swa is True"),
        ({"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor is True"),
        ({"dflash_config": {"causal": True}}, "masks its block otherwise"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id should be a token id"),
        ({"dflash_config": {"target_layer_ids": "1"}}, "should be a list of layer ids"),
        ({"dflash_config": {"target_layer_ids": [5, 3, 1]}}, "must be ascending"),
        ({"is_neox_style": False}, "rotates or masks"),
        ({"block_size": None}, "block_size should be a positive integer"),
        ({"block_size": 1}, "block_size"),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "has no place"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"head_dim": 8}, "has shape"),
    ],
)
def test_a_dflash_config_that_can_not_be_right_is_refused(pair, changes, why) -> None:
    config = config_of(pair[1])
    block = changes.get("dflash_config")
    changes = {**changes, "dflash_config": {**config["dflash_config"], **(block or {})}}
    (pair[1] / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=why):
        inspect(pair[1], pair[0])


def test_an_embedding_of_its_own_for_the_mask_is_refused(pair) -> None:
    (pair[1] / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="mask_embedding"):
        inspect(pair[1], pair[0])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vocab_size": 97}, "vocabulary"),
        ({"hidden_size": 48}, "hidden size"),
        ({"num_hidden_layers": 9}, "number of layers"),
    ],
)
def test_a_dflash_draft_of_another_verifier_is_refused(tmp_path, pair, changes, what) -> None:
    other = families.verifier(tmp_path / "other", FAMILY, **changes)
    with pytest.raises(PairingError, match=what):
        inspect(pair[1], other)


def test_an_mtp_head_is_not_deployed_by_itself(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_next")
    result = converted(model, model, tmp_path / "out")
    assert result.validation.ok is None
    assert not result.deployable
    assert any("stitch-mtp" in warning for warning in result.warnings)
    assert "stitch-mtp" in (tmp_path / "out" / "README.md").read_text()


def test_the_rest_of_the_verifier_is_named_in_few_rows(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_5_moe")
    found = inspect(model, model)
    left = {row.source: row.reason for row in found.tensors if row.how == "unused"}
    assert left.keys() == {"lm_head.*", "model.*"}
    assert left["model.*"].startswith("8 tensors of the verifier")
    parts = [row for row in found.tensors if row.how == "part"]
    assert len(parts) == 3 * families.EXPERTS
    assert parts[0].target == parts[1].target != parts[-1].target


@pytest.mark.parametrize(
    ("drop", "more", "why"),
    [
        (["mtp.norm.weight"], {}, "mtp.norm.weight is missing"),
        (["mtp.layers.0.mlp.experts.1.up_proj.weight"], {}, "experts.1.up_proj.weight is missing"),
        ([], {"mtp__layers__1__input_layernorm__weight": one(32)}, "one layer without such"),
        ([], {"mtp__layers__0__mlp__experts__3__up_proj__weight": one(24, 32)}, "no place"),
        (
            ["mtp.layers.0.mlp.experts.2.up_proj.weight"],
            {"mtp__layers__0__mlp__experts__2__up_proj__weight": one(32, 24)},
            "has shape",
        ),
    ],
)
def test_an_mtp_head_that_is_not_whole_is_refused(tmp_path, drop, more, why) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_next")
    with_tensors(model, *drop, **more)
    with pytest.raises(CheckpointError, match=why):
        converted(model, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_mtp_head_of_an_unknown_kind_is_refused(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_next", model_type="deepseek_v4")
    with pytest.raises(CheckpointError, match=r"model_type.*deepseek_v4"):
        inspect(model, model)


def stitched(head: Path, model: Path, output: Path):
    return stitch_mtp(StitchParams(speculator=str(head), verifier=str(model)), output)


@pytest.mark.parametrize("kind", families.KINDS)
@pytest.mark.parametrize("form", ["safetensors", "sharded"])
def test_out_and_back_in_gives_the_verifier_again(tmp_path, kind, form) -> None:
    model = with_mtp(tmp_path / "v", replace(FAMILY, form=form, dtype="bfloat16"), kind)
    converted(model, model, tmp_path / "head")
    stitched(tmp_path / "head", model, tmp_path / "out")
    for file in model.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "out" / file.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert config_of(tmp_path / "out") == config_of(model)


def test_only_files_that_hold_the_head_are_written_anew(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", replace(FAMILY, form="sharded"), "qwen3_5")
    kept = model / "model-00002-of-00002.safetensors"
    first, second = (load_file(model / f"model-0000{n}-of-00002.safetensors") for n in (1, 2))
    moved = {name: second.pop(name) for name in list(second) if name.startswith("mtp.")}
    save_file(first | moved, model / "model-00001-of-00002.safetensors")
    save_file(second, kept)
    names = {name: f"model-0000{2 if name in second else 1}-of-00002.safetensors"
             for name in (first | moved | second)}  # fmt: skip
    index = {"metadata": {"made": "here", "total_size": 1}, "weight_map": names}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "tokenizer").mkdir()
    (model / "tokenizer" / "words.txt").write_text("a b")
    converted(model, model, tmp_path / "head")
    result = stitched(tmp_path / "head", model, tmp_path / "out")
    assert result.rewritten == ["model-00001-of-00002.safetensors"]
    assert result.kept == [kept.name]
    assert (tmp_path / "out" / kept.name).stat().st_ino == kept.stat().st_ino
    assert (tmp_path / "out" / "tokenizer" / "words.txt").read_text() == "a b"
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert written["weight_map"] == names
    total = sum(t.nbytes for t in (first | moved | second).values())
    assert written["metadata"] == {"made": "here", "total_size": total}


def test_a_head_is_not_put_into_another_verifier(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_5")
    converted(model, model, tmp_path / "head")
    other = with_mtp(tmp_path / "other", replace(FAMILY, vocab=97), "qwen3_5")
    with pytest.raises(PairingError, match="vocabulary"):
        stitched(tmp_path / "head", other, tmp_path / "out")
    with_tensors(model, "mtp.norm.weight")
    with pytest.raises(PairingError, match=r"mtp\.norm\.weight is not in the verifier"):
        stitched(tmp_path / "head", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial"))


def test_stitching_takes_an_mtp_head_only_and_never_overwrites(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_5")
    with pytest.raises(CheckpointError, match="expected an MTP head in speculators format"):
        stitched(model, model, tmp_path / "out")
    converted(model, model, tmp_path / "head")
    with pytest.raises(Conflict):
        stitched(tmp_path / "head", model, model)


def test_stitching_does_not_copy_its_output_into_itself(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_5")
    converted(model, model, tmp_path / "head")
    (model / "more").mkdir()
    with pytest.raises(Conflict, match="lies in the verifier's directory"):
        stitched(tmp_path / "head", model, model / "more" / "out")
    assert list((model / "more").iterdir()) == []


def test_the_command_stitches_and_tells_what_it_wrote(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_5")
    converted(model, model, tmp_path / "head")
    words = ["stitch-mtp", str(tmp_path / "head"), "--verifier", str(model), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", *words, "--output", str(tmp_path / "out")],
        env={**os.environ, "SPECLAB_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    heads = [name for name in load_file(model / FILE) if name.startswith("mtp.")]
    assert (told["replaced"], told["rewritten"]) == (len(heads), [FILE])
    assert config_of(tmp_path / "out") == config_of(model)


def test_a_config_without_experts_names_what_is_missing(tmp_path) -> None:
    model = with_mtp(tmp_path / "v", FAMILY, "qwen3_next", num_experts=None)
    with pytest.raises(CheckpointError, match=r"has no place|is missing"):
        inspect(model, model)


@pytest.mark.parametrize("seed", range(20))
def test_an_eagle_head_becomes_the_layout_that_vllm_serves(tmp_path, seed) -> None:
    family = drawn(seed, "safetensors", "sharded")
    if seed == 3:  # once: a pickle is read by a process of its own, which takes seconds
        family = replace(family, form="sharded bin")
    biased = seed % 4 == 1
    verifier = families.verifier(tmp_path / "v", family)
    prefix = "model." if seed % 2 else ""
    head = families.eagle(tmp_path / "head", family, prefix=prefix, biased=biased)
    plain = families.eagle(tmp_path / "plain", replace(family, form="safetensors"), biased=biased)
    named = {"verifier_name": "org/model"}
    result = converted(head, verifier, tmp_path / "out", speculative_tokens=5, **named)
    assert result.deployable and result.validation.ok is None
    ours, theirs = load_file(tmp_path / "out" / FILE), load_file(plain / FILE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert config["num_hidden_layers"] == family.layers
    assert (config["qkv_bias"], config["attention_bias"]) == (biased, False)
    assert "bias" not in config  # of fc; vLLM would take it for one of attention
    assert config["num_lookahead_tokens"] == 5
    assert "vllm serve org/model" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"fc__bias": one(32)}, "vLLM's fc has no bias"),
        ({"layers__0__input_layernorm__weight": one(32)}, "first layer takes fc's output"),
        ({"lm_head__weight": one(96, 32)}, "its verifier's lm_head"),
        ({"norm__weight": one(32)}, "last layer's output"),
        ({"layers__0__self_attn__q_norm__weight": one(16)}, "no such tensor"),
    ],
)
def test_an_eagle_head_that_vllm_has_no_place_for_is_refused(tmp_path, tensors, why) -> None:
    head = families.eagle(tmp_path / "head", FAMILY)
    with_tensors(head, **tensors)
    with pytest.raises(CheckpointError, match=why):
        inspect(head)


def test_an_eagle_head_without_an_embedding_borrows_its_verifiers(tmp_path) -> None:
    verifier = families.verifier(tmp_path / "v", FAMILY)
    head = families.eagle(tmp_path / "head", FAMILY)
    with_tensors(head, "embed_tokens.weight")
    converted(head, verifier, tmp_path / "out")
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / FILE)
    other = families.verifier(tmp_path / "other", FAMILY, hidden_size=48)
    with pytest.raises(PairingError, match="hidden size"):
        inspect(head, other)


def test_results_are_read_back_and_the_reference_engine_refuses_them_in_words(tmp_path) -> None:
    verifier = families.verifier(tmp_path / "v", FAMILY)
    model = with_mtp(tmp_path / "m", FAMILY, "qwen3_5_moe")
    made = {
        "dflash": (families.dflash(tmp_path / "d", FAMILY), verifier),
        "eagle": (families.eagle(tmp_path / "e", FAMILY), verifier),
        "mtp": (model, model),
    }
    for algorithm, (checkpoint, one_verifier) in made.items():
        converted(checkpoint, one_verifier, tmp_path / algorithm)
        config = read_draft_config(tmp_path / algorithm)
        assert config.algorithm == algorithm
        assert config.to_json() == (tmp_path / algorithm / "config.json").read_text()
        with pytest.raises(SpeclabError, match="no EAGLE-3 draft") as caught:
            Eagle3Config.load(tmp_path / algorithm)
        assert algorithm in caught.value.message


def test_nan_in_any_of_them_is_refused(tmp_path, pair) -> None:
    with_tensors(pair[1], norm__weight=torch.full((32,), float("nan")))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        converted(pair[1], pair[0], tmp_path / "out")
    shutil.rmtree(pair[1])
    assert not (tmp_path / "out").exists()
