"""One answer to one prompt by the reference engine, told step by step: `speclab generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from speculators_core.checkpoint import load_speculator
from speculators_core.decode.detokenize import Detokenizer
from speculators_core.decode.drafter import Drafter
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.errors import Stopped
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import GenerateParams

Tell = Callable[[dict[str, Any]], None]


def answer(
    params: GenerateParams, tell: Tell, stopping: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Decode, telling `{"decoded": step}` as it goes; the whole answer with its numbers.

    The prompt is one user turn in the verifier's chat template; a verifier without a template
    continues it as plain text. Raises `Stopped` between two steps.
    """
    tell({"progress": None, "text": "loading the models", "eta_s": None})
    verifier = load_verifier(params.verifier)
    drafter, k = _drafter(params, verifier)
    prompt = _prompt_ids(verifier, params.prompt)
    decoder = SpeculativeDecoder(verifier, drafter, k)
    texts = Detokenizer(verifier.tokenizer, prompt)
    told: list[dict[str, Any]] = []
    steps: list[Step] = []
    began = time.perf_counter()
    for step in decoder.generate(prompt, params):
        if stopping():
            raise Stopped("stopped before the answer was complete")
        steps.append(step)
        told.append(_described(step, texts))
        tell({"decoded": told[-1]})
    seconds = time.perf_counter() - began
    text = "".join(piece for step in told for piece in step["emitted"]) + texts.finish()
    return {"text": text, "steps": told, "numbers": numbers(steps, k, seconds)}


def numbers(steps: list[Step], k: int, seconds: float) -> dict[str, Any]:
    """What the steps amount to. Acceptance counts steps that drafted, positions jointly."""
    drafting = [step for step in steps if step.drafted]
    drafted = sum(len(step.drafted) for step in drafting)
    accepted = sum(step.accepted for step in drafting)
    tokens = sum(len(step.emitted) for step in steps)
    share = 1 / len(drafting) if drafting else 0.0
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "speculative_tokens": k,
        "steps": len(drafting),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": 1 + accepted * share if drafting else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "per_position": [
            sum(step.accepted > position for step in drafting) * share for position in range(k)
        ],
    }


def _drafter(params: GenerateParams, verifier: Verifier) -> tuple[Drafter | None, int]:
    if params.speculator is None:
        return None, 0
    draft = load_speculator(
        params.speculator, embedding=verifier.embedding, dtype=verifier.embedding.dtype
    )
    k = params.speculative_tokens or draft.config.speculative_tokens
    return EagleDrafter(draft, verifier), k


def _prompt_ids(verifier: Verifier, prompt: str) -> list[int]:
    tokenizer = verifier.tokenizer
    if not tokenizer.chat_template:
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _described(step: Step, texts: Detokenizer) -> dict[str, Any]:
    drafted, emitted = texts.step(step.drafted, step.accepted, step.emitted)
    return {
        "step": step.index,
        "drafted": drafted,
        "accepted": step.accepted,
        "emitted": emitted,
        "draft_ms": step.draft_ms,
        "verify_ms": step.verify_ms,
        "context_len": step.context_len,
    }
