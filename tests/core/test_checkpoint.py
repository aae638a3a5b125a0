"""Speculator directories: complete or absent, and nothing wrong goes in unseen."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.checkpoint import all_finite, load_speculator, save_speculator
from speculators_core.errors import CheckpointError
from tests import tiny


@pytest.fixture
def damaged(tiny_speculator, tmp_path):
    """A copy of the tiny speculator; call it with a function that changes the tensors."""

    def damage(change):
        copy = shutil.copytree(tiny_speculator, tmp_path / "damaged")
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors")
        return copy

    return damage


def test_what_is_saved_is_what_is_loaded(tiny_speculator, tmp_path):
    draft = load_speculator(tiny_speculator)
    save_speculator(draft, tmp_path / "again")
    for name, tensor in load_speculator(tmp_path / "again").state_dict().items():
        assert torch.equal(tensor, draft.state_dict()[name]), name


def test_the_embedding_is_frozen(tiny_speculator):
    draft = load_speculator(tiny_speculator)
    assert "embed_tokens.weight" not in dict(draft.trainable())
    assert "lm_head.weight" in dict(draft.trainable())


def test_a_missing_embedding_is_taken_from_the_verifier_and_shared(damaged):
    copy = damaged(lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing"):
        load_speculator(copy)
    table = torch.randn(tiny.VOCAB, tiny.HIDDEN)
    draft = load_speculator(copy, embedding=table)
    assert draft.embed_tokens.weight.data_ptr() == table.data_ptr()


def set_to(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"fc\.weight is missing"),
        (lambda t: t.update(foo=torch.zeros(1)), "foo has no place"),
        (set_to("fc.weight", lambda t: t[:, :128].contiguous()), r"\[64, 128\], expected"),
        (set_to("norm.weight", lambda t: t * float("nan")), r"norm\.weight holds NaN"),
        (set_to("d2t", lambda t: t + 300), "outside the verifier's vocabulary"),
        (set_to("d2t", lambda t: torch.zeros_like(t)), "must be the same"),
        (set_to("d2t", lambda t: t.int()), "expected int64 and bool"),
        (set_to("t2d", lambda t: ~t), "must be the same"),
    ],
)
def test_a_tensor_that_cannot_be_right_is_named(damaged, change, message):
    with pytest.raises(CheckpointError, match=message):
        load_speculator(damaged(change))


def test_a_truncated_file_is_refused(tiny_speculator, tmp_path):
    copy = shutil.copytree(tiny_speculator, tmp_path / "cut")
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        load_speculator(copy)


def test_a_directory_without_weights_is_refused(tiny_speculator, tmp_path):
    (tmp_path / "config.json").write_text((tiny_speculator / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_speculator(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 17, 999])
def test_one_bad_value_anywhere_is_found(dtype, bad, at):
    values = torch.randn(1000).to(dtype)
    assert all_finite(values)
    values[at] = bad
    assert not all_finite(values)


@pytest.mark.parametrize("said", [False, None])
def test_a_whole_vocabulary_head_is_never_tied_to_the_embedding(tmp_path, tiny_verifier, said):
    config = tiny.draft_config(tiny_verifier, draft_vocab=tiny.VOCAB)
    directory = tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    written = json.loads((directory / "config.json").read_text())
    if said is None:
        del written["tie_word_embeddings"]
        (directory / "config.json").write_text(json.dumps(written))
    trained = load_file(directory / "model.safetensors")["lm_head.weight"]
    draft = load_speculator(directory)
    assert torch.equal(draft.lm_head.weight, trained)
    assert not torch.equal(draft.lm_head.weight, draft.embed_tokens.weight)
    save_speculator(draft, tmp_path / "again")
    assert torch.equal(load_speculator(tmp_path / "again").lm_head.weight, trained)
