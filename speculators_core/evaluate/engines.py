"""What can be measured: our engine in this process, or a server behind an OpenAI-style API."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import httpx

from speculators_core.conversion.pairing import tokenizer_warnings
from speculators_core.decode.eagle import load_eagle
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.ngram import NgramDrafter
from speculators_core.decode.prompt import chat_ids
from speculators_core.errors import InputError, Unavailable
from speculators_core.evaluate.acceptance import Counts, counted
from speculators_core.evaluate.prompts import Prompt
from speculators_core.models.verifier import fastest, load_verifier
from speculators_core.params import EvaluateParams, SamplingParams

NGRAM = "ngram"  # a speculator by this name is the n-gram drafter
_ANSWER_S = 600.0


@dataclass(frozen=True)
class Answer:
    counts: Counts
    seconds: float


class Engine(Protocol):
    """Answers prompts and counts what was accepted."""

    k: int
    notes: Sequence[str]
    """What does not forbid the pair, but should be seen."""

    def answer(self, prompt: Prompt, seed: int, *, plain: bool = False) -> Answer | None:
        """One answer; None where the engine can't decode plainly."""

    def described(self) -> dict[str, Any]:
        """`name`, `version`, `dtype`, `template`: what the numbers depend on."""


def open_engine(params: EvaluateParams) -> Engine:
    """Load the models, or reach the server. Raises what is wrong with either."""
    if params.engine == "reference":
        return ReferenceEngine(params)
    if params.engine.startswith(("http://", "https://")):
        return ServerEngine(params)
    raise InputError(
        f"engine should be `reference` or the URL of a server, found {params.engine!r}",
        where="engine",
        hint="for example http://127.0.0.1:8000",
    )


class ReferenceEngine:
    """Our decoder, where and in what precision `fastest` says."""

    def __init__(self, params: EvaluateParams) -> None:
        device, dtype = fastest()
        self.verifier = load_verifier(params.verifier, dtype=dtype, device=device)
        self.params = params
        self.k = params.speculative_tokens
        ngram = params.speculator == NGRAM
        drafter = NgramDrafter() if ngram else load_eagle(params.speculator, self.verifier)
        draft, facts = Path(params.speculator), self.verifier.facts
        self.notes: Sequence[str] = [] if ngram else tokenizer_warnings(draft, facts)
        self.speculative = SpeculativeDecoder(self.verifier, drafter, self.k)
        self.plain = SpeculativeDecoder(self.verifier)

    def answer(self, prompt: Prompt, seed: int, *, plain: bool = False) -> Answer:
        ids = chat_ids(self.verifier.tokenizer, prompt.messages, prompt.where)
        sampling = SamplingParams(
            temperature=self.params.temperature, max_tokens=self.params.max_tokens, seed=seed
        )
        began = time.perf_counter()
        steps = list((self.plain if plain else self.speculative).generate(ids, sampling))
        seconds = time.perf_counter() - began
        return Answer(counted(steps, self.k), seconds)

    def described(self) -> dict[str, Any]:
        return {
            "name": "reference",
            "version": _own_version(),
            "dtype": str(self.verifier.model.dtype).removeprefix("torch."),
            "template": "chat template of the verifier",
        }


class ServerEngine:
    """A server that tells each request's speculation, as vLLM does when it is started with
    `--per-request-spec-decode-metrics detailed`, and our reference server always."""

    def __init__(self, params: EvaluateParams) -> None:
        self.params = params
        self.k = params.speculative_tokens
        self.notes: Sequence[str] = ()
        key = os.environ.get("SPECLAB_SERVER_KEY")
        self.client = httpx.Client(
            base_url=params.engine.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=10.0),
            trust_env=False,
        )
        models = self._ask("GET", "/v1/models")["data"]
        self.model = str(models[0]["id"])
        self.version = self._version()

    def answer(self, prompt: Prompt, seed: int, *, plain: bool = False) -> Answer | None:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(prompt.messages),
            "temperature": self.params.temperature,
            "top_p": 1.0,
            "max_tokens": self.params.max_tokens,
            "seed": seed,
        }
        if plain:
            body["vllm_xargs"] = {"speculate": "0"}
        began = time.perf_counter()
        reply = self._ask("POST", "/v1/chat/completions", body)
        seconds = time.perf_counter() - began
        tokens = int(reply["usage"]["completion_tokens"])
        told = (reply.get("metrics") or {}).get("speculative_decoding")
        if plain:  # a server that doesn't know the switch has drafted all the same
            drafted = bool(told and told.get("num_draft_tokens"))
            return None if drafted else Answer(Counts(tokens=tokens), seconds)
        return Answer(self._counts(told, tokens), seconds)

    def described(self) -> dict[str, Any]:
        return {
            "name": self.params.engine,
            "version": self.version,
            "dtype": "as the server was started",
            "template": "chat template of the server",
        }

    def _counts(self, told: dict[str, Any] | None, tokens: int) -> Counts:
        """Per-request metrics as counts; arrays are missing where no step drafted."""
        if told is None:
            raise Unavailable(
                "the server does not tell what it accepted: no metrics.speculative_decoding",
                where=self.params.engine,
                hint="start vLLM with --per-request-spec-decode-metrics detailed",
            )
        self.k = int(told.get("num_spec_tokens") or self.k)
        histogram = told.get("acceptance_histogram")
        if histogram is None:
            accepted = Counter(told.get("per_step_accepted") or ())
            histogram = [accepted[a] for a in range(self.k + 1)] if accepted else []
        if sum(histogram) == 0 and told.get("num_spec_steps"):
            raise Unavailable(
                f"the server counted {told['num_spec_steps']} steps but gives no histogram",
                where=self.params.engine,
                hint="start vLLM with --per-request-spec-decode-metrics detailed",
            )
        return Counts(tuple(histogram), int(told.get("num_draft_tokens") or 0), tokens)

    def _version(self) -> str | None:
        try:
            return str(self._ask("GET", "/version").get("version"))
        except Unavailable:
            return None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self.client.request(method, path, json=body)
            reply.raise_for_status()
            value: dict[str, Any] = reply.json()
        except httpx.HTTPStatusError as error:
            raise Unavailable(
                f"{path} answered {error.response.status_code}: {error.response.text[:300]}",
                where=self.params.engine,
            ) from error
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(
                f"the server can't be reached: {error}",
                where=self.params.engine,
                hint="is it running, and is this the address of an OpenAI-compatible server?",
            ) from error
        return value


def _own_version() -> str:
    try:
        return version("speclab")
    except PackageNotFoundError:
        return "unknown"
