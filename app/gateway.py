"""`/deployments/{id}/v1/…`: a deployment's OpenAI-compatible API, for people who are let in here.

The servers themselves listen on loopback only. Bodies and answers are streamed through as they
are; cookies and credentials of this application stay here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from app.services import deployments
from speculators_core.errors import InputError, Unavailable

router = APIRouter(tags=["gateway"])
_ROUTE = "/deployments/{deployment_id}/v1/{path:path}"

_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade"),  # hop by hop (RFC 9110, 7.6.1)
        *("host", "content-length", "cookie", "set-cookie", "authorization", "origin", "referer"),
    }
)


@router.get(_ROUTE, operation_id="get_from_deployment")
@router.post(_ROUTE, operation_id="post_to_deployment")
async def forward(deployment_id: str, path: str, request: Request) -> StreamingResponse:
    """Pass a request on to the server of a deployment that is ready."""
    target = await run_in_threadpool(_target, deployment_id, path)
    client: httpx.AsyncClient = request.app.state.deployments
    outgoing = client.build_request(
        request.method,
        httpx.URL(target, query=request.url.query.encode()),
        headers=_forwarded(request.headers.items()),
        content=request.stream() if request.method == "POST" else None,
    )
    try:
        answer = await client.send(outgoing, stream=True, follow_redirects=False)
    except httpx.TransportError as error:
        raise Unavailable(
            f"deployment {deployment_id} does not answer: {error}",
            hint="its log, on the Deploy page, says why",
        ) from error
    return StreamingResponse(
        _body(answer),
        status_code=answer.status_code,
        headers=dict(_forwarded(answer.headers.multi_items())),
    )


def _target(deployment_id: str, path: str) -> str:
    if any(part in (".", "..") for part in path.split("/")):
        raise InputError("a path with dot segments", where=path, hint="give the route itself")
    endpoint = deployments.get(deployment_id).endpoint
    if endpoint is None:
        raise Unavailable(
            f"deployment {deployment_id} has no server now",
            hint="wait until it is ready, or deploy it again",
        )
    return f"{endpoint}/v1/{quote(path)}"


def _forwarded(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Closing the stream, also when the client left, makes the server abort the request."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()
