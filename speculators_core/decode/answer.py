"""One answer to one prompt by the reference engine, told step by step: `speclab generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speculators_core.conversion.pairing import tokenizer_warnings
from speculators_core.decode.detokenize import Detokenizer
from speculators_core.decode.drafter import Drafter
from speculators_core.decode.eagle import load_eagle
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.decode.prompt import question_ids
from speculators_core.errors import Stopped
from speculators_core.evaluate.acceptance import acceptance, counted
from speculators_core.models.verifier import Verifier, fastest, load_verifier
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
    device, dtype = fastest()
    verifier = load_verifier(params.verifier, dtype=dtype, device=device)
    drafter, k = _drafter(params, verifier, tell)
    prompt = question_ids(verifier.tokenizer, params.prompt)
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
    """What the steps amount to, as `evaluate.acceptance` counts; None where nothing drafted."""
    counts = counted(steps, k)
    found = acceptance([counts], k)
    return {
        "tokens": counts.tokens,
        "seconds": seconds,
        "tokens_per_second": counts.tokens / seconds,
        "speculative_tokens": k,
        "steps": counts.steps,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_length": found.acceptance_length if counts.steps else None,
        "acceptance_rate": found.acceptance_rate if counts.steps else None,
        "per_position": found.per_position,
    }


def _drafter(params: GenerateParams, verifier: Verifier, tell: Tell) -> tuple[Drafter | None, int]:
    if params.speculator is None:
        return None, 0
    for note in tokenizer_warnings(Path(params.speculator), verifier.facts):
        tell({"note": note})
    drafter = load_eagle(params.speculator, verifier)
    return drafter, params.speculative_tokens or drafter.draft.config.speculative_tokens


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
