"""The speculators-format config: every variant that is met, one internal object."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from speculators_core.config import Eagle3Config, default_aux_layers, read_json
from speculators_core.errors import CheckpointError
from speculators_core.models.eagle3 import Eagle3Draft
from tests import tiny


def values(**changes):
    return {**json.loads(tiny.draft_config("v").to_json()), **changes}


def write(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_config_survives_save_and_load(tmp_path):
    config = tiny.draft_config("v", norm_before_fc=True, norm_output=False)
    (tmp_path / "config.json").write_text(config.to_json())
    assert Eagle3Config.load(tmp_path) == config


def test_every_norm_switch_is_written_explicitly():
    written = json.loads(tiny.draft_config("v", norm_before_residual=False).to_json())
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert isinstance(written[switch], bool), switch


def test_no_null_is_written():
    def nulls(value):
        children = value.values() if isinstance(value, dict) else value
        return value is None or (isinstance(value, dict | list) and any(map(nulls, children)))

    assert not nulls(json.loads(tiny.draft_config("v", aux_layers=None).to_json()))


def layer_of(change):
    layer = dict(values()["transformer_layer_config"])
    change(layer)
    return layer


def old_rope(layer):
    rope = layer.pop("rope_parameters")
    layer |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}


@pytest.mark.parametrize(
    "variant",
    [
        {"transformer_layer_config": layer_of(old_rope)},
        {"transformer_layer_config": layer_of(lambda layer: layer.update(unknown_to_us=1) or None)},
        {"target_hidden_size": None},
        {"torch_dtype": "float32", "dtype": None},
        {"auto_map": {"": "config.X"}, "transformers_version": "4.57.0"},
    ],
    ids=["rope_theta", "further key", "null width", "torch_dtype", "trainer's keys"],
)
def test_variants_of_other_versions_load_to_the_same_object(tmp_path, variant):
    config = values(**variant)
    if config.get("dtype") is None:
        del config["dtype"]
    loaded = Eagle3Config.load(write(tmp_path, config))
    layer = loaded.transformer_layer_config.model_dump()
    layer.pop("unknown_to_us", None)
    assert {**loaded.model_dump(), "transformer_layer_config": layer} == (
        tiny.draft_config("v").model_dump()
    )


def test_unknown_ids_and_a_whole_vocabulary_are_variants_too(tmp_path):
    config = values(eagle_aux_hidden_state_layer_ids=None, draft_vocab_size=tiny.VOCAB)
    loaded = Eagle3Config.load(write(tmp_path, config))
    assert loaded.eagle_aux_hidden_state_layer_ids is None
    assert loaded.num_aux == 3
    assert not loaded.has_vocab_map


def test_scaled_positions_of_transformers_4_are_kept(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0}
    layer = layer_of(old_rope) | {"rope_scaling": scaling}
    loaded = Eagle3Config.load(write(tmp_path, values(transformer_layer_config=layer)))
    rope = loaded.transformer_layer_config.rope_parameters
    assert rope == {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": 257}, "draft_vocab_size"),
        ({"norm_befor_fc": True}, "norm_befor_fc"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "distinct"),
        ({"dtype": "float8"}, "dtype"),
        ({"transformer_layer_config": {"hidden_size": 64}}, "transformer_layer_config"),
        ({"transformer_layer_config": 3}, "transformer_layer_config"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(tmp_path, change, names):
    with pytest.raises(CheckpointError, match=names):
        Eagle3Config.load(write(tmp_path, values(**change)))


def test_a_research_config_is_told_apart(tmp_path, tiny_research):
    with pytest.raises(CheckpointError, match="no speculators_model_type"):
        Eagle3Config.load(tiny_research)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": ' * 100_000, "\udcff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_default_aux_layers_are_refused_where_they_collide():
    assert default_aux_layers(8) == (2, 4, 5)
    assert default_aux_layers(30) == (2, 15, 27)
    with pytest.raises(CheckpointError, match="collide"):
        default_aux_layers(5)


@pytest.mark.parametrize(
    ("norms", "layers", "draft_vocab", "wide", "bias"),
    list(itertools.product(({}, {"norm_before_fc": True}, {"fc_norm": True}), (1, 2), (64, 256),
                           (None, 96), (False, True))),
)  # fmt: skip
def test_tensor_shapes_are_those_of_the_network(norms, layers, draft_vocab, wide, bias):
    config = tiny.draft_config(
        "v", layers=layers, draft_vocab=draft_vocab, target_hidden_size=wide, **norms
    )
    biased = config.transformer_layer_config.model_copy(
        update={"attention_bias": bias, "mlp_bias": bias}
    )
    config = config.model_copy(update={"transformer_layer_config": biased})
    with torch.device("meta"):
        draft = Eagle3Draft(config)
    assert {n: tuple(t.shape) for n, t in draft.state_dict().items()} == config.tensor_shapes()
