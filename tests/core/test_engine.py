"""The decoding loop: what a step holds, where an answer ends, what the caches remember."""

from __future__ import annotations

import pytest
import torch

from speculators_core.checkpoint import load_speculator
from speculators_core.decode import engine
from speculators_core.decode.cache import causal_mask, grouped_attention
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.decode.ngram import NgramDrafter
from speculators_core.errors import InputError, PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import SamplingParams
from tests import tiny
from tests.core.agreeing import agreeing_pair

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def pair(tiny_verifier) -> tuple[Verifier, Eagle3Draft]:
    return agreeing_pair(tiny_verifier, share=0.003)


def run(pair, k: int = 3, max_tokens: int = 24, stop_ids=(), prompt=PROMPT) -> list[Step]:
    verifier, draft = pair
    decoder = SpeculativeDecoder(verifier, EagleDrafter(draft, verifier), k)
    return list(decoder.generate(prompt, SamplingParams(max_tokens=max_tokens), stop_ids))


def text(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.emitted]


def test_a_step_tells_what_was_drafted_accepted_and_emitted(pair):
    steps = run(pair)
    assert [step.index for step in steps] == list(range(len(steps)))
    first, *rest = steps
    assert (first.drafted, first.accepted, len(first.emitted)) == ((), 0, 1)
    settled = len(PROMPT)
    for step in steps:
        assert step.context_len == settled
        settled += len(step.emitted)
    for step in rest[:-1]:
        assert step.emitted[:-1] == step.drafted[: step.accepted]
        assert step.sources == ("draft",) * step.accepted + ("verifier",)
        assert step.accepted == 3 or step.emitted[-1] != step.drafted[step.accepted]
    assert {step.accepted for step in rest} > {0}


def test_probabilities_and_times_come_with_every_drafted_token(pair):
    verifier, _ = pair
    for step in run(pair)[1:]:
        assert len(step.p_draft) == len(step.p_verifier) == len(step.drafted) == 3
        assert all(0 <= p <= 1 for p in (*step.p_draft, *step.p_verifier))
        assert step.draft_ms > 0 and step.verify_ms > 0
    step = run(pair)[1]
    context = torch.tensor([[*PROMPT, *run(pair)[0].emitted]])
    with torch.inference_mode():
        p = verifier.model(context).logits[0, -1].softmax(-1)[step.drafted[0]]
    assert step.p_verifier[0] == pytest.approx(float(p), abs=1e-5)


def test_an_answer_ends_at_max_tokens_but_still_drafts_k(pair):
    for max_tokens in range(1, 9):
        steps = run(pair, max_tokens=max_tokens)
        assert len(text(steps)) == max_tokens
        assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1].finish == "length"
        assert all(len(step.drafted) == 3 for step in steps[1:])


def test_an_answer_ends_with_the_stop_token_wherever_in_a_step_it_falls(pair):
    whole = text(run(pair))
    for position in range(0, 24, 3):
        stop = whole[position]
        steps = run(pair, stop_ids=[stop])
        assert text(steps) == whole[: whole.index(stop) + 1]
        assert steps[-1].finish == "stop"


def test_the_verifiers_own_end_tokens_stop_by_default(pair, monkeypatch):
    verifier, _ = pair
    whole = text(run(pair))
    monkeypatch.setattr(verifier.model.generation_config, "eos_token_id", [whole[9], 0])
    assert verifier.stop_ids == (whole[9], 0, verifier.tokenizer.eos_token_id)
    ends = [i for i, token in enumerate(whole) if token in verifier.stop_ids]
    assert text(run(pair, stop_ids=None)) == whole[: ends[0] + 1]


def test_an_answer_ends_where_the_context_does(pair):
    verifier, draft = pair
    limit = verifier.facts.max_position_embeddings
    prompt = [i % 250 for i in range(limit - 5)]
    steps = run((verifier, draft), prompt=prompt, max_tokens=100)
    assert len(text(steps)) == 5
    assert steps[-1].finish == "length"
    plain = SpeculativeDecoder(verifier).generate(prompt, SamplingParams(max_tokens=100), ())
    assert text(list(plain)) == text(steps)


def test_reading_the_prompt_in_chunks_changes_nothing(pair, monkeypatch):
    at_once = run(pair)
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 7)
    in_chunks = run(pair)
    assert [(s.drafted, s.emitted) for s in in_chunks] == [(s.drafted, s.emitted) for s in at_once]


@pytest.mark.parametrize(
    "changes",
    [{"norm_output": False}, {"norm_output": True}, {"kind": "qwen3", "layers": 2}],
    ids=["llama", "llama, norm_output", "qwen3"],
)
def test_each_draft_equals_one_made_afresh_from_true_states(tiny_verifier, tmp_path, changes):
    """The kept cache holds what a draft that reads everything anew would compute."""
    verifier = load_verifier(tiny_verifier)
    config = tiny.draft_config(tiny_verifier, **changes)
    draft = load_speculator(tiny.build_speculator(tmp_path / "draft", tiny_verifier, config=config))
    context = list(PROMPT)
    for step in run((verifier, draft), max_tokens=10):
        if step.drafted:
            assert step.drafted == drafted_afresh(verifier, draft, context, 3)
        context += step.emitted


@torch.inference_mode()
def drafted_afresh(
    verifier: Verifier, draft: Eagle3Draft, context: list[int], k: int
) -> tuple[int, ...]:
    """Draft without any cache: the whole chain is recomputed for every token."""
    with verifier.watching(tiny.AUX_LAYERS) as seen:
        verifier.model(torch.tensor([context[:-1]]))
    states = draft.combine(torch.cat([seen[layer] for layer in tiny.AUX_LAYERS], dim=-1))
    tokens, chosen = context[1:], []
    for _ in range(k):
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        normed, following = draft.step(ids, states, positions, whole_attention)
        best = draft.logits(normed[:, -1:]).argmax(-1)
        token = int(draft.to_verifier_ids(best))
        chosen.append(token)
        tokens = [*tokens, token]
        states = torch.cat([states, following[:, -1:]], dim=1)
    return tuple(chosen)


def whole_attention(layer: int, q, k, v):
    mask = causal_mask(q.shape[2], k.shape[2], q.device)
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_grouped_attention_is_attention_over_repeated_heads():
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = causal_mask(4, 9, q.device)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask
    )
    torch.testing.assert_close(grouped_attention(q, k, v, mask), expected)


def test_a_sliding_window_verifier_decodes_as_transformers_does(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(tmp_path / "mistral")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "mistral")
    verifier = load_verifier(tmp_path / "mistral")
    decoder = SpeculativeDecoder(verifier, NgramDrafter(), 3)
    steps = decoder.generate(PROMPT * 2, SamplingParams(max_tokens=20), ())
    theirs = verifier.model.generate(
        torch.tensor([PROMPT * 2]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert text(list(steps)) == theirs[0, len(PROMPT) * 2 :].tolist()


def test_abandoning_an_answer_leaves_no_hook_on_the_verifier(pair):
    verifier, draft = pair
    steps = SpeculativeDecoder(verifier, EagleDrafter(draft, verifier)).generate(PROMPT)
    next(steps)
    assert any(layer._forward_pre_hooks for layer in verifier.layers)
    steps.close()
    assert not any(layer._forward_pre_hooks for layer in verifier.layers)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([0] * 2048, "the verifier's context is 2048"),
        ([1, 256], "token 256 is not in the verifier's vocabulary of 256"),
        ([-1], "token -1 is not in"),
    ],
)
def test_a_prompt_that_can_not_be_read_is_refused_before_anything_runs(pair, prompt, message):
    with pytest.raises(InputError, match=message):
        SpeculativeDecoder(pair[0]).generate(prompt)


def test_a_draft_for_another_verifier_is_refused(tiny_verifier, tmp_path):
    config = tiny.draft_config(tiny_verifier, target_hidden_size=96)
    draft = load_speculator(tiny.build_speculator(tmp_path / "draft", tiny_verifier, config=config))
    with pytest.raises(PairingError, match="hidden size of the aux states 96, this one has 64"):
        EagleDrafter(draft, load_verifier(tiny_verifier))


def test_a_draft_of_unknown_aux_layers_is_refused(tiny_verifier, tmp_path):
    """A6: no default layers are taken in silence."""
    config = tiny.draft_config(tiny_verifier, aux_layers=None)
    draft = load_speculator(tiny.build_speculator(tmp_path / "draft", tiny_verifier, config=config))
    with pytest.raises(PairingError, match="which verifier states it was trained on"):
        EagleDrafter(draft, load_verifier(tiny_verifier))


def test_a_verifier_whose_layers_can_not_be_rewound_is_refused(tiny_verifier):
    verifier = load_verifier(tiny_verifier)
    verifier.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(PairingError, match="linear_attention"):
        SpeculativeDecoder(verifier)


def test_with_no_tokens_to_draft_it_decodes_plainly(pair):
    steps = run(pair, k=0, max_tokens=5)
    assert all(step.drafted == () and step.p_draft is None for step in steps)
    assert len(text(steps)) == 5
