"""From a message in the playground to updates of its views: asking, streaming, comparing."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.services import deployments, playground
from app.services.playground import PlaygroundUpdate
from app.services.views import DeploymentView
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from app.ui.components.token_view import ended_payload, token_payload
from app.ui.page import problem_of
from speculators_core.errors import InputError
from speculators_core.params import SamplingParams

SPECULATIVE, PLAIN = "With speculation", "Plain decoding"
SLIDERS = (
    ("temperature", 0.0, 2.0, 0.05),
    ("top_p", 0.05, 1.0, 0.05),
    ("max_tokens", 16, 1024, 16),
)


def stream(
    user: str,
    deployment_id: str | None,
    system: str,
    text: str,
    plain: bool,
    compare: bool,
    *sampling: float,
) -> Iterator[list[Any]]:
    """Updates of both views, the verdict, Send and Stop, until the answer ends or is stopped."""
    yield [gr.skip(), None if not compare else gr.skip(), el("div"), *_buttons(busy=True)]
    try:
        question = _Question.of(user, deployment_id, system, text, sampling)
        yield from question.answers(plain=plain, compare=compare)
    except Exception as error:
        yield [gr.skip(), gr.skip(), problem_of(error), *_buttons(busy=False)]
    else:
        yield [*[gr.skip()] * 3, *_buttons(busy=False)]


def _buttons(*, busy: bool) -> list[gr.Button]:
    return [gr.Button(visible=not busy), gr.Button(visible=busy)]


def stopped() -> list[Any]:
    """After Stop: the request to the server has been closed with its stream."""
    told = ended_payload("stopped")
    return [told, told, gr.skip(), *_buttons(busy=False)]


@dataclass(frozen=True)
class _Question:
    user: str
    deployment: DeploymentView
    messages: tuple[dict[str, str], ...]
    sampling: SamplingParams

    @classmethod
    def of(
        cls,
        user: str,
        deployment_id: str | None,
        system: str,
        text: str,
        sampling: Sequence[float],
    ) -> _Question:
        if not deployment_id:
            raise InputError("no deployment is chosen", hint="start one on the Deploy page")
        if not text.strip():
            raise InputError("the message is empty", hint="write something to the model")
        turns = [("system", system.strip()), ("user", text)]
        messages = tuple({"role": role, "content": said} for role, said in turns if said)
        values = dict(zip((name for name, *_ in SLIDERS), sampling, strict=True))
        return cls(
            user,
            deployments.get(deployment_id),
            messages,
            SamplingParams.model_validate({**values, "max_tokens": int(values["max_tokens"])}),
        )

    def answers(self, *, plain: bool, compare: bool) -> Iterator[list[Any]]:
        once = yield from self._in_place(0, plain)
        if compare and not plain and once and once.state == "done":
            twice = yield from self._in_place(1, True)
            if twice and twice.state == "done":
                told = comparison(once, twice, greedy=self.sampling.temperature == 0)
                yield [gr.skip(), gr.skip(), told, gr.skip(), gr.skip()]

    def _in_place(
        self, place: int, plain: bool
    ) -> Generator[list[Any], None, PlaygroundUpdate | None]:
        last = None
        for update, shown in self._answer(plain):
            last = update
            yield [shown if place == at else gr.skip() for at in range(5)]
        return last

    def _answer(self, plain: bool) -> Iterator[tuple[PlaygroundUpdate, dict[str, Any]]]:
        coloured = False
        updates = playground.generate(
            self.deployment.id, self.messages, self.sampling, user=self.user, plain=plain
        )
        with closing(updates):  # type: ignore[type-var]
            for update in updates:
                coloured = coloured or bool(update.steps)
                shown = token_payload(
                    update, PLAIN if plain else SPECULATIVE, plain=plain, coloured=coloured
                )
                if update.state == "done" and not plain and not update.numbers["drafted"]:
                    shown["message"] = why_nothing_drafted(self.deployment, update.message)
                yield update, shown


def why_nothing_drafted(deployment: DeploymentView, told: str) -> str:
    """In words, why an answer has no draft tokens."""
    if not deployment.speculator:
        reason = (
            "the n-gram drafter proposes only what stood in the conversation before, and nothing "
            "was repeated."
        )
        return f"Nothing was drafted: {reason}"
    return (
        told or "Nothing was drafted, so speculation was inactive: the deployment's log says why."
    )


def comparison(once: PlaygroundUpdate, twice: PlaygroundUpdate, *, greedy: bool) -> Node:
    """Whether both texts are the same, and how much faster the first came."""
    fast, slow = _speed(once), _speed(twice)
    faster = f" Speculation decoded {fast / slow:.2f} times as fast." if fast and slow else ""
    if once.text == twice.text:
        return notice("success", f"Both texts are identical, character for character.{faster}")
    at = next(
        (i for i, (a, b) in enumerate(zip(once.text, twice.text, strict=False)) if a != b),
        min(len(once.text), len(twice.text)),
    )
    if not greedy:
        told = "The texts differ: at a temperature above 0 both are samples, so they may."
        return notice("info", told + faster)
    told = (
        f"The greedy texts differ from character {at + 1} on: near-ties of the verifier's logits "
        "can do that."
    )
    return notice("warning", told + faster)


def _speed(update: PlaygroundUpdate) -> float:
    return float(update.numbers.get("tokens_per_second") or 0.0)
