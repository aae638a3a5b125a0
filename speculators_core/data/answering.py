"""Chats answered anew, turn after turn, by a server or by the verifier in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from speculators_core.data.chats import Chat
from speculators_core.data.endpoint import KEY, URL, Answer, Endpoint, Failed, key_for
from speculators_core.data.template import ChatTemplate, Unmaskable
from speculators_core.data.writer import greedy, nucleus, write
from speculators_core.errors import Stopped
from speculators_core.models.verifier import Verifier, fastest, fingerprint_of, load_verifier
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import RegenerateParams
from speculators_core.progress import Progress

Turns = list[dict[str, Any]]
_HEED_S = 0.5  # between looks at whether to stop


@dataclass(frozen=True)
class Task:
    """A chat to answer. `done`: the share of the data that is read with it."""

    id: str
    number: int
    chat: Chat
    done: float


@dataclass
class Outcome:
    """What became of a task: messages, or why there are none."""

    task: Task
    messages: Turns | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    cut: int = 0
    reason: str = ""

    def add(self, answer: Answer) -> dict[str, Any]:
        self.tokens += answer.tokens
        self.prompt_tokens += answer.prompt_tokens
        self.cut += answer.cut
        return answer.message


Outcomes = Generator[Outcome, None, None]


class Answering(Protocol):
    """Who answers."""

    @property
    def model(self) -> str: ...

    @property
    def identity(self) -> str:
        """Which model that is: the name that is served, or the verifier's fingerprint."""

    def outcomes(self, tasks: Iterable[Task]) -> Outcomes:
        """What becomes of each task, in whatever order they end. Closed early, it gives up what
        is under way."""


def conversation(chat: Chat) -> Generator[Turns, dict[str, Any], Turns]:
    """The chat with new answers: yields each history that wants one, is sent the answer, returns
    all turns. What an assistant said before anything was asked stays as it is.
    """
    told: Turns = []
    for message in chat.messages:
        if message.role != "assistant" or not any(turn["role"] == "user" for turn in told):
            told.append(message.as_dict())
        elif told[-1]["role"] != "assistant":
            told.append((yield list(told)))
    if told and told[-1]["role"] != "assistant":
        told.append((yield list(told)))
    return told


@contextmanager
def answering(params: RegenerateParams, progress: Progress) -> Iterator[Answering]:
    """The endpoint where one is named, else the verifier itself."""
    if not params.endpoint:
        yield InProcess(params, progress)
        return
    if os.environ.get(KEY) and not key_for(params.endpoint):
        progress.note(f"{KEY} is not sent: {URL} does not name this endpoint")
    loop = asyncio.new_event_loop()
    endpoint = Endpoint(params.endpoint, _asked_for(params), params.model)
    try:
        loop.run_until_complete(endpoint.connect())
        yield Served(endpoint, params, progress, loop)
    finally:
        loop.run_until_complete(endpoint.close())
        loop.close()


def identity(params: RegenerateParams, progress: Progress) -> str:
    """Which model would answer; a verifier is not loaded for that."""
    if not params.endpoint:
        return fingerprint_of(read_verifier(params.verifier))
    with answering(params, progress) as who:
        return who.identity


def _asked_for(params: RegenerateParams) -> dict[str, Any]:
    """The part of a request that is the same in all."""
    thinking = params.enable_thinking
    switch = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    sampling = params.model_dump(include={"temperature", "top_p", "max_tokens"})
    return {**sampling, **switch}


class Served:
    """Many chats at once; a chat's turns follow each other."""

    def __init__(
        self,
        endpoint: Endpoint,
        params: RegenerateParams,
        progress: Progress,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._endpoint, self._params, self._progress = endpoint, params, progress
        self._loop = loop
        self.model = endpoint.model
        self.identity = f"served as {endpoint.model}"

    def outcomes(self, tasks: Iterable[Task]) -> Outcomes:
        waiting = iter(tasks)
        open_: set[asyncio.Task[Outcome]] = set()
        try:
            while True:
                free = self._params.concurrency - len(open_)
                begun = islice(waiting, free)
                open_ |= {self._loop.create_task(self._one(task)) for task in begun}
                if not open_:
                    return
                ended, open_ = self._loop.run_until_complete(
                    asyncio.wait(open_, timeout=_HEED_S, return_when=asyncio.FIRST_COMPLETED)
                )
                errors = [error for task in ended if (error := task.exception())]
                for task in ended:
                    if not task.exception():
                        yield task.result()  # what was paid for is kept, whatever else went wrong
                if errors:
                    raise errors[0]
                if self._progress.stopping():
                    raise Stopped("answering was stopped")
        finally:
            self._loop.run_until_complete(_give_up(open_))

    async def _one(self, task: Task) -> Outcome:
        outcome, turns = Outcome(task), conversation(task.chat)
        try:
            history = next(turns)
            while True:
                seed = self._params.seed + task.number
                answer = await self._endpoint.answer(history, task.chat.tools, seed)
                history = turns.send(outcome.add(answer))
        except Failed as error:
            outcome.reason = str(error)
        except StopIteration as end:
            outcome.messages = end.value
        return outcome


async def _give_up(tasks: Iterable[asyncio.Task[Outcome]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class InProcess:
    """As many chats at once as `concurrency` says, by batched decoding. What is sampled depends on
    which chats share a batch; greedy answers don't.
    """

    def __init__(self, params: RegenerateParams, progress: Progress) -> None:
        device, dtype = fastest()
        self._params, self._progress = params, progress
        self._verifier: Verifier = load_verifier(params.verifier, dtype=dtype, device=device)
        self._template = ChatTemplate(
            self._verifier.tokenizer,
            frozenset(self._verifier.stop_ids),
            params.enable_thinking,
        )
        self._template.check()
        self.model = params.verifier
        self.identity = self._verifier.fingerprint
        self._stopped = False
        self._done = 0.0  # share of the data that is behind this batch

    def outcomes(self, tasks: Iterable[Task]) -> Outcomes:
        waiting = iter(tasks)
        while batch := list(islice(waiting, self._params.concurrency)):
            for outcome in self._batch(batch):
                if outcome.messages is not None or outcome.reason:
                    yield outcome  # what was finished is kept, whatever was under way
            if self._stopped:
                raise Stopped("answering was stopped")
            self._done = batch[-1].done

    def _batch(self, tasks: list[Task]) -> list[Outcome]:
        generator = torch.Generator(device=self._verifier.device)
        generator.manual_seed(self._params.seed + tasks[0].number)
        done = [Outcome(task) for task in tasks]
        turns = {i: conversation(task.chat) for i, task in enumerate(tasks)}
        histories = {i: next(turn) for i, turn in turns.items()}
        while histories and not self._stopped:
            answers = self._answers(histories, done, generator)
            histories = {}
            for i, answer in answers.items():
                try:
                    histories[i] = turns[i].send(done[i].add(answer))
                except StopIteration as end:
                    done[i].messages = end.value
        return done

    def _answers(
        self, histories: dict[int, Turns], done: list[Outcome], generator: torch.Generator
    ) -> dict[int, Answer]:
        """An answer to each history; a chat that can't have one is told why in `done`."""
        params, tokenizer = self._params, self._verifier.tokenizer
        prompts: dict[int, list[int]] = {}
        for i, history in histories.items():
            try:
                text = self._template.render(history, done[i].task.chat.tools, opened=True)
            except Unmaskable as error:
                done[i].reason = error.message
                continue
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            room = self._verifier.facts.max_position_embeddings - len(ids)
            if room < params.max_tokens:
                done[i].reason = "the chat is longer than the verifier's context"
            else:
                prompts[i] = ids
        stops = self._template.stops
        sampled = nucleus(params.temperature or 1.0, params.top_p, generator)
        written = write(
            self._verifier,
            list(prompts.values()),
            params.max_tokens,
            sampled if params.temperature else greedy,
            lambda ids: ids[-1] in stops,
            self._heed,
        )
        answers = {}
        for (i, prompt), ids in zip(prompts.items(), written, strict=True):
            if self._stopped and ids[-1] not in stops and len(ids) < params.max_tokens:
                continue
            text = str(tokenizer.decode(ids, skip_special_tokens=True))
            if text.strip():
                message = {"role": "assistant", "content": text}
                answers[i] = Answer(message, len(ids), len(prompt), ids[-1] not in stops)
            else:
                done[i].reason = "the answer is empty"
        return answers

    def _heed(self, total: int, live: int) -> bool:
        """Whether to go on."""
        self._progress.update(self._done, f"{total} tokens written, {live} answers open")
        self._stopped = self._progress.stopping()
        return not self._stopped
