"""The reference server's middle: models, the queue in front of them, what is counted and traced."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from speculators_core.decode.detokenize import PROMPT_WINDOW, Detokenizer
from speculators_core.decode.drafter import Drafter
from speculators_core.decode.engine import SpeculativeDecoder, Step
from speculators_core.errors import NotFound
from speculators_core.models.verifier import Verifier
from speculators_core.trace import TraceWriter
from workers.reference_api import Body
from workers.reference_metrics import ServerMetrics, Tally

Gone = Callable[[], Awaitable[bool]]


@dataclass
class Answer:
    """One request on its way: who it is, what it asks, what has come of it."""

    id: str  # what the client sees: chatcmpl-X
    rid: str  # what the trace calls it: chatcmpl-X-<8 hex>
    body: Body
    prompt: list[int]
    texts: Detokenizer
    tally: Tally
    created: int = field(default_factory=lambda: int(time.time()))
    began: float = field(default_factory=time.perf_counter)
    finish: str | None = None

    def usage(self) -> dict[str, int]:
        prompt, tokens = len(self.prompt), self.tally.tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }

    def metrics(self) -> dict[str, Any]:
        return {"speculative_decoding": self.tally.told()}


class Service:
    """The models, the queue in front of them, and what is counted and traced."""

    def __init__(self, verifier: Verifier, drafter: Drafter, k: int, served_name: str) -> None:
        self.verifier = verifier
        self.k = k
        self.served_name = served_name
        self.speculative = SpeculativeDecoder(verifier, drafter, k)
        self.plain = SpeculativeDecoder(verifier)
        self.metrics = ServerMetrics(served_name, k)
        self.trace = TraceWriter.from_environment()
        self._turn = asyncio.Lock()  # first come, first served
        # one thread makes every step: torch keeps a team of helpers for each thread that calls it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        config = verifier.model.generation_config.to_diff_dict()
        self._defaults = {n: config[n] for n in ("temperature", "top_p", "top_k") if n in config}

    def admit(self, body: Body, prompt: list[int], kind: str, name: str, part: str) -> Answer:
        """A request that can be answered. Raises `InputError` or `NotFound`."""
        self.speculative.check_prompt(prompt)
        if body.model != self.served_name:
            raise NotFound(f"the model {body.model!r} does not exist, this is {self.served_name!r}")
        return Answer(
            id=f"{kind}-{name}",
            rid=f"{kind}-{name}{part}-{secrets.token_hex(4)}",
            body=body,
            prompt=prompt,
            texts=Detokenizer(self.verifier.tokenizer, prompt),
            tally=Tally(self.k),
        )

    async def steps(self, answer: Answer, gone: Gone) -> AsyncGenerator[Step, None]:
        """Wait for the turn, then yield steps until the answer ends or its client is `gone`."""
        self._tell(answer, "start", **self._start_of(answer))
        try:
            with self.metrics.waiting.track_inprogress():
                await self._turn.acquire()
            try:
                with self.metrics.running.track_inprogress():
                    async for step in self._made(answer, gone):
                        yield step
            finally:
                self._turn.release()
        finally:
            self._end(answer)

    async def _made(self, answer: Answer, gone: Gone) -> AsyncGenerator[Step, None]:
        steps = self._generate(answer)
        self.metrics.prompt(len(answer.prompt))
        try:
            while answer.finish is None and not await gone():
                step = await asyncio.get_running_loop().run_in_executor(self._thread, next, steps)
                if step.index == 0:
                    self.metrics.first_token.observe(time.perf_counter() - answer.began)
                answer.finish = step.finish
                answer.tally.add(step)
                self.metrics.step(step)
                self._tell(answer, "step", **_told(step))
                yield step
        finally:
            self._thread.submit(steps.close)  # in its own thread, after a step that still runs

    def _generate(self, answer: Answer) -> Generator[Step, None, None]:
        decoder = self.plain if answer.body.plain else self.speculative
        room = self.verifier.facts.max_position_embeddings - len(answer.prompt)
        sampling = answer.body.sampling(self._defaults, max(room, 1))
        return decoder.generate(answer.prompt, sampling, () if answer.body.ignore_eos else None)

    def _end(self, answer: Answer) -> None:
        self._tell(answer, "end", status=answer.finish or "abort")
        self.metrics.finished(answer.finish or "abort")
        self.metrics.whole.observe(time.perf_counter() - answer.began)

    def _start_of(self, answer: Answer) -> dict[str, Any]:
        return {
            "k": 0 if answer.body.plain else self.k,
            "prompt_tokens": len(answer.prompt),
            "prompt_tail": answer.prompt[-PROMPT_WINDOW:],
        }

    def _tell(self, answer: Answer, kind: str, **more: Any) -> None:
        if self.trace is not None:
            self.trace.write({"ev": kind, "rid": answer.rid, "t": time.time(), **more})


def _told(step: Step) -> dict[str, Any]:
    """A step as the trace tells it."""
    return {
        "step": step.index,
        "drafted": step.drafted,
        "accepted": step.accepted,
        "emitted": step.emitted,
        "context_len": step.context_len,
        "p_draft": step.p_draft,
        "p_verifier": step.p_verifier,
        "draft_ms": round(step.draft_ms, 3),
        "verify_ms": round(step.verify_ms, 3),
    }
