"""The draft network: every switch of its config does something, and survives saving."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from speculators_core.checkpoint import load_speculator, save_speculator
from speculators_core.models.eagle3 import Eagle3Draft
from tests import tiny

LENGTH = 12


def causal(_layer, q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@torch.no_grad()
def two_steps(draft, *, offset=0, length=LENGTH):
    """Logits of two draft steps on fixed random input, [2, S, dv]."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, draft.config.vocab_size, (1, length + 1), generator=generator)
    width = draft.config.num_aux * draft.config.verifier_hidden_size
    hidden = draft.combine(2 * torch.randn(1, length, width, generator=generator))
    logits = []
    for step in range(2):
        positions = torch.arange(length)[None] + step + offset
        normed, hidden = draft.step(tokens[:, step : step + length], hidden, positions, causal)
        logits.append(draft.logits(normed)[0])
    return torch.stack(logits)


def build(tmp_path, verifier, name, **changes):
    config = tiny.draft_config(verifier, **changes)
    return load_speculator(tiny.build_speculator(tmp_path / name, verifier, config=config))


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc", "fc_norm",
                                    "norm_output"])  # fmt: skip
def test_each_norm_switch_changes_the_logits_and_survives_saving(tmp_path, tiny_verifier, switch):
    off = build(tmp_path, tiny_verifier, "off", **{switch: False})
    on = build(tmp_path, tiny_verifier, "on", **{switch: True})
    for name, tensor in off.state_dict().items():  # the same weights but for the switch's own
        on.state_dict()[name].copy_(tensor)
    plain, switched = two_steps(off), two_steps(on)
    first_too = switch != "norm_output"  # which only changes what the second step is given
    assert (plain[0] - switched[0]).abs().max() > 1e-2 or not first_too
    assert (plain[1] - switched[1]).abs().max() > 1e-2
    save_speculator(on, tmp_path / "again")
    again = load_speculator(tmp_path / "again")
    assert getattr(again.config, switch) is True
    assert torch.equal(two_steps(again), switched)


def test_the_rotary_base_matters_far_into_the_context(tmp_path, tiny_verifier):
    short = build(tmp_path, tiny_verifier, "short", rope_theta=1e4)
    long = build(tmp_path, tiny_verifier, "long", rope_theta=1e6)
    difference = two_steps(short, length=501)[0, 500] - two_steps(long, length=501)[0, 500]
    assert difference.abs().max() > 1e-2


def test_only_differences_of_positions_matter(tmp_path, tiny_verifier):
    draft = build(tmp_path, tiny_verifier, "s")
    assert torch.allclose(two_steps(draft), two_steps(draft, offset=1), atol=1e-4)


def test_the_token_enters_the_first_layer_only(tmp_path, tiny_verifier):
    draft = build(tmp_path, tiny_verifier, "two", layers=2)
    assert draft.layers[0].self_attn.q_proj.in_features == 2 * tiny.HIDDEN
    assert draft.layers[1].self_attn.q_proj.in_features == tiny.HIDDEN
    assert torch.isfinite(two_steps(draft)).all()


def test_draft_ids_map_to_the_kept_tokens(tiny_speculator):
    draft = load_speculator(tiny_speculator)
    ids = draft.to_verifier_ids(torch.arange(tiny.DRAFT_VOCAB).reshape(2, -1))
    assert torch.equal(ids.flatten(), draft.t2d.nonzero().flatten())


def test_a_map_of_another_size_is_refused(tiny_speculator):
    draft = load_speculator(tiny_speculator)
    with pytest.raises(ValueError, match="256 tokens kept, expected 64"):
        draft.set_vocab_map(torch.ones(tiny.VOCAB, dtype=torch.bool))


def test_a_draft_narrower_than_its_verifier_trains_and_reloads(tmp_path):
    verifier = tiny.build_verifier(tmp_path / "wide", hidden=96)
    draft = build(tmp_path, verifier, "narrow", target_hidden_size=96).train()
    draft.norm.weight.requires_grad_(True)
    optimiser = torch.optim.SGD((p for _, p in draft.trainable()), lr=0.1)
    before = draft.fc.weight.detach().clone()
    hidden = draft.combine(torch.randn(1, LENGTH, 3 * 96))
    normed, _ = draft.step(
        torch.zeros(1, LENGTH, dtype=torch.int64), hidden, torch.arange(LENGTH)[None], causal
    )
    draft.logits(normed).logsumexp(-1).mean().backward()
    optimiser.step()
    assert not torch.equal(draft.fc.weight, before)
    save_speculator(draft, tmp_path / "trained")
    again = load_speculator(tmp_path / "trained")
    assert again.config.verifier_hidden_size == 96
    assert torch.equal(two_steps(again), two_steps(draft.eval()))


def test_a_state_dict_has_the_names_of_the_format():
    with torch.device("meta"):
        names = set(Eagle3Draft(tiny.draft_config("v")).state_dict())
    assert {"d2t", "t2d", "fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"} <= names
    assert not any("rotary" in name for name in names)
