"""The draft that training starts from: layers, embedding, head; and what of it training changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, CohereConfig, Gemma3TextConfig, GraniteConfig

from speculators_core.checkpoint import EMBEDDING, load_speculator
from speculators_core.conversion.convert import convert
from speculators_core.conversion.export import export
from speculators_core.decode.eagle import load_eagle
from speculators_core.models.verifier import load_verifier
from speculators_core.params import ConvertParams, ExportParams, TrainParams
from speculators_core.training.draft import build_draft
from speculators_core.training.train import train
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("data"), tiny_verifier, count=12)


@pytest.fixture
def run(data: Path, tiny_verifier: Path, tmp_path: Path) -> Run:
    """Train a little: the directory that was written."""

    def start(name: str, listener: Listener | None = None, **changes: object) -> Path:
        values = {
            "data": str(data),
            "verifier": str(tiny_verifier),
            "aux_layers": tiny.AUX_LAYERS,
            "epochs": 1,
            "tokens_per_batch": 256,
            "evaluate_every": 0,
        }
        train(TrainParams.model_validate({**values, **changes}), tmp_path / name, listener)
        return tmp_path / name

    return start


def params(**changes: object) -> TrainParams:
    values = {"data": "d", "verifier": "v", "aux_layers": tiny.AUX_LAYERS, "evaluate_every": 0}
    return TrainParams.model_validate({**values, **changes})


def of_tokens(kept: torch.Tensor) -> SimpleNamespace:
    """What of a prepared data set a new draft needs."""
    return SimpleNamespace(kept=kept, lengths=torch.tensor([8]))


def half(vocab: int) -> torch.Tensor:
    return torch.arange(vocab) % 2 == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_qwen3_layers_learn(run: Run, layers: int) -> None:
    """C6: finite and falling, whatever the number of layers."""
    listener = Listener()
    written = run("s", listener, layer_type="qwen3", num_layers=layers, epochs=2, lr=1e-2)
    losses = [v["loss"] for v in listener.steps.values() if "loss" in v]
    assert len(losses) >= 2 and all(torch.isfinite(torch.tensor(losses)))
    assert losses[-1] < 0.9 * losses[0]
    draft = load_speculator(written)
    assert draft.config.transformer_layer_config.model_type == "qwen3"
    for layer in draft.layers:
        norm = layer.self_attn.q_norm.weight
        assert norm.shape == (tiny.HEAD_DIM,) and not torch.equal(norm, torch.ones_like(norm))


@pytest.mark.parametrize("embedding", ["frozen", "shared", "trained"])
def test_only_a_trained_embedding_has_a_gradient(tiny_verifier: Path, embedding: str) -> None:
    verifier = load_verifier(tiny_verifier)
    draft = build_draft(params(embedding=embedding), verifier, of_tokens(half(tiny.VOCAB)))
    aux = torch.randn(1, 8, 3 * tiny.HIDDEN)
    normed, _ = draft.step(
        torch.arange(8)[None],
        draft.combine(aux),
        torch.arange(8)[None],
        lambda _layer, q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )
    draft.logits(normed).logsumexp(-1).sum().backward()
    table = draft.embed_tokens.weight
    assert (table.grad is not None) == (embedding == "trained")
    assert (table.data_ptr() == verifier.embedding.data_ptr()) == (embedding == "shared")
    assert all(p.grad is not None for _, p in draft.trainable())
    assert draft.config.embed_requires_grad == (embedding == "trained")


def test_a_shared_embedding_is_not_written_and_changes_nothing_else(
    run: Run, tiny_verifier: Path
) -> None:
    shared, frozen = (run(how, embedding=how) for how in ("shared", "frozen"))
    written, whole = (load_file(d / "model.safetensors") for d in (shared, frozen))
    assert torch.equal(whole.pop(EMBEDDING), tiny.embedding_of(tiny_verifier))
    assert written.keys() == whole.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in whole.items())
    drafter = load_eagle(shared, load_verifier(tiny_verifier))
    assert torch.equal(drafter.draft.embed_tokens.weight, tiny.embedding_of(tiny_verifier))


def test_a_trained_embedding_is_written_as_trained(run: Run, tiny_verifier: Path) -> None:
    listener = Listener()
    written = run("s", listener, embedding="trained")
    draft = load_speculator(written, embedding=tiny.embedding_of(tiny_verifier))
    assert not torch.equal(draft.embed_tokens.weight, tiny.embedding_of(tiny_verifier))
    assert draft.embed_tokens.weight.requires_grad and not draft.shares_embedding
    assert "frozen: " in listener.notes


def test_a_head_of_the_whole_vocabulary_is_its_own_after_reload(
    tmp_path: Path, tied_verifier: Path
) -> None:
    """A12: nothing ties it to the embedding, here or in speculators, and no map is written."""
    data = prepare_chats(tmp_path, tied_verifier, count=12, draft_vocab_size=None)
    values = {"data": str(data), "verifier": str(tied_verifier), "epochs": 1}
    train(params(**values), tmp_path / "s")
    written = load_file(tmp_path / "s" / "model.safetensors")
    assert not written.keys() & {"d2t", "t2d"}
    head = written["lm_head.weight"]
    assert head.shape == (tiny.VOCAB, tiny.HIDDEN)
    assert torch.equal(written[EMBEDDING], tiny.embedding_of(tied_verifier))
    assert not torch.equal(head, written[EMBEDDING])
    draft = load_speculator(tmp_path / "s")
    assert torch.equal(draft.lm_head.weight, head) and bool(draft.kept.all())
    assert torch.equal(draft.to_verifier_ids(torch.arange(5)), torch.arange(5))
    peer = pytest.importorskip("speculators", reason="speculators 0.9.0 is not installed")
    theirs = peer.SpeculatorModel.from_pretrained(str(tmp_path / "s"))
    assert torch.equal(theirs.lm_head.weight, head)
    assert torch.equal(theirs.embed_tokens.weight, written[EMBEDDING])


def test_a_narrow_draft_is_imported_trained_exported_and_read_again(tmp_path: Path) -> None:
    """A19: verifier 96 wide, draft 64, with an embedding of its own."""
    verifier = tiny.build_verifier(tmp_path / "v", hidden=96)
    source = tiny.build_research(tmp_path / "r", verifier, embedding=True, safetensors=True)
    imported = ConvertParams(
        checkpoint=str(source), verifier=str(verifier), validate_on_verifier=False,
        aux_layers=tiny.AUX_LAYERS, dtype="float32",
    )  # fmt: skip
    convert(imported, tmp_path / "s")
    data = prepare_chats(tmp_path, verifier, count=6)
    values = {"data": str(data), "verifier": str(verifier), "start_from": str(tmp_path / "s")}
    train(params(**values, aux_layers=None, epochs=1, tokens_per_batch=4096), tmp_path / "t")
    before, after = (load_speculator(tmp_path / name) for name in "st")
    assert after.config.target_hidden_size == 96 and after.config.hidden_size == 64
    assert torch.equal(before.embed_tokens.weight, after.embed_tokens.weight)
    assert not torch.equal(before.fc.weight, after.fc.weight)
    export(ExportParams(speculator=str(tmp_path / "t"), format="specforge"), tmp_path / "e")
    convert(imported.model_copy(update={"checkpoint": str(tmp_path / "e")}), tmp_path / "again")
    again = load_speculator(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in after.state_dict().items())


COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "gemma3": Gemma3TextConfig(**COMMON),  # 1 + weight, tied, the embedding times sqrt(H)
    "granite": GraniteConfig(**COMMON, logits_scaling=4.0, embedding_multiplier=6.0),
    "cohere": CohereConfig(**COMMON, logit_scale=0.25),  # a layer norm, tied
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_norm_and_head_start_as_the_familys_own(tmp_path: Path, family: str) -> None:
    """From the verifier's last state the new draft's norm and head give the verifier's logits, and
    its embedding is the bare table, which the input norm takes for the same as a scaled one."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).float().eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(tmp_path / "v")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "v")
    verifier = load_verifier(tmp_path / "v")
    kept = half(64)
    draft = build_draft(params(aux_layers=(1, 2, 3)), verifier, of_tokens(kept))
    ids = torch.arange(12)[None]
    final = verifier.states(ids, [6])[6]
    if family == "cohere":
        final = final - final.mean(-1, keepdim=True)
    theirs = verifier.model(ids).logits[..., kept]
    assert theirs.std() > 0.05
    torch.testing.assert_close(draft.logits(draft.norm(final)), theirs, atol=2e-4, rtol=1e-3)
    table = draft.embed_tokens.weight
    assert torch.equal(table, verifier.model.get_input_embeddings().weight)
    norm = draft.layers[0].input_layernorm
    torch.testing.assert_close(norm(table), norm(table * 32**0.5), atol=1e-4, rtol=1e-4)
