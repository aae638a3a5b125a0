"""How the reference server words its answers: whole, or as server-sent events, like vLLM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from speculators_core.decode.engine import Step
from workers.reference_service import Answer, Service


class Chat:
    """How a chat's answer is laid out."""

    whole, piece = "chat.completion", "chat.completion.chunk"

    @staticmethod
    def opening() -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    @staticmethod
    def part(text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    @staticmethod
    def all(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


class Completion:
    """How a plain completion is laid out."""

    whole = piece = "text_completion"

    @staticmethod
    def opening() -> dict[str, Any] | None:
        return None

    @staticmethod
    def part(text: str) -> dict[str, Any]:
        return {"text": text}

    all = part


Layout = type[Chat] | type[Completion]


async def reply(service: Service, answer: Answer, request: Request, layout: Layout) -> Response:
    """Answer a request whole, or as a stream where it asked for one."""
    if answer.body.stream:
        events = _events(service, answer, request, layout)
        return StreamingResponse(events, media_type="text/event-stream")
    text, tokens = "", list[int]()
    async with contextlib.aclosing(service.steps(answer, request.is_disconnected)) as steps:
        async for step in steps:
            text += _text(answer, step)
            tokens += step.emitted
    choice = _choice(answer, layout.all(text), tokens, answer.finish)
    body = _envelope(service, answer, layout.whole, [choice])
    return JSONResponse({**body, "usage": answer.usage(), "metrics": answer.metrics()})


async def _events(
    service: Service, answer: Answer, request: Request, layout: Layout
) -> AsyncIterator[str]:
    """Server-sent events, a chunk a step, as vLLM lays them out."""

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        body = _envelope(service, answer, layout.piece, choices)
        return f"data: {json.dumps({**body, **more}, ensure_ascii=False)}\n\n"

    if opening := layout.opening():
        yield chunk([_choice(answer, opening, [], None)])
    async with contextlib.aclosing(service.steps(answer, request.is_disconnected)) as steps:
        async for step in steps:
            part = layout.part(_text(answer, step))
            yield chunk([_choice(answer, part, step.emitted, step.finish)])
    if answer.body.stream_options.include_usage:
        yield chunk([], usage=answer.usage(), metrics=answer.metrics())
    yield "data: [DONE]\n\n"


def _text(answer: Answer, step: Step) -> str:
    _, pieces = answer.texts.step((), 0, step.emitted)
    return "".join(pieces) + (answer.texts.finish() if step.finish else "")


def _choice(
    answer: Answer, content: dict[str, Any], tokens: Sequence[int], finish: str | None
) -> dict[str, Any]:
    ids = {"token_ids": list(tokens)} if answer.body.return_token_ids else {}
    return {"index": 0, **content, **ids, "finish_reason": finish}


def _envelope(
    service: Service, answer: Answer, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": service.served_name,
        "choices": choices,
    }
