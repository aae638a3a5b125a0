"""Answers from an OpenAI-compatible server (vLLM, SGLang, a hosted one), asked patiently.

The key comes from the environment variable SPECLAB_ENDPOINT_KEY alone, and goes to the server that
SPECLAB_ENDPOINT_URL names and to no other, whoever asks for one.
A server that is busy (429), broken (5xx) or away is asked again, waiting longer each
time or as long as it says; one that refuses the key or does not know the model ends the work.
Light: no torch.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from speculators_core.errors import Forbidden, NotFound, Unavailable

KEY, URL = "SPECLAB_ENDPOINT_KEY", "SPECLAB_ENDPOINT_URL"
ATTEMPTS = 6
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 60.0
_TIMEOUT = httpx.Timeout(600.0, connect=20.0)  # of a long answer; the first word may wait in line


class Failed(Exception):
    """One request that has no answer, for this reason; others may."""


@dataclass(frozen=True)
class Answer:
    """What the model wrote. `cut`: it was not at its end."""

    message: dict[str, Any]
    tokens: int
    prompt_tokens: int
    cut: bool


class Endpoint:
    """One server. `settings` is the part of a request that is the same in all; without a `model`
    named, `connect` asks for the one that is served.
    """

    def __init__(self, url: str, settings: Mapping[str, Any], model: str | None = None) -> None:
        key = key_for(url)
        self.url, self._settings = url.rstrip("/"), dict(settings)
        self.model = model or ""
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None),
        )

    async def connect(self) -> None:
        """Settle the model. Raises as `_ask` and `Unavailable`."""
        self.model = self.model or await self._served()

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], seed: int
    ) -> Answer:
        """The next turn. Raises `Failed`, and as `_ask`."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "seed": seed,
            **self._settings,
            **({"tools": list(tools), "tool_choice": "none"} if tools else {}),
        }
        return _answer(await self._ask("POST", "/chat/completions", body))

    async def _served(self) -> str:
        """The model of a server that has one."""
        try:
            values = await self._ask("GET", "/models", None)
        except Failed as error:
            raise Unavailable(
                f"the endpoint does not list its models: {error}",
                where=self.url,
                hint="is the URL right, and does it end in /v1? or name the model",
            ) from error
        listed = values.get("data")
        names = [m.get("id") for m in listed if isinstance(m, dict)] if listed else []
        if len(names) != 1 or not isinstance(names[0], str):
            raise NotFound(
                f"the endpoint serves {', '.join(map(str, names)) or 'no model'}",
                where=self.url,
                hint="name the model that is the verifier",
            )
        return names[0]

    async def _ask(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The JSON that a request gives, asked again while that may help.

        Raises `Failed`, `Forbidden` (the key), `NotFound` (model or URL).
        """
        reason = ""
        for attempt in range(ATTEMPTS):
            asked_wait: float | None = None
            try:
                response = await self._client.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                reason = f"the connection failed: {type(error).__name__}"
            else:
                if response.status_code < 400:
                    return _object(response)
                self._refused(response)
                reason, asked_wait = _said(response), _retry_after(response)
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(_wait_s(attempt, asked_wait))
        raise Failed(f"{reason} ({ATTEMPTS} attempts)")

    def _refused(self, response: httpx.Response) -> None:
        """Raise where asking again does not help."""
        status = response.status_code
        if status in (401, 403):
            raise Forbidden(
                f"the endpoint refuses the key: {_said(response)}",
                where=self.url,
                hint=f"set {KEY}, and {URL} to this server, in the environment of whoever asks",
            )
        if status == 404:
            raise NotFound(
                f"the endpoint does not know that: {_said(response)}",
                where=self.url,
                hint="does the URL end in /v1? is the model served there?",
            )
        if status < 500 and status not in (408, 409, 425, 429):
            raise Failed(_said(response))


def key_for(url: str) -> str:
    """The operator's key where this is the operator's server, else nothing."""
    return (os.environ.get(KEY) or "").strip() if is_operators(url) else ""


def is_operators(url: str) -> bool:
    """Whether SPECLAB_ENDPOINT_URL names the same scheme, host and port."""
    named = (os.environ.get(URL) or "").strip()
    return bool(named) and same_server(named, url)


def same_server(one: str, other: str) -> bool:
    """Whether two URLs have the same scheme, host and port; `localhost` is 127.0.0.1."""
    return _server(one) == _server(other)


def _server(url: str) -> tuple[str, str, int | None]:
    parsed = httpx.URL(url)
    port = parsed.port or {"http": 80, "https": 443}.get(parsed.scheme)
    host = "127.0.0.1" if parsed.host == "localhost" else parsed.host
    return parsed.scheme, host, port


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        values = response.json()
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise Failed("the reply is no JSON object")
    return values


def _answer(values: Mapping[str, Any]) -> Answer:
    try:
        choice = values["choices"][0]
        found = choice["message"]
        content = found.get("content") or ""
        reasoning = found.get("reasoning_content") or found.get("reasoning")
        cut = choice.get("finish_reason") == "length"
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failed("the reply holds no message") from None
    if not isinstance(content, str) or not content.strip():
        raise Failed("the answer is empty" + (": it is all reasoning" if reasoning else ""))
    message = {"role": "assistant", "content": content}
    if isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = reasoning
    usage = values.get("usage") or {}
    return Answer(message, _count(usage, "completion_tokens"), _count(usage, "prompt_tokens"), cut)


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0


def _said(response: httpx.Response) -> str:
    """The server's own words, short."""
    try:
        error = response.json().get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = None
    return f"{response.status_code} {str(text or response.reason_phrase)[:200]}"


def _retry_after(response: httpx.Response) -> float | None:
    try:
        wait = float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
    return wait if math.isfinite(wait) and wait >= 0 else None


def _wait_s(attempt: int, asked: float | None) -> float:
    """Seconds until the next attempt: as asked, else twice as long each time, and spread."""
    wait = _FIRST_WAIT_S * 2**attempt * random.uniform(0.75, 1.25) if asked is None else asked
    return min(wait, _LONGEST_WAIT_S)
