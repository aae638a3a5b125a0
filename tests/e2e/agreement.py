"""vLLM and the reference engine, side by side on one verifier and speculator, greedy, float32.

Every decoding step is compared: what was accepted, and the text. Two engines may part where the
verifier's own top two logits are within 1e-3 of each other; such places are printed.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speculators_core.decode.eagle import load_eagle
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.decode.prompt import question_ids
from speculators_core.models.verifier import load_verifier
from speculators_core.params import SamplingParams

NEAR_TIE = 1e-3
QUESTIONS = [
    f"{name} has {i + 3} boxes with {2 * i + 4} {things} each. How many {things} are there?"
    for i, (name, things) in enumerate(
        [("Tom", "pens"), ("Ana", "books"), ("Leo", "cups"), ("Mia", "eggs"), ("Sam", "coins")] * 2
    )
]


@dataclass(frozen=True)
class Served:
    """One answer of a vLLM server. `accepted`: a number for each step that drafted."""

    ids: list[int]
    accepted: list[int]


class Reference:
    """The reference engine over the same files that a server has loaded."""

    def __init__(self, verifier: Path, speculator: Path, k: int) -> None:
        self.verifier = load_verifier(verifier)
        self.decoder = SpeculativeDecoder(
            self.verifier, load_eagle(str(speculator), self.verifier), k
        )

    def steps(self, question: str, tokens: int) -> list[Step]:
        prompt = question_ids(self.verifier.tokenizer, question)
        return list(self.decoder.generate(prompt, SamplingParams(max_tokens=tokens)))

    @torch.inference_mode()
    def near_tie(self, question: str, settled: list[int]) -> bool:
        context = [*question_ids(self.verifier.tokenizer, question), *settled]
        top = self.verifier.model(torch.tensor([context])).logits[0, -1].topk(2).values
        return float(top[0] - top[1]) < NEAR_TIE


def ask(endpoint: str, model: str, question: str, tokens: int) -> Served:
    """The server's greedy answer with its own per-request counts."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    counted = answer["metrics"]["speculative_decoding"]
    return Served(answer["choices"][0]["token_ids"], counted["per_step_accepted"])


def assert_same_steps(
    reference: Reference, endpoint: str, model: str, questions: list[str], tokens: int
) -> int:
    """Compare answer by answer; how many drafted tokens were accepted in all."""
    accepted = 0
    for question in questions:
        served = ask(endpoint, model, question, tokens)
        steps = reference.steps(question, tokens)
        ids = [token for step in steps for token in step.emitted]
        if ids != served.ids:
            at = next(i for i, own in enumerate(ids) if served.ids[i : i + 1] != [own])
            assert reference.near_tie(question, ids[:at]), f"{question}: differ at token {at}"
            print(f"near-tie: {question} at token {at}")
            continue
        assert [step.accepted for step in steps if step.drafted] == served.accepted, question
        accepted += sum(served.accepted)
    return accepted
