"""The reference engine: draft → verify → accept, one request at a time.

Every step drafts up to K tokens, has the verifier read them in one pass behind the last settled
token, accepts the longest prefix that the verifier's distribution allows, and takes one more token
from the verifier itself. Without a drafter the same loop is plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from speculators_core.decode.drafter import Draft, Drafter, Drafting
from speculators_core.decode.sampling import Sampler
from speculators_core.decode.verify import Verifying, check_cacheable
from speculators_core.errors import InputError
from speculators_core.models.verifier import Verifier
from speculators_core.params import SamplingParams

Source = Literal["draft", "verifier"]
Finish = Literal["stop", "length"]

PREFILL_CHUNK = 512  # prompt tokens a pass: bounds memory, changes nothing else


@dataclass(frozen=True, slots=True)
class Step:
    """One decoding step, as the trace tells it (docs/architecture.md).

    `accepted` counts the drafted tokens that the verifier let stand; `emitted` is those plus one
    of its own, cut where the request ended. Probabilities and times belong to `drafted` and to
    this step; `context_len` is the tokens settled before it. The first step reads the prompt and
    drafts nothing.
    """

    index: int
    drafted: tuple[int, ...]
    p_draft: tuple[float, ...] | None
    p_verifier: tuple[float, ...]
    accepted: int
    emitted: tuple[int, ...]
    context_len: int
    draft_ms: float
    verify_ms: float
    finish: Finish | None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Who each emitted token came from."""
        return tuple("draft" if i < self.accepted else "verifier" for i in range(len(self.emitted)))


class SpeculativeDecoder:
    """Decodes with a verifier and a drafter (None: plainly), K tokens drafted a step.

    The output has the verifier's own distribution, whatever the drafter proposes; at temperature
    0 it is the verifier's greedy output. Drafts always run to K, also where `max_tokens` will cut
    them, as in vLLM. Raises `PairingError` for a verifier whose cache can't be rewound.
    """

    def __init__(
        self, verifier: Verifier, drafter: Drafter | None = None, speculative_tokens: int = 3
    ) -> None:
        check_cacheable(verifier)
        self.verifier = verifier
        self.drafter = drafter if speculative_tokens > 0 else None
        self.speculative_tokens = speculative_tokens

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Generator[Step, None, None]:
        """Yield the steps of one answer; the last has `finish`.

        `stop_ids` end it (None: the verifier's own; empty: nothing does); the stopping token is
        emitted. Raises `InputError` for a prompt that is empty, too long, or no tokens of this
        verifier, before anything runs.
        """
        sampling = sampling or SamplingParams()
        self.check_prompt(prompt_ids)
        stops = frozenset(self.verifier.stop_ids if stop_ids is None else stop_ids)
        return self._steps(list(prompt_ids), sampling, stops)

    def _steps(
        self, prompt: list[int], sampling: SamplingParams, stops: frozenset[int]
    ) -> Generator[Step, None, None]:
        aux_layers = self.drafter.aux_layers if self.drafter else ()
        with self.verifier.watching(aux_layers) as seen:
            limit = self.verifier.facts.max_position_embeddings
            capacity = min(limit, len(prompt) + sampling.max_tokens + self.speculative_tokens)
            verifying = Verifying(self.verifier, capacity, seen, aux_layers)
            request = _Request(self, prompt, sampling, stops, verifying)
            step = request.prefill()
            yield step
            while step.finish is None:
                step = request.step()
                yield step

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise `InputError` for a prompt that `generate` would refuse."""
        facts = self.verifier.facts
        if not prompt:
            raise InputError("the prompt is empty", hint="give at least one token")
        if len(prompt) >= facts.max_position_embeddings:
            raise InputError(
                f"the prompt has {len(prompt)} tokens; the verifier's context is "
                f"{facts.max_position_embeddings}, and one must be left for the answer",
                hint="shorten the prompt",
            )
        wrong = next((t for t in prompt if not 0 <= t < facts.vocab_size), None)
        if wrong is not None:
            raise InputError(
                f"token {wrong} is not in the verifier's vocabulary of {facts.vocab_size}",
                hint="was the prompt tokenised for another model?",
            )


class _Request:
    """One answer in the making: what is settled, and both models' caches."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt: list[int],
        sampling: SamplingParams,
        stops: frozenset[int],
        verifying: Verifying,
    ) -> None:
        self.k = decoder.speculative_tokens
        self.context = prompt
        self.stops = stops
        self.capacity = verifying.store.capacity
        self.left = sampling.max_tokens
        self.sampler = Sampler(sampling, decoder.verifier.device)
        self.verifying = verifying
        self.drafting: Drafting | None = None
        if decoder.drafter:
            self.drafting = decoder.drafter.begin(prompt[0], self.capacity, self.sampler)
        self.news: tuple[Sequence[int], Tensor | None] = ((), None)
        self.index = 0

    @torch.inference_mode()
    def step(self) -> Step:
        """Draft, verify, accept."""
        began = time.perf_counter()
        draft = self._draft()
        drafted = time.perf_counter()
        logits = self.verifying.read([self.context[-1], *draft.ids], logits_of=len(draft.ids) + 1)
        verdict = self.sampler.judge(logits, draft.ids, draft.q)
        aux = self.verifying.keep(verdict.accepted + 1)
        verified = time.perf_counter()
        settled = (*draft.ids[: verdict.accepted], verdict.token)
        self.news = settled, aux
        return self._settle(
            draft, verdict.accepted, verdict.p, settled, drafted - began, verified - drafted
        )

    @torch.inference_mode()
    def prefill(self) -> Step:
        """Read the prompt; its last logits give the first token."""
        began = time.perf_counter()
        prompt = self.context
        starts = range(0, len(prompt), PREFILL_CHUNK)
        for start in starts:
            chunk = prompt[start : start + PREFILL_CHUNK]
            logits = self.verifying.read(chunk, logits_of=1)
            aux = self.verifying.keep(len(chunk))
            self.news = prompt[start + 1 : start + 1 + len(chunk)], aux
            if start != starts[-1]:
                self._absorb()
        token = self.sampler.judge(logits, (), None).token
        self.news = [*self.news[0], token], aux
        return self._settle(Draft(), 0, (), (token,), 0.0, time.perf_counter() - began)

    def _draft(self) -> Draft:
        room = self.capacity - len(self.context) - 1  # one place is for the verifier's own token
        if self.drafting is None or room < 1:
            return Draft()
        self._absorb()
        return self.drafting.propose(min(self.k, room))

    def _absorb(self) -> None:
        if self.drafting is not None:
            self.drafting.absorb(*self.news)

    def _settle(
        self,
        draft: Draft,
        accepted: int,
        p_verifier: tuple[float, ...],
        settled: tuple[int, ...],
        draft_s: float,
        verify_s: float,
    ) -> Step:
        """Count the settled tokens as the answer's, up to where it ends."""
        before = len(self.context)
        emitted, finish = self._cut(settled)
        self.context.extend(emitted)
        self.left -= len(emitted)
        self.index += 1
        return Step(
            index=self.index - 1,
            drafted=draft.ids,
            p_draft=draft.p,
            p_verifier=p_verifier,
            accepted=accepted,
            emitted=emitted,
            context_len=before,
            draft_ms=1000 * draft_s,
            verify_ms=1000 * verify_s,
            finish=finish,
        )

    def _cut(self, settled: tuple[int, ...]) -> tuple[tuple[int, ...], Finish | None]:
        room = min(self.left, self.capacity - len(self.context))
        for i, token in enumerate(settled[:room]):
            if token in self.stops:
                return settled[: i + 1], "stop"
        return settled[:room], "length" if len(settled) >= room else None
