"""A speculator that is trained further stays what it is; what contradicts it is an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.checkpoint import EMBEDDING, load_speculator
from speculators_core.data.prepare import load_prepared
from speculators_core.errors import CheckpointError, InputError, PairingError, Stopped
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import TrainParams
from speculators_core.training.draft import build_draft
from speculators_core.training.train import train
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

Build = Callable[..., Eagle3Draft]


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture
def build(verifier: Verifier, tiny_speculator: Path) -> Build:
    """The draft that training would start from; data of another vocabulary than the draft's."""
    kept = torch.arange(tiny.VOCAB) < 100

    def start(longest: int = 8, **changes: object) -> Eagle3Draft:
        values = {"data": "d", "verifier": "v", "start_from": str(tiny_speculator)}
        prepared = SimpleNamespace(kept=kept, lengths=torch.tensor([longest]))
        return build_draft(TrainParams.model_validate({**values, **changes}), verifier, prepared)

    return start


def changed(source: Path, place: Path, layer: dict | None = None, **fields: object) -> Path:
    """A copy of a speculator with other values in its config; None leaves a field out."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text())
    config["transformer_layer_config"] |= layer or {}
    config = {name: value for name, value in (config | fields).items() if value is not None}
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_weights_norms_and_vocabulary_are_the_speculators_own(
    build: Build, tiny_speculator: Path
) -> None:
    earlier, draft = load_speculator(tiny_speculator), build()
    assert all(torch.equal(draft.state_dict()[n], t) for n, t in earlier.state_dict().items())
    assert draft.config.norm_output is earlier.config.norm_output
    assert draft.config.transformer_layer_config == earlier.config.transformer_layer_config
    assert draft.config.eagle_aux_hidden_state_layer_ids == list(tiny.AUX_LAYERS)
    assert draft.config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    trainable = {name for name, _ in draft.trainable()}
    assert trainable == {n for n, _ in draft.named_parameters()} - {EMBEDDING}


@pytest.mark.parametrize(
    ("option", "asked", "own"),
    [
        ("num_layers", 2, 1),
        ("layer_type", "qwen3", "llama"),
        ("norm_before_residual", False, True),
        ("norm_before_fc", True, False),
        ("fc_norm", True, False),
        ("norm_output", False, True),
        ("aux_layers", (1, 4, 5), [2, 4, 5]),
    ],
)
def test_an_option_that_contradicts_it_is_an_error(
    build: Build, option: str, asked: object, own: object
) -> None:
    said = list(asked) if isinstance(asked, tuple) else asked
    with pytest.raises(InputError) as caught:
        build(**{option: asked})
    assert caught.value.message == (f"{option} is {said}, the speculator to start from has {own}")
    assert caught.value.where == option


def test_options_that_say_the_same_are_taken(build: Build) -> None:
    build(
        num_layers=1, layer_type="llama", norm_before_residual=True, fc_norm=False,
        norm_output=True, aux_layers=(5, 2, 4),
    )  # fmt: skip


def test_a_head_from_the_verifier_would_undo_it() -> None:
    with pytest.raises(ValueError, match="would undo the head of start_from"):
        TrainParams(data="d", verifier="v", start_from="s", lm_head_from_verifier=True)


def test_aux_layers_that_it_does_not_say_have_to_be_named(
    build: Build, tiny_speculator: Path, tmp_path: Path
) -> None:
    silent = changed(tiny_speculator, tmp_path / "s", eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(CheckpointError, match="aux_layers should name 3, found none"):
        build(start_from=str(silent))
    with pytest.raises(CheckpointError, match=r"aux_layers should name 3, found \[2, 4\]"):
        build(start_from=str(silent), aux_layers=(2, 4))
    draft = build(start_from=str(silent), aux_layers=(3, 1, 6))
    assert draft.config.eagle_aux_hidden_state_layer_ids == [1, 3, 6]


def test_another_verifiers_speculator_is_refused(build: Build, tmp_path: Path) -> None:
    for name, config, why in (
        ("h", tiny.draft_config("v", target_hidden_size=96), "hidden size 96, this one has 64"),
        ("v", tiny.draft_config("v", vocab=300), "vocabulary 300, this one has 256"),
        ("a", tiny.draft_config("v", aux_layers=(2, 4, 9)), "aux layer 9 is out of range"),
    ):
        place = tmp_path / name
        place.mkdir()
        (place / "config.json").write_text(config.to_json())
        with pytest.raises(PairingError, match=why):
            build(start_from=str(place))


def test_a_tensor_of_another_shape_is_named(
    build: Build, tiny_speculator: Path, tmp_path: Path
) -> None:
    broken = changed(tiny_speculator, tmp_path / "s")
    file = broken / "model.safetensors"
    save_file({**load_file(file), "fc.weight": torch.ones(64, 64)}, file)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[64, 64\], expected"):
        build(start_from=str(broken))


@torch.no_grad()
def test_a_vocabulary_in_another_order_becomes_ascending_and_proposes_the_same(
    build: Build, tiny_speculator: Path, tmp_path: Path
) -> None:
    """Model-Optimizer orders its map by frequency; targets are taken in ascending order."""
    mixed = changed(tiny_speculator, tmp_path / "s")
    tensors = load_file(mixed / "model.safetensors")
    order = torch.randperm(tiny.DRAFT_VOCAB, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(tiny.DRAFT_VOCAB) + tensors["d2t"])[order]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ids - torch.arange(tiny.DRAFT_VOCAB)
    save_file(tensors, mixed / "model.safetensors")
    earlier, draft = load_speculator(mixed), build(start_from=str(mixed))
    assert torch.equal(draft.to_verifier_ids(torch.arange(tiny.DRAFT_VOCAB)), ids.sort().values)
    states = torch.randn(20, tiny.HIDDEN)
    chosen, before = (
        one.to_verifier_ids(one.logits(states).argmax(-1)) for one in (draft, earlier)
    )
    assert torch.equal(chosen, before)


def test_an_embedding_of_its_own_is_kept_and_never_shared_away(
    build: Build, tiny_speculator: Path, tmp_path: Path, verifier: Verifier
) -> None:
    shared = build(embedding="shared")
    assert shared.shares_embedding
    assert shared.embed_tokens.weight.data_ptr() == verifier.embedding.data_ptr()
    own = changed(tiny_speculator, tmp_path / "s")
    tensors = load_file(own / "model.safetensors")
    table = tensors[EMBEDDING] = tensors[EMBEDDING] + 1
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(InputError, match="has an embedding of its own"):
        build(start_from=str(own), embedding="shared")
    for how in ("frozen", "trained"):
        draft = build(start_from=str(own), embedding=how)
        assert torch.equal(draft.embed_tokens.weight, table) and not draft.shares_embedding
    del tensors[EMBEDDING]
    save_file(tensors, own / "model.safetensors")
    for how in ("frozen", "trained", "shared"):
        draft = build(start_from=str(own), embedding=how)
        assert torch.equal(draft.embed_tokens.weight, verifier.embedding)
        assert draft.shares_embedding == (how == "shared")


def test_chats_longer_than_its_window_are_refused(
    build: Build, tiny_speculator: Path, tmp_path: Path
) -> None:
    window = {"sliding_window": 32, "layer_types": ["sliding_attention"]}
    looks_back = changed(
        tiny_speculator, tmp_path / "s", layer=window, architectures=["Eagle3Speculator"]
    )
    draft = build(longest=32, start_from=str(looks_back))
    assert draft.config.architectures == ["Eagle3DraftModel"]
    assert draft.config.transformer_layer_config.model_extra == window
    with pytest.raises(PairingError, match="looks back over 32 tokens, the longest chat has 33"):
        build(longest=33, start_from=str(looks_back))


def test_training_goes_on_from_where_it_was(
    tmp_path: Path, tiny_verifier: Path, tiny_speculator: Path
) -> None:
    """With the speculator's vocabulary, whatever the data's; a resumed run wants the same one."""
    data = prepare_chats(tmp_path, tiny_verifier, count=12)
    earlier = changed(tiny_speculator, tmp_path / "s")
    values = {
        "data": str(data), "verifier": str(tiny_verifier), "start_from": str(earlier),
        "epochs": 1, "tokens_per_batch": 256, "lr": 1e-5, "evaluate_every": 0, "save_every": 1,
    }  # fmt: skip
    params, listener = TrainParams.model_validate(values), Listener()
    train(params, tmp_path / "t", listener)
    before, after = (load_speculator(tmp_path / name) for name in "st")
    assert torch.equal(before.kept, after.kept)
    assert not torch.equal(before.kept, load_prepared(data).kept)
    assert any("draft vocabulary of 64 tokens covers" in note for note in listener.notes)
    for name, tensor in before.named_parameters():
        moved = (after.state_dict()[name] - tensor).abs().max()
        assert (moved == 0) if name == EMBEDDING else (0 < moved < 1e-3), name
    with pytest.raises(Stopped):
        train(params, tmp_path / "u", Listener(lambda listener: listener.asked > 3))
    file = earlier / "model.safetensors"
    save_file({n: t + 1 if n == "fc.weight" else t for n, t in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="other parameters or data"):
        train(params, tmp_path / "u", resume=tmp_path / "u.checkpoints")
