"""What is known of a verifier before it is loaded."""

from __future__ import annotations

import json
import shutil

import pytest

from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import read_verifier, tokenizer_fingerprint
from tests import tiny


@pytest.fixture
def with_config(tmp_path, tiny_verifier):
    """A directory that holds only a config: the tiny verifier's, changed."""

    def build(**changes):
        values = json.loads((tiny_verifier / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return build


def test_the_numbers_are_those_of_the_model(tiny_verifier, tied_verifier):
    facts = read_verifier(tiny_verifier)
    assert (facts.num_hidden_layers, facts.hidden_size) == (tiny.LAYERS, tiny.HIDDEN)
    assert (facts.vocab_size, facts.head_dim) == (tiny.VOCAB, tiny.HEAD_DIM)
    assert facts.architectures == ["LlamaForCausalLM"]
    assert not facts.tie_word_embeddings
    assert read_verifier(tied_verifier).tie_word_embeddings


def test_what_a_config_may_leave_out_is_derived(with_config):
    facts = read_verifier(with_config(head_dim=None, num_key_value_heads=None))
    assert facts.head_dim == tiny.HIDDEN // tiny.HEADS
    assert facts.num_key_value_heads == tiny.HEADS


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            {"rope_theta": 1e6, "rope_type": "default"},
        ),
        ({}, {"rope_theta": 1e4, "rope_type": "default"}),
    ],
)
def test_rotary_positions_of_every_version_read_the_same(with_config, rope, expected):
    assert read_verifier(with_config(**{"rope_parameters": None, **rope})).rope_parameters == (
        expected
    )


def test_the_text_model_of_a_wrapper_is_found(tmp_path, tiny_verifier):
    text = json.loads((tiny_verifier / "config.json").read_text())
    outer = {"architectures": ["Wrapper"], "model_type": "wrapper", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    facts = read_verifier(tmp_path)
    assert facts.architectures == ["Wrapper"]
    assert facts.vocab_size == tiny.VOCAB


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "64", True])
def test_a_number_that_cannot_be_right_is_named(with_config, field, value):
    with pytest.raises(CheckpointError, match=f"{field} should be an? (positive )?integer"):
        read_verifier(with_config(**{field: value}))


def test_a_draft_in_the_verifiers_place_is_refused(tiny_speculator, tiny_research):
    for draft in (tiny_speculator, tiny_research):
        with pytest.raises(CheckpointError, match="this is a draft, not a verifier"):
            read_verifier(draft)


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        read_verifier(tmp_path / "nothing")


def test_tokenizers_are_told_apart_by_their_files(tmp_path, tiny_verifier):
    copy = shutil.copytree(tiny_verifier, tmp_path / "copy")
    assert tokenizer_fingerprint(copy) == tokenizer_fingerprint(tiny_verifier)
    (copy / "tokenizer.json").write_text("{}")
    assert tokenizer_fingerprint(copy) != tokenizer_fingerprint(tiny_verifier)
    (copy / "tokenizer.json").unlink()
    assert tokenizer_fingerprint(copy) is None
