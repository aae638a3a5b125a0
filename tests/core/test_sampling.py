"""Sampled output keeps the verifier's distribution, whatever is drafted.

Each chi-square test uses a fixed seed and would raise a false alarm for one seed in 10,000.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from speculators_core.decode import sampling
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.sampling import Sampler
from speculators_core.params import SamplingParams
from tests.core.agreeing import agreeing_pair

FALSE_ALARM = 1e-4
V = 6


def p_value(counts: Counter, expected: dict) -> float:
    """Of Pearson's chi-square; outcomes expected fewer than 5 times are pooled."""
    total = sum(counts.values())
    assert not set(counts) - {o for o, p in expected.items() if p > 0}, "an impossible outcome"
    rare = {o for o, p in expected.items() if p * total < 5}
    cells = [(counts[o], p * total) for o, p in expected.items() if o not in rare]
    pooled = sum(expected[o] for o in rare) * total
    if pooled >= 1:
        cells.append((sum(counts[o] for o in rare), pooled))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    degrees = torch.tensor((len(cells) - 1) / 2)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2)))


def markov_logits() -> Tensor:
    """[V, V]: a verifier whose next-token logits depend on the newest token alone."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(5)) * 1.5


def draft_distribution() -> Tensor:
    """[V, V]: a drafter that is wrong in its own way."""
    logits = torch.randn(V, V, generator=torch.Generator().manual_seed(6)) * 1.5
    return (0.5 * markov_logits() + 0.5 * logits).softmax(-1)


def two_tokens(sampler: Sampler, *, drawn: bool) -> tuple[int, int]:
    """The first two tokens after token 0, decoded with K = 2 in as many steps as it takes."""
    logits, drafts = markov_logits(), draft_distribution()
    out = [0]
    while len(out) < 3:
        chain, q = [out[-1]], []
        for _ in range(2):
            row = drafts[chain[-1]]
            q.append(row)
            chain.append(sampler.draw(row) if drawn else int(row.argmax()))
        verdict = sampler.judge(
            logits[torch.tensor(chain)], tuple(chain[1:]), torch.stack(q) if drawn else None
        )
        out += [*chain[1 : verdict.accepted + 1], verdict.token]
    return out[1], out[2]


def expected_pairs(sampler: Sampler) -> dict[tuple[int, int], float]:
    p = sampler.probabilities(markov_logits())
    return {(a, b): float(p[0, a] * p[a, b]) for a, b in itertools.product(range(V), repeat=2)}


@pytest.mark.parametrize("drawn", [False, True], ids=["argmax drafts", "drawn drafts"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.6, top_k=4, seed=2),
        SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    ],
    ids=["plain", "top-k", "top-p"],
)
def test_pairs_of_tokens_come_as_often_as_the_verifier_says(params, drawn):
    sampler = Sampler(params)
    counts = Counter(two_tokens(sampler, drawn=drawn) for _ in range(2500))
    assert p_value(counts, expected_pairs(sampler)) > FALSE_ALARM


@pytest.mark.parametrize("drawn", [False, True], ids=["argmax drafts", "drawn drafts"])
def test_a_sampler_that_draws_from_p_after_a_rejection_is_caught(monkeypatch, drawn):
    monkeypatch.setattr(sampling, "_residual", lambda p, token, q: p)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    counts = Counter(two_tokens(sampler, drawn=drawn) for _ in range(4000))
    assert p_value(counts, expected_pairs(sampler)) < FALSE_ALARM


def test_a_sampler_that_accepts_by_comparing_with_a_draw_is_no_different_for_argmax_drafts():
    """Accepting x with probability p(x) is the same as drawing from p and comparing with x."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=9))
    p = sampler.probabilities(markov_logits()[0])
    drafted = (int(p.argmax()),)
    rows = markov_logits()[torch.tensor([0, drafted[0]])]
    accepted = sum(sampler.judge(rows, drafted, None).accepted for _ in range(4000))
    expected = {1: float(p[drafted[0]]), 0: 1 - float(p[drafted[0]])}
    assert p_value(Counter({1: accepted, 0: 4000 - accepted}), expected) > FALSE_ALARM


@pytest.mark.parametrize("probabilistic", [False, True])
def test_the_engine_keeps_the_verifiers_distribution(tiny_verifier, probabilistic):
    verifier, draft = agreeing_pair(tiny_verifier, share=0.001)
    drafter = EagleDrafter(draft, verifier, probabilistic=probabilistic)
    decoder = SpeculativeDecoder(verifier, drafter, 2)
    prompt = [72, 101, 108]
    params = SamplingParams(temperature=0.7, top_k=4, max_tokens=3)
    expected = triples(verifier, prompt, Sampler(params))
    counts: Counter = Counter()
    for seed in range(400):
        steps = decoder.generate(prompt, params.model_copy(update={"seed": seed}), ())
        counts[tuple(t for step in steps for t in step.emitted)] += 1
    assert p_value(counts, expected) > FALSE_ALARM


@torch.inference_mode()
def triples(verifier, prompt: list[int], sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The exact probability of every three-token answer, by running the verifier on all."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        batch = torch.tensor([[*prompt, *answer] for answer in answers])
        rows = sampler.probabilities(verifier.model(batch).logits[:, -1])
        answers = {
            (*answer, int(t)): mass * float(row[t])
            for (answer, mass), row in zip(answers.items(), rows, strict=True)
            for t in row.nonzero().flatten()
        }
    return answers


def test_greedy_is_a_point_mass_on_the_best_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    sampler = Sampler(SamplingParams())
    assert sampler.probabilities(logits).tolist() == [[0, 1, 0], [1, 0, 0]]
    verdict = sampler.judge(logits, (1,), None)
    assert (verdict.accepted, verdict.token) == (1, 0)
    assert verdict.p[0] == pytest.approx(float(logits[0].softmax(-1)[1]))


def test_top_k_and_top_p_keep_the_fewest_likely_tokens():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert Sampler(SamplingParams(temperature=1, top_k=2)).probabilities(
        logits
    ).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampler(SamplingParams(temperature=1, top_p=0.6)).probabilities(
        logits
    ).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert Sampler(SamplingParams(temperature=1, top_p=0.1)).probabilities(
        logits
    ).tolist() == pytest.approx([1, 0, 0, 0])


def test_an_impossible_draft_is_rejected_and_a_certain_one_accepted():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    for _ in range(20):
        rejected, kept = sampler.judge(logits, (0,), None), sampler.judge(logits, (1,), None)
        assert (rejected.accepted, rejected.token) == (0, 1)
        assert (kept.accepted, kept.token) == (1, 0)


def test_the_same_seed_gives_the_same_answer(tiny_verifier):
    verifier, draft = agreeing_pair(tiny_verifier, share=0.003)
    decoder = SpeculativeDecoder(verifier, EagleDrafter(draft, verifier), 3)
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=4)

    def answer(p: SamplingParams) -> list[int]:
        return [t for step in decoder.generate([1, 2, 3], p, ()) for t in step.emitted]

    assert answer(params) == answer(params)
    assert answer(params) != answer(params.model_copy(update={"seed": 5}))
