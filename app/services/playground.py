"""A chat with a deployment, watched step by step.

The answer's text comes from the deployment over HTTP, its decoding steps from the broker stream
that the deployment's job writes. Both are joined by a request id that is ours: it is made, and the
stream's end noted, before the request is sent. Numbers are computed from the steps (FORMATS 4.7)
and compared with the server's own at the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from sqlalchemy import select

from app.services import deployments
from app.services.answer import Answer
from app.services.steps import StepReader, Tally
from app.services.views import DeploymentView, GenerationView, View
from app.store.engine import reading, writing
from app.store.models import Generation, TraceMode
from speculators_core.errors import NotFound, SpeclabError, Unavailable
from speculators_core.params import SamplingParams

UPDATES_PER_SECOND = 30
_TICK_S = 1 / UPDATES_PER_SECOND
_TRACE_PATIENCE_S = 3.0  # text without steps for so long: the trace is missing
_LAST_STEPS_S = 2.0  # how long the end of the trace may trail the end of the answer
_COUNTS_ONLY = "The server tells how many drafts it rejected, not which."

State = Literal["waiting", "streaming", "done", "stopped", "failed"]


class PlaygroundUpdate(View):
    """What changed since the last update. `seq` counts from 0 without gaps; `reset` starts anew.

    `steps` are the stream's step records since the last update; `text` is the whole answer so far,
    as the server sent it; `message` is for a person.
    """

    run: str
    seq: int
    reset: bool
    steps: tuple[dict[str, Any], ...]
    numbers: dict[str, Any]
    state: State
    message: str
    text: str


def generate(
    deployment_id: str,
    messages: Sequence[Mapping[str, str]],
    sampling: SamplingParams,
    *,
    user: str,
    plain: bool = False,
) -> Iterator[PlaygroundUpdate]:
    """Stream one answer, at most 30 updates a second; the last has a final state.

    `plain` asks the same server to decode without speculation. Closing the iterator ends the
    request on the server. What goes wrong after the first update is told in it (`failed`), never
    raised. Raises `NotFound` and `Unavailable` for a deployment that can't answer.
    """
    deployment = deployments.get(deployment_id)
    if not deployment.ready:
        raise Unavailable(
            f"the deployment {deployment.name} is not ready "
            f"({deployment.phase.value if deployment.phase else deployment.state.value})",
            hint="wait until it is, or choose another one",
        )
    return _Conversation(deployment, messages, sampling, user=user, plain=plain).updates()


def generation(generation_id: str, user: str) -> GenerationView:
    """One of the user's own answers. Raises `NotFound`."""
    with reading() as session:
        row = session.get(Generation, generation_id)
        if row is None or row.user != user:
            raise NotFound(f"there is no answer {generation_id!r} of yours")
        return GenerationView.model_validate(row)


def list_generations(user: str, limit: int = 50) -> list[GenerationView]:
    """The user's own answers, newest first."""
    mine = select(Generation).where(Generation.user == user)
    with reading() as session:
        rows = session.scalars(mine.order_by(Generation.created_at.desc()).limit(limit))
        return [GenerationView.model_validate(row) for row in rows]


class _Conversation:
    """One answer on its way."""

    def __init__(
        self,
        deployment: DeploymentView,
        messages: Sequence[Mapping[str, str]],
        sampling: SamplingParams,
        *,
        user: str,
        plain: bool,
    ) -> None:
        self.id = f"play-{secrets.token_hex(8)}"
        self.deployment = deployment
        self.messages = [dict(message) for message in messages]
        self.sampling = sampling
        self.user = user
        self.plain = plain
        self.tally = Tally()
        self.state: State = "waiting"
        self.message = ""
        self.sequence = 0
        self.steps: list[dict[str, Any]] = []
        self._sent_steps = 0
        self._started = time.monotonic()

    def updates(self) -> Iterator[PlaygroundUpdate]:
        traced = self.deployment.trace_mode is not TraceMode.OFF
        reader = StepReader(self.deployment.id, self.id) if traced else None
        answer = Answer(self.deployment, self.id, self.messages, self.sampling, plain=self.plain)
        ended = False
        try:
            yield self._update(answer)
            yield from self._follow(answer, reader)
            ended = True
        finally:
            answer.close()
            if not ended:
                self._end(answer, "stopped")
            self._keep(answer)
        yield self._update(answer)

    def _follow(self, answer: Answer, reader: StepReader | None) -> Iterator[PlaygroundUpdate]:
        shown = 0
        while not self._complete(answer, reader):
            tick = time.monotonic()
            self._take(reader)
            answer.take(0.0 if reader else _TICK_S)
            if self.state == "waiting" and (answer.text or self.steps):
                self.state = "streaming"
            self._say(answer, reader)
            if len(self.steps) > self._sent_steps or len(answer.text) > shown:
                shown = len(answer.text)
                yield self._update(answer)
            time.sleep(max(0.0, tick + _TICK_S - time.monotonic()))
        self._end(answer, "failed" if answer.error else "done", reader)

    def _take(self, reader: StepReader | None) -> None:
        for record in reader.take() if reader else ():
            self.tally.add(record)
            if record["ev"] == "step":
                self.steps.append(record)

    def _complete(self, answer: Answer, reader: StepReader | None) -> bool:
        if not answer.ended:
            return False
        waits = reader is not None and not reader.lost and not self.tally.ended
        return not waits or time.monotonic() > answer.ended + _LAST_STEPS_S

    def _say(self, answer: Answer, reader: StepReader | None) -> None:
        """What a person must know while the answer streams."""
        if reader is None:
            self.message = "This deployment publishes no trace: plain text, without colour."
        elif reader.lost:
            self.message = f"The trace can't be read ({reader.lost}): plain text, without colour."
        elif answer.text and not self.steps and answer.age > _TRACE_PATIENCE_S:
            self.message = "No trace arrives for this answer: plain text, without colour."
        elif self.steps:
            self.message = self._limits

    def _end(self, answer: Answer, state: State, reader: StepReader | None = None) -> None:
        self.state = state
        if state == "failed":
            self.message = answer.error or "The answer ended without a reason."
        elif state == "done" and reader is not None and not reader.lost:
            self.message = self._doubt(answer)

    def _doubt(self, answer: Answer) -> str:
        """The first thing about the steps that is not as it should be; empty when all is well."""
        if answer.text and not self.steps:
            return "No trace arrived for this answer: plain text, without colour."
        dropped = self.tally.dropped
        missing = self.tally.missing
        if dropped or missing:
            return (
                f"{max(dropped, missing)} steps of the trace were dropped so that the server "
                "would not wait: colours and numbers are incomplete."
            )
        server = answer.server_counts
        if server and not self.tally.agrees(server):
            return "The server counted other acceptance numbers than the trace shows."
        if not self.plain and self.tally.tokens > 1 and not self.tally.steps:
            return "Nothing was drafted for this answer: speculation was inactive."
        return self._limits

    @property
    def _limits(self) -> str:
        return _COUNTS_ONLY if self.deployment.trace_mode is TraceMode.COUNTS else ""

    def _update(self, answer: Answer) -> PlaygroundUpdate:
        fresh = tuple(self.steps[self._sent_steps :])
        update = PlaygroundUpdate(
            run=self.id,
            seq=self.sequence,
            reset=self.sequence == 0,
            steps=fresh,
            numbers=self._numbers(answer),
            state=self.state,
            message=self.message,
            text=answer.text,
        )
        self.sequence += 1
        self._sent_steps = len(self.steps)
        return update

    def _numbers(self, answer: Answer) -> dict[str, Any]:
        numbers = self.tally.numbers()
        if not self.steps:  # no trace: what the text stream alone can tell
            numbers |= {"tokens": answer.tokens, "tokens_per_second": answer.tokens_per_second}
        return numbers

    def _keep(self, answer: Answer) -> None:
        """Remember the answer for its author; a store that is away costs only the memory."""
        numbers = self._numbers(answer) | {"server": answer.server_counts, "state": self.state}
        try:
            with writing() as session:
                session.add(
                    Generation(
                        id=self.id,
                        user=self.user,
                        deployment_id=self.deployment.id,
                        messages=self.messages,
                        sampling=self.sampling.model_dump(mode="json"),
                        plain=self.plain,
                        text=answer.text,
                        steps=self.steps,
                        numbers=numbers,
                    )
                )
        except SpeclabError as error:
            self.message = self.message or f"The answer could not be stored: {error.message}"
