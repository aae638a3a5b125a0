"""What every request passes before it reaches a route, a page or Gradio.

Deny by default: the Host must name this machine (DNS rebinding), an unsafe request must come from
our own pages (CSRF), and whoever asks must have a session or a token, except at `/healthz` and
`/enter`. Every answer carries the security headers. Plain ASGI, so that streams stay streams.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth import Gate, is_loopback

OPEN_PATHS = frozenset({"/healthz", "/enter"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Gradio's HTML component evaluates its (constant) templates: hence 'unsafe-eval'.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "SAMEORIGIN",
    "referrer-policy": "same-origin",
}


class Guard:
    """ASGI middleware, outermost of all."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        refusal = self._refusal(connection, scope)
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4401})
        else:
            await refusal(scope, receive, _with_headers(send))

    def _refusal(self, connection: HTTPConnection, scope: Scope) -> Response | None:
        if not _names_this_machine(connection):
            return _error(403, "forbidden", "this address is not one that Speclab answers to")
        if _unsafe(scope) and not _from_our_pages(connection):
            return _error(403, "forbidden", "the request comes from another site's page")
        user = self._gate.user_of(connection)
        scope.setdefault("state", {})["user"] = user
        if user or scope["path"] in OPEN_PATHS:
            return None
        wants_page = scope.get("method") == "GET" and "text/html" in connection.headers.get(
            "accept", ""
        )
        return way_in(401) if wants_page and not _for_programs(scope["path"]) else _unknown()


def way_in(status: int, message: str = "This browser has no session here yet.") -> HTMLResponse:
    """The page for someone without a session: how to get one."""
    return HTMLResponse(_WAY_IN.replace("MESSAGE", html.escape(message)), status_code=status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def _names_this_machine(connection: HTTPConnection) -> bool:
    """Any port: people forward another one through SSH."""
    host = urlsplit(f"//{connection.headers.get('host', '')}").hostname
    return host is not None and is_loopback(host)


def _unsafe(scope: Scope) -> bool:
    return scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS


def _from_our_pages(connection: HTTPConnection) -> bool:
    """Browsers say where an unsafe request comes from; programs that are none say nothing."""
    headers = connection.headers
    if "authorization" in headers and "cookie" not in headers:
        return True  # nothing that a foreign page could make a browser send along
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


def _for_programs(path: str) -> bool:
    return path.startswith(("/api/", "/gradio_api/", "/deployments/"))


def _unknown() -> Response:
    return _error(
        401,
        "unauthenticated",
        "no session and no valid token",
        "open the link of `speclab status --link`, or send the bearer token of "
        "SPECLAB_HOME/api-token",
    )


def _error(status: int, kind: str, message: str, hint: str | None = None) -> JSONResponse:
    error = {"kind": kind, "message": message, "where": None, "hint": hint}
    return JSONResponse({"error": error}, status_code=status)


_WAY_IN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Speclab</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark }
body { font: 1rem/1.6 system-ui, sans-serif; max-width: 34rem; margin: 15vh auto; padding: 0 1rem }
code { padding: .15em .4em; border: 1px solid color-mix(in srgb, currentColor 30%, transparent) }
</style></head><body>
<h1>Speclab</h1>
<p>MESSAGE</p>
<p>Open the link that <code>speclab up</code> printed. It works once; this prints a new one:</p>
<p><code>speclab status --link</code></p>
</body></html>
"""
