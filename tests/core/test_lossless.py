"""Speculation changes speed, never the text: greedy output is token for token the plain one.

Where the two differ, the verifier's own top two logits must be within 1e-3 at that place (passes
of different lengths round differently); such places are listed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speculators_core.checkpoint import load_speculator
from speculators_core.decode.drafter import Draft, Drafter, Drafting
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.decode.ngram import NgramDrafter
from speculators_core.decode.prompt import chat_ids
from speculators_core.decode.sampling import Sampler
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import SamplingParams
from tests import tiny
from tests.core.agreeing import agreeing_pair

PROMPTS, TOKENS, NEAR_TIE = 100, 12, 1e-3


@dataclass
class ScriptedDrafter:
    """Proposes the known answer, with an error in every `wrong_every`-th token it drafts."""

    prompt: list[int]
    answer: list[int]
    wrong_every: int
    name: str = "scripted"
    aux_layers: tuple[int, ...] = ()

    def begin(self, first_token: int, capacity: int, sampler: Sampler) -> Drafting:
        self.seen = [first_token]
        self.drafted = 0
        return self

    def absorb(self, tokens: Sequence[int], aux: Tensor | None) -> None:
        self.seen.extend(tokens)

    def propose(self, k: int) -> Draft:
        at = len(self.seen) - len(self.prompt)
        return Draft(tuple(self._maybe_wrong(token) for token in self.answer[at : at + k]))

    def _maybe_wrong(self, token: int) -> int:
        self.drafted += 1
        return (token + 1) % tiny.VOCAB if self.drafted % self.wrong_every == 0 else token


def prompts(count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(tiny.VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def run(
    verifier: Verifier, drafter: Drafter | None, k: int, prompt: list[int], tokens: int = TOKENS
) -> list[Step]:
    decoder = SpeculativeDecoder(verifier, drafter, k)
    return list(decoder.generate(prompt, SamplingParams(max_tokens=tokens), ()))


def text(steps: list[Step]) -> list[int]:
    return [token for step in steps for token in step.emitted]


@torch.inference_mode()
def near_tie(verifier: Verifier, context: list[int]) -> bool:
    top = verifier.model(torch.tensor([context])).logits[0, -1].topk(2).values
    return float(top[0] - top[1]) < NEAR_TIE


def assert_lossless(
    verifier: Verifier, prompt: list[int], plain: list[int], got: list[int]
) -> None:
    if got == plain:
        return
    at = next(i for i in range(len(plain)) if got[i : i + 1] != plain[i : i + 1])
    assert near_tie(verifier, prompt + plain[:at]), f"differs at token {at} without a near-tie"
    print(f"near-tie: prompt {prompt[:4]}…, token {at}")


@pytest.fixture(scope="module")
def verifier(tiny_verifier) -> Verifier:
    return load_verifier(tiny_verifier)


@pytest.fixture(scope="module")
def plain(verifier) -> list[list[int]]:
    return [text(run(verifier, None, 0, prompt)) for prompt in prompts()]


def test_plain_decoding_is_what_transformers_generates(verifier, plain):
    for prompt, own in list(zip(prompts(), plain, strict=True))[:10]:
        ids = torch.tensor([prompt])
        theirs = verifier.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # the padding token is a token like any other here
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )[0, len(prompt) :].tolist()
        assert_lossless(verifier, prompt, theirs, own)


def test_a_random_draft_changes_nothing(verifier, plain, tiny_speculator):
    drafter = EagleDrafter(load_speculator(tiny_speculator), verifier)
    for i, prompt in enumerate(prompts()):
        assert_lossless(verifier, prompt, plain[i], text(run(verifier, drafter, 1 + i % 6, prompt)))


def test_drafts_with_scattered_errors_change_nothing_and_are_partly_accepted(verifier, plain):
    accepted = drafted = 0
    for i, prompt in enumerate(prompts()):
        drafter = ScriptedDrafter(prompt, plain[i], wrong_every=2 + i % 5)
        steps = run(verifier, drafter, 1 + i % 6, prompt)
        assert_lossless(verifier, prompt, plain[i], text(steps))
        accepted += sum(step.accepted for step in steps)
        drafted += sum(len(step.drafted) for step in steps)
    assert 0.3 < accepted / drafted < 0.9


def test_a_draft_network_that_often_agrees_changes_nothing(tiny_verifier):
    verifier, draft = agreeing_pair(tiny_verifier, share=0.003)
    drafter = EagleDrafter(draft, verifier)
    accepted = drafted = 0
    for i, prompt in enumerate(prompts()):
        expected = text(run(verifier, None, 0, prompt))
        steps = run(verifier, drafter, 1 + i % 6, prompt)
        assert_lossless(verifier, prompt, expected, text(steps))
        accepted += sum(step.accepted for step in steps)
        drafted += sum(len(step.drafted) for step in steps)
    assert 0.3 < accepted / drafted < 0.8


def test_prompt_lookup_changes_nothing_and_finds_repetition(tiny_verifier):
    verifier, _ = agreeing_pair(tiny_verifier, share=0.001)  # such a model soon repeats itself
    accepted = 0
    for i, prompt in enumerate(prompts(10)):
        expected = text(run(verifier, None, 0, prompt, tokens=40))
        steps = run(verifier, NgramDrafter(), 1 + i % 6, prompt, tokens=40)
        assert_lossless(verifier, prompt, expected, text(steps))
        accepted += sum(step.accepted for step in steps)
    assert accepted > 40


@pytest.mark.slow
def test_ten_answers_of_a_real_small_model_are_unchanged(smollm2):
    """SmolLM2-135M with prompt lookup and with known answers full of errors."""
    verifier = load_verifier(smollm2)
    for i in range(10):
        question = f"Tom has {i + 3} apples and buys {i + 5} more. How many apples has he now?"
        prompt = chat_ids(verifier.tokenizer, [{"role": "user", "content": question}])
        expected = text(run(verifier, None, 0, prompt, tokens=24))
        for drafter in (NgramDrafter(), ScriptedDrafter(prompt, expected, wrong_every=3)):
            got = text(run(verifier, drafter, 1 + i % 6, prompt, tokens=24))
            assert_lossless(verifier, prompt, expected, got)
