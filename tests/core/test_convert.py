"""Conversion: exact, atomic, never guessing, and tried on its verifier."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators_core.checkpoint import load_speculator, save_speculator
from speculators_core.config import Eagle3Config
from speculators_core.conversion.convert import convert
from speculators_core.conversion.validate import answer_prompts, first_token_acceptance
from speculators_core.data.samples import trained_counts
from speculators_core.errors import CheckpointError, Conflict, PairingError, Stopped
from speculators_core.models.verifier import load_verifier
from speculators_core.params import ConvertParams
from tests import tiny
from tests.core.small_data import prepare_chats


class Listener:
    def __init__(self, stop_at=1.0):
        self.notes, self.fraction, self.stop_at = [], 0.0, stop_at

    def update(self, fraction, text, eta_s=None):
        self.fraction = fraction

    def metrics(self, step, values):
        raise AssertionError("a conversion has no metrics")

    def note(self, text):
        self.notes.append(text)

    def stopping(self):
        return self.fraction >= self.stop_at


def params(checkpoint, verifier, **more):
    more.setdefault("validate_on_verifier", False)
    return ConvertParams(checkpoint=str(checkpoint), verifier=str(verifier), **more)


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.fixture(scope="module")
def research(tmp_path_factory, tiny_verifier):
    """The tiny research checkpoint as safetensors (listing a pickle takes another process), with
    a seed whose random weights are right now and then.
    """
    directory = tmp_path_factory.mktemp("convert") / "research"
    return tiny.build_research(directory, tiny_verifier, seed=9, safetensors=True)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, research, tiny_verifier):
    """The tiny research checkpoint, converted and validated: result, directory, what was said."""
    output, listener = tmp_path_factory.mktemp("convert") / "converted", Listener()
    asked = params(research, tiny_verifier, aux_layers=tiny.AUX_LAYERS, validate_on_verifier=True)
    return convert(asked, output, listener), output, listener


def test_the_result_says_where_what_and_whether(converted):
    result, output, listener = converted
    assert set(result.model_dump()) >= {"output", "report", "validation", "deployable", "doubts"}
    assert result.output == str(output)
    assert result.deployable
    assert result.validation.ok
    assert 0.0 <= result.validation.first_token_acceptance <= 1.0
    assert "Validation succeeded" in listener.notes
    assert listener.fraction == 1.0


def test_the_report_accounts_for_every_tensor(converted, research):
    result, _, _ = converted
    report = json.loads(Path(result.report).read_text())
    sources = set(load_file(research / "model.safetensors"))
    assert {row["source"] for row in report["tensors"]} - {None} == sources
    assert all(row["reason"] for row in report["tensors"])
    assert report["validation"]["ok"] is True
    assert report["verifier"]["tokenizer_fingerprint"]


def test_nothing_but_the_verifier_field_names_a_path_of_this_machine(converted, tiny_verifier):
    _, output, _ = converted
    for name in ("README.md", "conversion_report.json"):
        assert str(tiny_verifier.parent) not in (output / name).read_text(), name


def test_the_card_says_how_to_serve_it(converted):
    _, output, _ = converted
    card = (output / "README.md").read_text()
    assert '"method": "eagle3"' in card
    assert "[2, 4, 5]" in card


def test_every_norm_switch_is_explicit_and_the_residual_is_not_normed(converted):
    """A11"""
    _, output, _ = converted
    config = config_of(output)
    assert config["norm_before_residual"] is False
    assert [config[s] for s in ("norm_before_fc", "fc_norm", "norm_output")] == [False] * 3


def test_a_parameter_outranks_the_layout(tmp_path, research, tiny_verifier):
    asked = params(research, tiny_verifier, norm_before_residual=True, speculative_tokens=7)
    convert(asked, tmp_path / "out")
    config = Eagle3Config.load(tmp_path / "out")
    assert config.norm_before_residual
    assert config.speculative_tokens == 7


def test_unknown_aux_layers_are_measured_but_never_chosen(tmp_path, research, tiny_verifier):
    asked = params(research, tiny_verifier, validate_on_verifier=True)
    result = convert(asked, tmp_path / "out", Listener())
    assert not result.deployable
    assert result.validation.first_token_acceptance is None
    assert all(c.first_token_acceptance is not None for c in result.doubts[0].choices)
    assert "eagle_aux_hidden_state_layer_ids" not in config_of(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Before it is served" in card and "vllm serve" not in card
    assert "- Validation: none: the aux layers must be settled first" in card


def test_output_ids_are_written_as_states_after_layers(tmp_path, research, tiny_verifier):
    asked = params(research, tiny_verifier, aux_layers=(1, 3, 4), aux_convention="output")
    assert convert(asked, tmp_path / "out").deployable
    assert config_of(tmp_path / "out")["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        ((2, 4), CheckpointError, "2 aux layers are named"),
        ((4, 2, 5), CheckpointError, "ascending"),
        ((2, 4, 9), PairingError, "aux layer 9 is out of range"),
    ],
)
def test_aux_layers_that_cannot_be_right_are_refused(
    tmp_path, research, tiny_verifier, layers, error, message
):
    with pytest.raises(error, match=message):
        convert(params(research, tiny_verifier, aux_layers=layers), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_speculators_draft_stripped_of_its_ids_is_held_back_until_they_are_chosen(
    tmp_path, tiny_speculator, tiny_verifier
):
    """A6"""
    stripped = shutil.copytree(tiny_speculator, tmp_path / "stripped")
    config = config_of(stripped)
    del config["eagle_aux_hidden_state_layer_ids"]
    (stripped / "config.json").write_text(json.dumps(config))
    assert not convert(params(stripped, tiny_verifier), tmp_path / "open").deployable
    settled = convert(params(stripped, tiny_verifier, aux_layers=(1, 4, 6)), tmp_path / "settled")
    assert settled.deployable
    again = load_speculator(tmp_path / "settled")
    assert again.config.eagle_aux_hidden_state_layer_ids == [1, 4, 6]
    assert again.config.norm_before_residual


def test_a_speculators_draft_without_its_residual_switch_is_a_doubt(
    tmp_path, tiny_speculator, tiny_verifier
):
    silent = shutil.copytree(tiny_speculator, tmp_path / "silent")
    config = config_of(silent)
    del config["norm_before_residual"]
    (silent / "config.json").write_text(json.dumps(config))
    result = convert(params(silent, tiny_verifier, validate_on_verifier=True), tmp_path / "open")
    assert [doubt.about for doubt in result.doubts] == ["norm_before_residual"]
    assert all(c.first_token_acceptance is not None for c in result.doubts[0].choices)
    assert not result.deployable


def test_either_side_of_the_vocabulary_map_restores_the_other(tmp_path, tiny_verifier, research):
    whole = load_file(research / "model.safetensors")
    for missing in ("d2t", "t2d"):
        half = tiny.build_research(
            tmp_path / f"no-{missing}", tiny_verifier, seed=9, safetensors=True, drop=(missing,)
        )
        convert(params(half, tiny_verifier), tmp_path / missing)
        written = load_file(tmp_path / missing / "model.safetensors")
        assert torch.equal(written[missing], whole[missing])


def test_a_narrow_draft_keeps_its_own_embedding_trains_and_reloads(tmp_path):
    verifier = tiny.build_verifier(tmp_path / "wide", hidden=96)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing.*96 wide"):
        bare = tiny.build_research(tmp_path / "bare", verifier, safetensors=True)
        convert(params(bare, verifier), tmp_path / "out")
    research = tiny.build_research(tmp_path / "narrow", verifier, embedding=True, safetensors=True)
    asked = params(research, verifier, aux_layers=tiny.AUX_LAYERS, validate_on_verifier=True)
    assert convert(asked, tmp_path / "out").validation.first_token_acceptance is not None
    draft = load_speculator(tmp_path / "out", dtype=torch.float32)
    assert draft.config.verifier_hidden_size == 96
    draft.fc.weight.data -= 0.5  # what a training step does to it
    save_speculator(draft, tmp_path / "again")
    again = load_speculator(tmp_path / "again", dtype=torch.float32)
    assert torch.allclose(again.fc.weight, draft.fc.weight, atol=1e-3)


def test_a_draft_that_is_never_right_fails_validation_and_stays(tmp_path, tiny_verifier):
    said = {int(t) for one in answer_prompts(load_verifier(tiny_verifier)) for t in one.ids[0]}
    unsaid = [token for token in range(tiny.VOCAB) if token not in said][:32]
    kept = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    kept[unsaid] = True
    config = tiny.draft_config(tiny_verifier, draft_vocab=len(unsaid))
    draft = load_speculator(tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config))
    draft.set_vocab_map(kept)
    save_speculator(draft, tmp_path / "blind")
    listener = Listener(stop_at=2.0)
    asked = params(tmp_path / "blind", tiny_verifier, validate_on_verifier=True)
    result = convert(asked, tmp_path / "out", listener)
    assert (result.validation.ok, result.validation.first_token_acceptance) == (False, 0.0)
    assert result.validation.failed == ["first-token acceptance is exactly 0 over all 6 prompts"]
    assert not result.deployable
    assert "Validation succeeded" not in listener.notes
    assert listener.notes[-1].startswith("Validation failed: first-token acceptance is exactly 0")
    assert json.loads(Path(result.report).read_text())["validation"]["ok"] is False
    assert "exactly 0 over all 6 prompts" in (tmp_path / "out" / "README.md").read_text()


def test_a_verifier_known_by_its_config_alone_is_said_not_to_have_been_run(
    tmp_path, tiny_speculator, tiny_verifier
):
    (tmp_path / "v").mkdir()
    shutil.copy(tiny_verifier / "config.json", tmp_path / "v")
    listener = Listener(stop_at=2.0)
    asked = params(tiny_speculator, tmp_path / "v", validate_on_verifier=True)
    result = convert(asked, tmp_path / "out", listener)
    assert (result.validation.ok, result.validation.failed) == (None, [])
    assert "weights are not at hand" in result.validation.note
    assert any(note.startswith("Not validated: the verifier's weights") for note in listener.notes)
    assert result.deployable


def test_a_verifier_that_git_lfs_has_not_fetched_is_said_so(
    tmp_path, tiny_speculator, tiny_verifier
):
    clone = shutil.copytree(tiny_verifier, tmp_path / "clone")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (clone / "model.safetensors").write_text(pointer)
    asked = params(tiny_speculator, clone, validate_on_verifier=True)
    with pytest.raises(CheckpointError, match="pointer of Git LFS"):
        convert(asked, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_the_hash_of_a_large_source_is_told_with_validation_or_when_asked_for(
    tmp_path, research, tiny_verifier, monkeypatch
):
    monkeypatch.setattr("speculators_core.conversion.convert._HASHED_BYTES", 10)
    for asked, told in ((False, False), (True, True)):
        place = tmp_path / str(asked)
        convert(params(research, tiny_verifier, hash_source=asked), place)
        report = json.loads((place / "conversion_report.json").read_text())
        assert (report["source"]["files"]["model.safetensors"]["sha256"] is not None) is told
        card = (place / "README.md").read_text()
        assert ("sha256" in card) is told
        assert ("not hashed" in card) is not told


def test_the_card_tells_coverage_or_how_to_measure_it(tmp_path, converted, research, tiny_verifier):
    _, output, _ = converted
    card = (output / "README.md").read_text()
    assert "Coverage: not known" in card and "speclab convert --data" in card
    data = prepare_chats(tmp_path, tiny_verifier, count=4)
    convert(params(research, tiny_verifier, data=str(data)), tmp_path / "measured")
    report = json.loads((tmp_path / "measured" / "conversion_report.json").read_text())
    counts = trained_counts(data)
    share = counts[load_file(research / "model.safetensors")["t2d"].numpy()].sum() / counts.sum()
    assert report["coverage"] == {
        "share": pytest.approx(share), "of": f"{counts.sum()} answer tokens in prepared"
    }  # fmt: skip
    assert f"Coverage: {share:.2%} of" in (tmp_path / "measured" / "README.md").read_text()
    convert(params(tmp_path / "measured", tiny_verifier), tmp_path / "again")  # its report knows it
    assert f"Coverage: {share:.2%} of" in (tmp_path / "again" / "README.md").read_text()


def test_coverage_of_another_vocabulary_is_not_measured(tmp_path, tiny_verifier):
    other = tiny.build_verifier(tmp_path / "other", vocab=260)
    data = prepare_chats(tmp_path, tiny_verifier, count=4)
    draft = tiny.build_research(tmp_path / "draft", other, safetensors=True)
    with pytest.raises(PairingError, match="prepared for a vocabulary of 256 tokens"):
        convert(params(draft, other, data=str(data)), tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_base_in_doubt_is_measured_both_ways(tmp_path):
    verifier = tiny.build_verifier(tmp_path / "long", rope_theta=1e6)
    research = tiny.build_research(
        tmp_path / "r", verifier, config_changes={"rope_theta": None}, safetensors=True
    )
    asked = params(research, verifier, aux_layers=tiny.AUX_LAYERS, validate_on_verifier=True)
    (doubt,) = convert(asked, tmp_path / "out", Listener(stop_at=2.0)).doubts
    assert doubt.chosen == 0
    assert [c.params for c in doubt.choices] == [{"rope_theta": 1e6}, {"rope_theta": 1e4}]
    assert all(c.first_token_acceptance is not None for c in doubt.choices)


def test_a_missing_rotary_base_comes_from_the_verifier(tmp_path):
    verifier = tiny.build_verifier(tmp_path / "long", rope_theta=1e6)
    silent = tiny.build_research(
        tmp_path / "research", verifier, config_changes={"rope_theta": None}, safetensors=True
    )
    result = convert(params(silent, verifier, aux_layers=tiny.AUX_LAYERS), tmp_path / "out")
    rope = config_of(tmp_path / "out")["transformer_layer_config"]["rope_parameters"]
    assert rope["rope_theta"] == 1e6
    assert result.deployable
    assert result.doubts[0].chosen == 0


def test_a_nested_verifier_config_and_a_whole_vocabulary_fit(tmp_path, tiny_verifier):
    """A13"""
    nested = shutil.copytree(tiny_verifier, tmp_path / "nested")
    text = config_of(tiny_verifier)
    (nested / "config.json").write_text(
        json.dumps({"architectures": ["Llama4ForConditionalGeneration"], "text_config": text})
    )
    whole = tiny.build_research(
        tmp_path / "r",
        tiny_verifier,
        draft_vocab=tiny.VOCAB,
        config_changes={"vocab_size": None},
        safetensors=True,
    )
    convert(params(whole, nested, aux_layers=tiny.AUX_LAYERS), tmp_path / "out")
    config = Eagle3Config.load(tmp_path / "out")
    assert config.vocab_size == tiny.VOCAB
    assert not config.has_vocab_map
    assert config.speculators_config.verifier.architectures == ["Llama4ForConditionalGeneration"]


def rewrite(source, target, change):
    copy = shutil.copytree(source, target)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["fc.weight"].fill_(float("nan")), r"fc\.weight holds NaN"),
        (lambda t: t["d2t"].add_(torch.arange(64) + 200), "outside the verifier's vocabulary"),
        (lambda t: t["t2d"].logical_not_(), "must be the same"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing"),
    ],
)
def test_a_bad_tensor_stops_the_conversion_and_leaves_nothing(
    tmp_path, research, tiny_verifier, change, message
):
    bad = rewrite(research, tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=message):
        convert(params(bad, tiny_verifier), tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_in_a_pickle_runs(tmp_path, research, tiny_verifier):
    """A23"""
    trace = tmp_path / "was-here"
    copy = shutil.copytree(research, tmp_path / "r")
    (copy / "model.safetensors").unlink()
    torch.save({"fc.weight": Bomb(trace)}, copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="run code that it carries"):
        convert(params(copy, tiny_verifier), tmp_path / "out")
    assert not trace.exists()
    assert not (tmp_path / "out").exists()


def test_swapped_and_doubled_paths_are_refused(tmp_path, research, tiny_verifier):
    """A25"""
    with pytest.raises(CheckpointError, match=r"no fc\.weight and no d2t found"):
        convert(params(tiny_verifier, tiny_verifier), tmp_path / "out")
    with pytest.raises(CheckpointError, match="this is a draft, not a verifier"):
        convert(params(research, research), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_verifier_of_another_vocabulary_is_refused(tmp_path, research):
    """A20"""
    other = tiny.build_verifier(tmp_path / "other", vocab=260)
    with pytest.raises(PairingError, match="vocabulary 256, this one has 260"):
        convert(params(research, other), tmp_path / "out")


def test_an_existing_output_is_left_alone(tmp_path, research, tiny_verifier):
    (tmp_path / "out").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        convert(params(research, tiny_verifier), tmp_path / "out")


def test_a_stop_leaves_nothing(tmp_path, research, tiny_verifier):
    with pytest.raises(Stopped):
        convert(params(research, tiny_verifier), tmp_path / "out", Listener(stop_at=0.2))
    assert list(tmp_path.iterdir()) == []


def test_a_draft_that_copies_its_verifier_is_measured_as_accepting(tmp_path, tiny_verifier):
    """A draft built to be right must measure 1.0, whatever way rows and tokens are aligned.

    The verifier's layers are silenced, so that its next token depends on the newest token alone;
    the draft is given the same rule through its attention.
    """
    verifier = load_verifier(tiny_verifier)
    with torch.no_grad():  # layers that do nothing: the state is the newest token's embedding
        for layer in verifier.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    config = tiny.draft_config(
        tiny_verifier, draft_vocab=tiny.VOCAB, norm_before_residual=True, norm_output=False
    )
    draft = load_speculator(
        tiny.build_speculator(tmp_path / "s", tiny_verifier, config=config)
    )  # fmt: skip
    oracle(draft, verifier)
    answered = answer_prompts(verifier)
    assert first_token_acceptance(draft, verifier, answered, (2, 4, 5)) == 1.0
    draft.lm_head.weight.data = draft.lm_head.weight.flip(0)
    assert first_token_acceptance(draft, verifier, answered, (2, 4, 5)) < 0.2


def oracle(draft, verifier):
    """Attention to oneself carries the newest token's normed embedding; all else is silent."""
    layer, hd = draft.layers[0], tiny.HIDDEN
    with torch.no_grad():
        draft.fc.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layer.input_layernorm.weight.fill_(1.0)
        layer.hidden_norm.weight.fill_(1.0)
        draft.norm.weight.copy_(verifier.final_norm.weight)
        draft.lm_head.weight.copy_(verifier.lm_head)
        attention = layer.self_attn
        # kv heads repeat over query heads: head 0 carries dims 0..31, head 2 dims 32..63
        attention.v_proj.weight.zero_()
        attention.v_proj.weight[:, :hd] = torch.eye(hd)
        attention.o_proj.weight.zero_()
        for kv in range(tiny.KV_HEADS):
            rows = slice(kv * 32, kv * 32 + 32)
            first = kv * (tiny.HEADS // tiny.KV_HEADS) * 32
            attention.o_proj.weight[rows, first : first + 32] = torch.eye(32)
        # equal q and k that grow with the token: each attends to its own kind, sharply
        for proj in (attention.q_proj, attention.k_proj):
            proj.weight.zero_()
        sharp = torch.randn(32, hd, generator=torch.Generator().manual_seed(0)) * 4
        for head in range(tiny.HEADS):
            attention.q_proj.weight[head * 32 : head * 32 + 32, :hd] = sharp
        for head in range(tiny.KV_HEADS):
            attention.k_proj.weight[head * 32 : head * 32 + 32, :hd] = sharp
