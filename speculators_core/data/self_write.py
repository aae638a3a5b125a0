"""Chats that the verifier writes itself, questions included (Magpie, arXiv 2406.08464).

Shown the beginning of a user turn and nothing after it, a chat model goes on as the user. The
questions are sampled, de-duplicated and filtered; the answers are greedy, because a draft is
accepted where it says what the verifier would say. Some questions are kept apart for evaluation.

    OUTPUT/chats.jsonl      {"messages": [user, assistant]}
    OUTPUT/held_out.jsonl   {"prompt", "category"}: none of them is in chats.jsonl, nor nearly
    OUTPUT/written.json     the settings, seed included, and what was dropped and why
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from speculators_core.data.domains import DOMAINS, Domain
from speculators_core.data.filters import Language, Unheard
from speculators_core.data.writer import greedy, nucleus, write
from speculators_core.decode.prompt import chat_ids, chat_text, rendered_ids
from speculators_core.errors import DataError, Stopped
from speculators_core.models.verifier import Verifier, fastest, load_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import SelfWriteParams
from speculators_core.progress import Progress, Quiet

_LEAST_YIELD = 0.05  # of a batch of questions; a verifier below it can't write this domain
_MARK = "\u241f"  # stands for the user's text while the template is rendered
_QUESTIONS_SHARE = 0.4  # of the whole time, about


class SelfWriteResult(BaseModel):
    """What `self_write` wrote, and how many questions and answers were dropped for which reason."""

    output: str
    held_out: str
    samples: int
    tokens: int
    dropped: dict[str, int] = {}


@dataclass
class _Work:
    """One job's parts: what the functions below share."""

    params: SelfWriteParams
    verifier: Verifier
    domain: Domain
    progress: Progress
    language: Language | None
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    def tell(self, fraction: float, text: str) -> None:
        if self.progress.stopping():
            raise Stopped("writing was stopped; nothing was kept")
        spent = time.monotonic() - self.began
        self.progress.update(fraction, text, spent / fraction - spent if fraction else None)


def self_write(
    params: SelfWriteParams, output: Path, progress: Progress | None = None
) -> SelfWriteResult:
    """Write `params.samples` chats and `params.held_out` prompts into the directory `output`.

    The same seed, verifier and machine give the same files. Raises `InputError` for a language that
    can't be told, `DataError` where the verifier does not write usable questions.
    """
    language = Language(params.language) if params.language else None
    device, dtype = fastest()
    verifier = load_verifier(params.verifier, dtype=dtype, device=device)
    work = _Work(params, verifier, DOMAINS[params.domain], progress or Quiet(), language)
    with complete_or_absent(output) as partial:
        questions = _questions(work, params.samples + params.held_out)
        chosen, kept_apart = questions[: params.samples], questions[params.samples :]
        chats = [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
            for question, answer in zip(chosen, _answers(work, chosen), strict=True)
            if answer
        ]
        _write_lines(partial / "chats.jsonl", chats)
        _write_lines(
            partial / "held_out.jsonl",
            ({"prompt": question, "category": params.domain} for question in kept_apart),
        )
        record = {"settings": params.model_dump(mode="json"), "dropped": dict(work.dropped)}
        (partial / "written.json").write_text(json.dumps(record, indent=2) + "\n")
    for reason, number in work.dropped.items():
        work.progress.note(f"dropped {number}: {reason}")
    work.progress.update(1.0, "done")
    return SelfWriteResult(
        output=str(output / "chats.jsonl"),
        held_out=str(output / "held_out.jsonl"),
        samples=len(chats),
        tokens=work.tokens,
        dropped=dict(work.dropped),
    )


def _questions(work: _Work, count: int) -> list[str]:
    """`count` different questions of the domain."""
    params = work.params
    rng = random.Random(params.seed)
    generator = torch.Generator(device=work.verifier.device).manual_seed(params.seed)
    choose = nucleus(params.temperature, params.top_p, generator)
    found: list[str] = []
    unheard = Unheard(params.near_duplicates)
    while len(found) < count:
        wanted = min(params.batch_size, round(1.25 * (count - len(found))) + 4)
        openings = [work.domain.opening(rng) for _ in range(wanted)]
        before = len(found)
        for question in _continue_questions(work, openings, choose):
            if len(found) == count:
                break
            if reason := _wrong_question(work, question) or unheard.judge(question):
                work.dropped[reason] += 1
            else:
                found.append(question)
        if len(found) - before < _LEAST_YIELD * wanted:
            raise DataError(
                f"of {wanted} questions that the verifier wrote, {len(found) - before} are usable",
                where=params.verifier,
                hint="it needs a chat model; another domain or a lower temperature may help",
            )
        work.tell(_QUESTIONS_SHARE * len(found) / count, f"{len(found)} of {count} questions")
    return found


def _wrong_question(work: _Work, question: str) -> str | None:
    """Why a question is dropped, whatever was asked before."""
    if not work.domain.keep(question):
        return "not a whole question of the domain"
    if work.language and not work.language.spoken_in(question):
        return "a question in another language"
    return None


def _wrong_answer(work: _Work, text: str, tokens: int) -> str | None:
    if not text:
        return "an empty answer"
    if tokens < work.params.min_answer_tokens:
        return "an answer that is too short"
    if work.language and not work.language.spoken_in(text):
        return "an answer in another language"
    return None


def _continue_questions(work: _Work, openings: list[str], choose: Any) -> list[str]:
    tokenizer, stop = work.verifier.tokenizer, work.domain.stop
    special = set(tokenizer.all_special_ids)
    head = _user_turn(work)
    prompts = [rendered_ids(tokenizer, head + opening) for opening in openings]

    def ended(ids: list[int]) -> bool:
        tail = tokenizer.decode(ids[-1:]) if stop else ""
        return ids[-1] in special or bool(stop and (stop in tail or "\n" in tail))

    written = write(
        work.verifier,
        prompts,
        work.params.max_prompt_tokens,
        choose,
        ended,
        lambda total, live: _heed(work),
    )
    work.tokens += sum(map(len, written))
    return [
        _cut(opening + _text(work, ids), stop)
        for opening, ids in zip(openings, written, strict=True)
    ]


def _answers(work: _Work, questions: list[str]) -> list[str]:
    """The verifier's own greedy answers, empty where one is dropped; batches of questions of
    similar length."""
    params, tokenizer = work.params, work.verifier.tokenizer
    special = set(tokenizer.all_special_ids)
    prompts = [
        chat_ids(tokenizer, [{"role": "user", "content": question}]) for question in questions
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), params.batch_size):
        batch = order[start : start + params.batch_size]

        def tick(total: int, live: int, start: int = start, size: int = len(batch)) -> None:
            part = min(1.0, total / (size * params.max_answer_tokens))
            done = (start + size * part) / len(order)
            work.tell(
                _QUESTIONS_SHARE + (1 - _QUESTIONS_SHARE) * done,
                f"answers: {start} of {len(order)} done, {live} open",
            )

        written = write(
            work.verifier,
            [prompts[i] for i in batch],
            params.max_answer_tokens,
            greedy,
            lambda ids: ids[-1] in special,
            tick,
        )
        for i, ids in zip(batch, written, strict=True):
            work.tokens += len(ids)
            text = _text(work, ids)
            if reason := _wrong_answer(work, text, len(ids)):
                work.dropped[reason] += 1
            else:
                answers[i] = text
    return answers


def _heed(work: _Work) -> None:
    if work.progress.stopping():
        raise Stopped("writing was stopped; nothing was kept")


def _user_turn(work: _Work) -> str:
    """The rendered chat up to where the user's text begins."""
    system = work.domain.system
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": _MARK})
    text = chat_text(work.verifier.tokenizer, messages, work.params.verifier, opened=False)
    return text.split(_MARK)[0]


def _text(work: _Work, ids: Iterable[int]) -> str:
    return str(work.verifier.tokenizer.decode(list(ids), skip_special_tokens=True))


def _cut(text: str, stop: str | None) -> str:
    """The text up to and with the first `stop`."""
    end = text.find(stop) if stop else -1
    return (text[: end + 1] if end >= 0 else text).strip()


def _write_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as lines:
        for record in records:
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
