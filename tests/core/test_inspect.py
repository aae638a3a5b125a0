"""What a checkpoint is, is told by its content, without torch and without running it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.conversion.inspect import inspect
from speculators_core.conversion.pickled import load_pickled
from speculators_core.conversion.source import read_headers
from speculators_core.errors import (
    CheckpointError,
    InputError,
    NotFound,
    PairingError,
    Unavailable,
)
from speculators_core.hub.client import unreachable
from speculators_core.hub.reference import parse_hub_id
from speculators_core.models.hub import bring_checkpoint, here
from tests import tiny


@pytest.fixture(scope="module")
def research(tmp_path_factory, tiny_verifier):
    """The tiny research checkpoint as safetensors: quick to look at."""
    directory = tmp_path_factory.mktemp("inspect") / "research"
    return tiny.build_research(directory, tiny_verifier, safetensors=True)


@pytest.fixture
def variant(research, tmp_path):
    """A copy; call it with functions that change its tensors and its config."""

    def build(tensors=lambda t: None, config=lambda c: None):
        copy = shutil.copytree(research, tmp_path / "variant")
        found = load_file(copy / "model.safetensors")
        tensors(found)
        save_file(found, copy / "model.safetensors")
        values = json.loads((copy / "config.json").read_text())
        config(values)
        (copy / "config.json").write_text(json.dumps(values))
        return copy

    return build


def rows(inspection):
    return {row.target: row for row in inspection.tensors}


def test_a_research_release_is_recognised_and_every_tensor_accounted_for(research, tiny_verifier):
    found = inspect(research, tiny_verifier)
    assert found.layout == "eagle3-research"
    assert {row.source for row in found.tensors} - {None} == set(
        load_file(research / "model.safetensors")
    )
    assert rows(found)["layers.0.hidden_norm.weight"].source == "midlayer.hidden_norm.weight"
    embedding = rows(found)["embed_tokens.weight"]
    assert (embedding.source, embedding.how) == (None, "shared")
    assert all(row.reason for row in found.tensors)


def test_the_json_has_the_promised_shape(research, tiny_verifier):
    found = json.loads(inspect(research, tiny_verifier).model_dump_json())
    assert {"layout", "tensors", "config", "doubts"} <= found.keys()
    assert {"source", "target", "shape", "dtype", "reason"} <= found["tensors"][0].keys()
    assert found["config"]["norm_before_residual"] == {"value": False, "origin": "layout"}
    assert {"about", "choices"} <= found["doubts"][0].keys()


def test_a_pickle_is_listed_as_its_safetensors_twin_is(tiny_research, research, tiny_verifier):
    pickled, mapped = (inspect(d, tiny_verifier) for d in (tiny_research, research))
    assert rows(pickled) == rows(mapped)
    assert pickled.config == mapped.config


def test_looking_costs_no_torch(research, tiny_verifier):
    script = (
        "import sys; from speculators_core.conversion.inspect import inspect; "
        f"inspect({str(research)!r}, {str(tiny_verifier)!r}); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_the_speculators_format_is_recognised(tiny_speculator, tiny_verifier):
    found = inspect(tiny_speculator, tiny_verifier)
    assert found.layout == "speculators"
    assert found.doubts == []
    assert rows(found)["fc.weight"].source == "fc.weight"


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0.", "model.midlayer.", "model.layers.0."])
def test_every_way_of_naming_the_layer_is_read(tmp_path, tiny_verifier, research, prefix):
    """A14"""
    other = tiny.build_research(
        tmp_path / "r", tiny_verifier, safetensors=True, prefix=prefix
    )  # fmt: skip
    found = inspect(other, tiny_verifier)
    assert found.config == inspect(research, tiny_verifier).config
    assert rows(found)["layers.0.mlp.up_proj.weight"].source == f"{prefix}mlp.up_proj.weight"


def test_mixed_ways_of_naming_are_refused(variant):
    def mix(tensors):
        tensors["layers.0.hidden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")

    with pytest.raises(CheckpointError, match="mixes two ways of naming"):
        inspect(variant(mix))


def test_a_tensor_given_twice_is_refused(variant):
    with pytest.raises(CheckpointError, match="mixes two ways of naming"):
        inspect(variant(lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()})))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), None, r"lm_head\.weight is missing"),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), None, r"up_proj\.weight is missing"),
        (lambda t: t.update({"fc.bias": torch.zeros(64)}), None, r"fc\.bias \[64\] has no place"),
        (lambda t: (t.pop("d2t"), t.pop("t2d")), None, "d2t is missing"),
        (None, lambda c: c.update(draft_vocab_size=32), "draft_vocab_size is 32, lm_head"),
        (None, lambda c: c.update(hidden_size=32), "hidden_size is 32, so norm"),
        (None, lambda c: c.update(num_attention_heads="4"), "num_attention_heads should be"),
        (None, lambda c: c.update(num_attention_heads=3), "head_dim is 32, so"),
        (None, lambda c: c.pop("num_attention_heads"), "num_attention_heads should be"),
        (None, lambda c: c.update(fc_norm=True), r"fc_norm\.0\.weight is missing"),
        (None, lambda c: c.update(torch_dtype="int8"), "dtype"),
    ],
)
def test_what_cannot_be_right_is_named(variant, tensors, config, message):
    directory = variant(tensors or (lambda t: None), config or (lambda c: None))
    with pytest.raises(CheckpointError, match=message):
        inspect(directory)


def test_one_side_of_the_vocabulary_map_gives_the_other(variant):
    found = inspect(variant(lambda t: t.pop("t2d")))
    assert (rows(found)["t2d"].source, rows(found)["t2d"].how) == ("d2t", "derived")


def test_harmless_left_overs_are_named_as_unused(variant):
    extra = {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    found = inspect(variant(lambda t: t.update(extra)))
    unused = [row for row in found.tensors if row.how == "unused"]
    assert [(row.source, row.target) for row in unused] == [(*extra, None)]


def test_the_layer_count_comes_from_the_tensors(variant):
    found = inspect(variant(config=lambda c: c.update(num_hidden_layers=40)))
    assert found.config["num_hidden_layers"].value == 1
    assert found.config["num_hidden_layers"].origin == "tensors"


def test_sizes_that_a_config_leaves_out_are_read_off_the_tensors(variant):
    def shorten(config):
        for name in ("head_dim", "num_key_value_heads", "intermediate_size", "hidden_size",
                     "draft_vocab_size", "vocab_size"):  # fmt: skip
            del config[name]

    found = inspect(variant(config=shorten)).config
    assert (found["head_dim"].value, found["head_dim"].origin) == (tiny.HEAD_DIM, "tensors")
    assert found["num_key_value_heads"].value == tiny.KV_HEADS
    assert found["intermediate_size"].value == tiny.INTERMEDIATE
    assert found["vocab_size"].value == tiny.VOCAB


def test_unknown_aux_layers_are_a_doubt_with_choices(research, tiny_verifier):
    doubt = inspect(research, tiny_verifier).doubts[0]
    assert (doubt.about, doubt.chosen) == ("aux layers", None)
    assert doubt.choices[0].params == {"aux_layers": [2, 4, 5], "aux_convention": "after"}
    assert {c.params["aux_convention"] for c in doubt.choices} == {"after", "output"}


def test_ids_in_the_file_without_a_convention_are_a_doubt_too(variant, tiny_verifier):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    found = inspect(variant(config=lambda c: c.update(eagle_config=ids)), tiny_verifier)
    assert [c.params["aux_layers"] for c in found.doubts[0].choices] == [[1, 3, 4], [1, 3, 4]]


def test_a_missing_rotary_base_is_taken_from_the_verifier_and_said(tmp_path, variant):
    verifier = tiny.build_verifier(tmp_path / "long", rope_theta=1e6)
    found = inspect(variant(config=lambda c: c.pop("rope_theta")), verifier)
    rope = found.config["rope_parameters"]
    assert (rope.value["rope_theta"], rope.origin) == (1e6, "verifier")
    doubt = found.doubts[0]
    assert "rope_theta" in doubt.about
    assert "1e+06" in doubt.choices[doubt.chosen].meaning


def test_a_verifier_of_another_vocabulary_is_refused(tmp_path, research):
    """A20"""
    other = tiny.build_verifier(tmp_path / "other", vocab=260)
    with pytest.raises(PairingError, match="vocabulary 256, this one has 260"):
        inspect(research, other)


def test_a_verifier_of_another_width_is_refused(tmp_path, research):
    other = tiny.build_verifier(tmp_path / "other", hidden=80)
    with pytest.raises(CheckpointError, match="multiple of the verifier's hidden size 80"):
        inspect(research, other)


def test_another_tokenizer_of_the_same_size_is_warned_of(variant, tiny_verifier):
    """A20"""
    directory = variant()
    text = (tiny_verifier / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(text)
    assert not any("tokenizer" in w for w in inspect(directory, tiny_verifier).warnings)
    (directory / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|stop|>"))
    assert "tokenizer" in inspect(directory, tiny_verifier).warnings[0]


def test_the_verifier_in_the_place_of_the_draft_is_refused(tiny_verifier, tiny_speculator):
    with pytest.raises(CheckpointError, match=r"no fc\.weight and no d2t found, but 8 layers"):
        inspect(tiny_verifier, tiny_verifier)
    with pytest.raises(CheckpointError, match="this is a draft, not a verifier"):
        inspect(tiny_speculator, tiny_speculator)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"speculators_model_type": "peagle"}, "type 'peagle'"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
    ],
)
def test_another_layout_is_refused_by_name(variant, config, says):
    with pytest.raises(CheckpointError, match=says):
        inspect(variant(config=lambda c: c.update(config)))


def test_an_older_eagle_head_is_told_apart(variant):
    def older(tensors):
        del tensors["midlayer.hidden_norm.weight"]

    with pytest.raises(CheckpointError, match=r"neither a hidden_norm .*EAGLE-3.* nor .*EAGLE-1"):
        inspect(variant(older))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(params=["zip", "legacy", "plain"])
def bomb(request, tmp_path, tiny_research):
    """A checkpoint whose pickle would make a directory, and that directory."""
    copy, trace = shutil.copytree(tiny_research, tmp_path / "r"), tmp_path / "was-here"
    file = copy / "pytorch_model.bin"
    if request.param == "plain":
        file.write_bytes(pickle.dumps({"fc.weight": Bomb(trace)}))
    else:
        zipped = request.param == "zip"
        torch.save({"x": Bomb(trace)}, file, _use_new_zipfile_serialization=zipped)
    return copy, trace


def test_no_code_in_a_pickle_runs(bomb):
    """A23"""
    copy, trace = bomb
    with pytest.raises(CheckpointError, match="run code that it carries"):
        load_pickled(copy / "pytorch_model.bin")
    assert not trace.exists()


@pytest.mark.parametrize("bomb", ["zip"], indirect=True)
def test_none_runs_while_looking_either(bomb, tiny_verifier):
    copy, trace = bomb
    with pytest.raises(CheckpointError, match="run code that it carries"):
        inspect(copy, tiny_verifier)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not really", b"\x80\x02}q\x00."])
def test_a_damaged_pickle_is_refused(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin|plain tensors"):
        load_pickled(tmp_path / "pytorch_model.bin")


def test_a_pickle_that_is_larger_than_any_draft_is_not_read(tmp_path, tiny_research, tiny_verifier):
    checkpoint = shutil.copytree(tiny_research, tmp_path / "r")
    os.truncate(checkpoint / "pytorch_model.bin", 40 * 10**9)  # sparse
    with pytest.raises(CheckpointError, match="40 GB of pickled weights: above 32 GB") as refused:
        inspect(checkpoint, tiny_verifier)
    assert "safetensors" in str(refused.value.hint)


@pytest.mark.parametrize("held", [[1, 2], {}, {"epoch": 3}, {"model": {"x": torch.zeros(1)}}])
def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path, held):
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"should hold tensors by name|expected a tensor"):
        load_pickled(tmp_path / "pytorch_model.bin")


def header(text, rest=b""):
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 60),
        header(b"{nonsense"),
        header(b"[]"),
        header(b'{"a": 1}'),
        header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"),
        header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', b"12"),
        header(b'{"a": {"dtype": "?", "shape": [1], "data_offsets": [0, 4]}}', b"1234"),
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        list(read_headers(tmp_path / "model.safetensors"))


def test_a_sharded_checkpoint_is_read_whole(variant, tiny_verifier, research):
    directory = variant()
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        parts["ab"[i % 2] + ".safetensors"][name] = tensor
    for file, part in parts.items():
        save_file(part, directory / file)
    where = {name: file for file, part in parts.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    assert rows(inspect(directory, tiny_verifier)) == rows(inspect(research, tiny_verifier))
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not here"):
        inspect(directory)


@pytest.mark.parametrize(
    "scaling",
    [{"type": 5}, {"rope_type": "yarn", "factor": "4"}, {"type": "llama3", "low_freq_factor": -1}],
)
def test_rotary_scaling_of_a_wrong_type_is_refused(variant, tiny_verifier, scaling):
    with pytest.raises(CheckpointError, match=r"should be a (name|positive number), found"):
        inspect(variant(config=lambda c: c.update(rope_scaling=scaling)), tiny_verifier)


def test_an_activation_that_no_llama_of_vllm_has_is_refused(variant, tiny_verifier):
    with pytest.raises(CheckpointError, match="hidden_act: Input should be 'silu'"):
        inspect(variant(config=lambda c: c.update(hidden_act="gelu")), tiny_verifier)


def test_places_that_hold_no_checkpoint_are_refused(tmp_path, tiny_research):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights found"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        inspect(tiny_research / "config.json")
    with pytest.raises(NotFound):
        here("/no/such/place")


def test_a_hub_id_without_a_hub_is_said_plainly(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="hub can't be reached"):
        bring_checkpoint("speclab-test/no-such-head")


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(NotFound, match="no such directory, though there is out") as caught:
        inspect("out/my_haed")
    assert "out/my_haed@main" in caught.value.hint
    assert here("out/my_haed@main") is None
    assert here("elsewhere/my_head") is None


def test_a_repository_that_is_not_there_may_have_been_meant_as_a_directory():
    missing = unreachable(parse_hub_id("elsewhere/my_head"), OSError())
    assert "if a directory is meant: none of this name is here" in missing.hint


def test_the_convention_alone_says_how_the_files_ids_count(variant, tiny_verifier):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    asked = variant(config=lambda c: c.update(eagle_config=ids))
    assert inspect(asked, tiny_verifier).doubts[0].chosen is None
    for convention, after in (("after", [1, 3, 5]), ("output", [2, 4, 6])):
        found = inspect(asked, tiny_verifier, settled={"aux_convention": convention})
        layers = found.config["eagle_aux_hidden_state_layer_ids"]
        assert (layers.value, layers.origin) == (after, "parameter")
        (doubt,) = found.doubts
        assert doubt.choices[doubt.chosen].params["aux_convention"] == convention
        assert "as aux_convention says" in doubt.choices[doubt.chosen].meaning


def test_a_convention_with_no_ids_to_count_is_refused(research, tiny_verifier):
    with pytest.raises(InputError, match="neither aux_layers nor the checkpoint names any"):
        inspect(research, tiny_verifier, settled={"aux_convention": "output"})


def test_k_is_the_persons_else_the_files_else_the_usual_one(research, tiny_speculator):
    for checkpoint, stated in ((research, 3), (tiny_speculator, 3)):
        found = inspect(checkpoint, settled={"speculative_tokens": 7}).config["speculative_tokens"]
        assert (found.value, found.origin) == (7, "parameter")
        silent = inspect(checkpoint).config["speculative_tokens"]
        assert (silent.value, silent.origin != "parameter") == (stated, True)


def test_an_absurd_k_in_a_file_is_refused(tmp_path, tiny_speculator):
    copy = shutil.copytree(tiny_speculator, tmp_path / "s")
    config = json.loads((copy / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 65
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="speculative_tokens: Input should be less than"):
        inspect(copy)


def test_two_sets_of_weights_are_refused_and_both_named(variant, tiny_verifier):
    directory = variant()
    names = list(load_file(directory / "model.safetensors"))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert inspect(directory, tiny_verifier).layout == "eagle3-research"
    shutil.copy(directory / "model.safetensors", directory / "a.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors, and .*index\.json names \(a\."):
        inspect(directory, tiny_verifier)


def test_a_pickle_beside_safetensors_is_said_not_to_have_been_read(variant, tiny_verifier):
    directory = variant()
    assert not any("not read" in warning for warning in inspect(directory, tiny_verifier).warnings)
    (directory / "pytorch_model.bin").write_bytes(b"other weights")
    warnings = inspect(directory, tiny_verifier).warnings
    assert any(w.startswith("pytorch_model.bin lies there, too") for w in warnings)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_a_file_that_git_lfs_left_out_is_called_that(variant, file):
    directory = variant()
    if file.endswith(".bin"):
        (directory / "model.safetensors").unlink()
    (directory / file).write_bytes(POINTER)
    with pytest.raises(CheckpointError, match="pointer of Git LFS") as caught:
        inspect(directory)
    assert "git lfs pull" in str(caught.value)
    assert file in str(caught.value.where)
