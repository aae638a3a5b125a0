"""DFlash drafts and MTP heads become what speculators 0.9.0 makes of them, and MTP heads go back
into their verifiers as it puts them.

The real package is imported here, and nowhere in the product.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.conversion.convert import convert
from speculators_core.conversion.stitch import stitch_mtp
from speculators_core.params import ConvertParams, StitchParams
from tests.core.layouts import families
from tests.core.layouts.families import KINDS, config_of, drawn

speculators = pytest.importorskip(
    "speculators", reason="speculators 0.9.0 is not installed: pip install speculators==0.9.0"
)

from loguru import logger  # noqa: E402
from speculators import SpeculatorModel  # noqa: E402
from speculators.cli import stitch as peer_stitch  # noqa: E402
from speculators.convert import convert_model  # noqa: E402

logger.remove()
logging.getLogger("transformers").setLevel(logging.ERROR)
peer_stitch.console.quiet = True

SEEDS = range(24)
OURS_DIFFERS = {"auto_map", "transformers_version", "sliding_window_non_causal"}
"""Decided otherwise on purpose: docs/conversion.md says why."""


def converted(checkpoint, verifier, directory):
    params = ConvertParams(
        checkpoint=str(checkpoint), verifier=str(verifier), validate_on_verifier=False
    )
    convert(params, directory)
    return directory


def all_tensors(directory):
    return {
        name: t for f in sorted(directory.glob("*.safetensors")) for name, t in load_file(f).items()
    }


def assert_equal_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def assert_equal_configs(ours, theirs, source):
    """What theirs says beyond ours are a class's defaults, of which the source says nothing."""
    our_layers, their_layers = (c.pop("transformer_layer_config") for c in (ours, theirs))
    given = {name: value for name, value in theirs.items() if value is not None}
    assert {n: v for n, v in ours.items() if n not in OURS_DIFFERS} == {
        n: v for n, v in given.items() if n not in OURS_DIFFERS
    }
    assert our_layers == {n: v for n, v in their_layers.items() if n in our_layers}
    beyond = their_layers.keys() - our_layers.keys()
    said = {name for name, value in source.items() if value is not None}
    assert not (beyond & said) - {"dtype"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dflash_draft_becomes_what_their_converter_writes(tmp_path, seed):
    family = drawn(seed)
    verifier = families.verifier(tmp_path / "v", family)
    draft = families.dflash(tmp_path / "draft", family)
    convert_model(str(draft), str(verifier), "dflash", output_path=str(tmp_path / "theirs"))
    ours = converted(draft, verifier, tmp_path / "ours")
    assert_equal_tensors(all_tensors(ours), all_tensors(tmp_path / "theirs"))
    assert_equal_configs(config_of(ours), config_of(tmp_path / "theirs"), config_of(draft))


def test_a_dflash_draft_in_shards_becomes_the_same(tmp_path):
    """Theirs refuses shards."""
    family = drawn(7)
    verifier = families.verifier(tmp_path / "v", family)
    results = []
    for form in ("safetensors", "sharded"):
        draft = families.dflash(tmp_path / form, replace(family, form=form))
        results.append(converted(draft, verifier, tmp_path / f"{form}-ours"))
    assert_equal_tensors(*map(all_tensors, results))
    assert config_of(results[0]) == config_of(results[1])


def test_their_loader_takes_our_dflash_with_its_verifiers_embedding_and_head(tmp_path):
    family = drawn(2)
    verifier = families.verifier(tmp_path / "v", family)
    ours = converted(families.dflash(tmp_path / "d", family), verifier, tmp_path / "ours")
    model = SpeculatorModel.from_pretrained(str(ours))
    state, lent = model.state_dict(), load_file(verifier / "model.safetensors")
    assert_equal_tensors({name: state[name] for name in all_tensors(ours)}, all_tensors(ours))
    assert torch.equal(state["embed_tokens.weight"], lent["model.embed_tokens.weight"])
    assert torch.equal(state["lm_head.weight"], lent["lm_head.weight"])


@pytest.mark.parametrize("seed", range(0, 24, 6))
def test_a_dflash_draft_that_they_converted_becomes_the_same_again(tmp_path, seed):
    """Read from speculators format: tensors are theirs, and the config is that of the draft's own
    conversion."""
    family = drawn(seed)
    verifier = families.verifier(tmp_path / "v", family)
    draft = families.dflash(tmp_path / "draft", family)
    convert_model(str(draft), str(verifier), "dflash", output_path=str(tmp_path / "theirs"))
    ours, again = (
        converted(source, verifier, tmp_path / name)
        for source, name in ((draft, "ours"), (tmp_path / "theirs", "again"))
    )
    assert_equal_tensors(all_tensors(again), all_tensors(tmp_path / "theirs"))
    assert_same_but_for_silence(config_of(again), config_of(ours))
    model = SpeculatorModel.from_pretrained(str(again))
    state = model.state_dict()
    assert_equal_tensors({name: state[name] for name in all_tensors(again)}, all_tensors(again))


def assert_same_but_for_silence(again, ours):
    """Their classes' defaults, which they leave out or add, may be there or not."""
    ours_layers, layers = (c.pop("transformer_layer_config") for c in (ours, again))
    assert again == ours
    both = ours_layers.keys() & layers.keys()
    assert {n: layers[n] for n in both} == {n: ours_layers[n] for n in both}
    sizes = {"hidden_size", "head_dim", "num_attention_heads", "vocab_size", "rope_parameters"}
    assert sizes <= both


def mtp_family(seed):
    return drawn(seed, "safetensors", "sharded")


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mtp_head_becomes_what_their_converter_writes(tmp_path, seed):
    kind = KINDS[seed % len(KINDS)]
    model = families.with_mtp(tmp_path / "v", mtp_family(seed), kind)
    convert_model(str(model), str(model), "mtp", output_path=str(tmp_path / "theirs"))
    ours = converted(model, model, tmp_path / "ours")
    theirs = all_tensors(tmp_path / "theirs")
    assert theirs.pop("verifier_lm_head.weight").isnan().all()  # a slip of theirs: nothing is in it
    assert_equal_tensors(all_tensors(ours), theirs)
    source = config_of(model)
    assert_equal_configs(
        config_of(ours), config_of(tmp_path / "theirs"), source.get("text_config", source)
    )


@pytest.mark.parametrize("seed", range(0, 24, 6))
def test_an_mtp_head_that_they_converted_becomes_the_same_again(tmp_path, seed):
    kind = KINDS[seed % len(KINDS)]
    model = families.with_mtp(tmp_path / "v", mtp_family(seed), kind)
    convert_model(str(model), str(model), "mtp", output_path=str(tmp_path / "theirs"))
    ours, again = (
        converted(source, model, tmp_path / name)
        for source, name in ((model, "ours"), (tmp_path / "theirs", "again"))
    )
    assert_equal_tensors(all_tensors(again), all_tensors(ours))
    assert_same_but_for_silence(config_of(again), config_of(ours))


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_a_head_goes_back_into_its_verifier_as_they_put_it(tmp_path, seed):
    kind = KINDS[seed % 4]  # theirs can't put experts back into a verifier that keeps them stacked
    model = families.with_mtp(tmp_path / "v", mtp_family(seed), kind)
    other = replace(mtp_family(seed), seed=seed + 3)
    trained = families.with_mtp(tmp_path / "other", other, kind)
    head = converted(trained, trained, tmp_path / "head")
    theirs = peer_stitch.stitch(head, model, tmp_path / "theirs")
    params = StitchParams(speculator=str(head), verifier=str(model))
    stitched = tmp_path / "ours"
    stitch_mtp(params, stitched)
    assert_equal_tensors(all_tensors(stitched), all_tensors(theirs))
    assert {f.name for f in stitched.iterdir()} == {f.name for f in theirs.iterdir()}
    index = stitched / "model.safetensors.index.json"
    if index.exists():
        places, theirs_places = (
            json.loads(f.read_text())["weight_map"] for f in (index, theirs / index.name)
        )
        assert places == theirs_places
