"""Measure acceptance and speed on prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.errors import Stopped
from speculators_core.evaluate.acceptance import Acceptance, Counts, acceptance
from speculators_core.evaluate.engines import Answer, Engine, open_engine
from speculators_core.evaluate.prompts import Prompt, read_prompts
from speculators_core.params import EvaluateParams
from speculators_core.progress import Progress, Quiet


class Conditions(BaseModel):
    """What the numbers depend on: results under different conditions don't compare."""

    model_config = ConfigDict(frozen=True)

    speculative_tokens: int
    temperature: float
    draft_sampling: str
    max_tokens: int
    prompts: int
    plain_prompts: int
    engine: str
    engine_version: str | None
    dtype: str
    template: str


class EvaluateResult(Acceptance):
    """The JSON of `speclab evaluate`. `tokens_per_second` and its plain twin are of the same
    prompts, decoded both ways in turn; the plain one is None where plain decoding was not asked
    for or is not on offer. Speed counts reading the prompt."""

    tokens_per_second: float
    tokens_per_second_plain: float | None
    categories: dict[str, Acceptance]
    settings: Conditions


def evaluate(params: EvaluateParams, progress: Progress | None = None) -> EvaluateResult:
    """Answer every prompt once with speculation, the first `plain_samples` also without.

    Raises `DataError` for prompts that can't be read (before models are loaded), `CheckpointError`
    and `PairingError` for the models, `Unavailable` for a server, `Stopped` between two prompts.
    """
    progress = progress or Quiet()
    prompts = read_prompts(Path(params.data), params.samples)
    progress.update(0.0, "loading the models")
    engine = open_engine(params)
    for note in engine.notes:
        progress.note(note)
    answers, plain = _answers(engine, prompts, params, progress)
    counts = [answer.counts for answer in answers]
    overall = acceptance(counts, engine.k, params.seed)
    paired = answers[: len(plain)] or answers
    return EvaluateResult(
        **overall.model_dump(),
        tokens_per_second=_speed(paired),
        tokens_per_second_plain=_speed(plain) if plain else None,
        categories=_by_category(prompts, counts, engine.k, params.seed),
        settings=_conditions(engine, params, len(answers), len(plain)),
    )


def _answers(
    engine: Engine, prompts: Sequence[Prompt], params: EvaluateParams, progress: Progress
) -> tuple[list[Answer], list[Answer]]:
    """Answers with speculation to all prompts, and without to the first few, taking turns."""
    answers: list[Answer] = []
    plain: list[Answer] = []
    began = time.monotonic()
    for i, prompt in enumerate(prompts):
        if progress.stopping():
            raise Stopped(f"stopped after {i} of {len(prompts)} prompts")
        answer = engine.answer(prompt, params.seed + i)
        assert answer is not None, "only plain decoding may be refused"
        answers.append(answer)
        if len(plain) == i < params.plain_samples:
            unassisted = engine.answer(prompt, params.seed + i, plain=True)
            plain += [unassisted] if unassisted else []
        _tell(progress, answers, len(prompts), began)
    return answers, plain


def _tell(progress: Progress, answers: Sequence[Answer], total: int, began: float) -> None:
    done = len(answers)
    steps = sum(answer.counts.steps for answer in answers)
    accepted = sum(answer.counts.accepted for answer in answers)
    length = 1 + accepted / steps if steps else 1.0
    left = (time.monotonic() - began) / done * (total - done)
    progress.update(
        done / total, f"{done} of {total} prompts, acceptance length {length:.2f}", left
    )


def _by_category(
    prompts: Sequence[Prompt], counts: Sequence[Counts], k: int, seed: int
) -> dict[str, Acceptance]:
    groups: dict[str, list[Counts]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        groups.setdefault(prompt.category, []).append(count)
    return {name: acceptance(group, k, seed) for name, group in sorted(groups.items())}


def _speed(answers: Sequence[Answer]) -> float:
    return sum(answer.counts.tokens for answer in answers) / sum(a.seconds for a in answers)


def _conditions(engine: Engine, params: EvaluateParams, prompts: int, plain: int) -> Conditions:
    described: dict[str, Any] = engine.described()
    return Conditions(
        speculative_tokens=engine.k,
        temperature=params.temperature,
        draft_sampling="argmax",
        max_tokens=params.max_tokens,
        prompts=prompts,
        plain_prompts=plain,
        engine=described["name"],
        engine_version=described["version"],
        dtype=described["dtype"],
        template=described["template"],
    )
