"""The web application: REST, the gateway to deployments, and the Gradio pages at `/`.

`uvicorn --factory app.main:create_app`. One process, no torch, no jobs: everything it shows is in
the store, and everything it starts is a row there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Annotated

import httpx
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, RedirectResponse, Response

from app import api, event_log, gateway
from app.auth import SESSION_SECONDS, Gate, current_user, require_loopback
from app.guard import SECURITY_HEADERS, Guard, way_in
from app.services import health
from app.settings import Settings, settings
from speculators_core.errors import (
    Conflict,
    Forbidden,
    InputError,
    NotFound,
    SpeclabError,
    Unavailable,
)

logger = logging.getLogger(__name__)

_STATUS_OF: tuple[tuple[type[SpeclabError], int], ...] = (
    (InputError, 422),
    (NotFound, 404),
    (Conflict, 409),
    (Forbidden, 403),
    (Unavailable, 503),
)


def create_app(*, pages: bool = True) -> FastAPI:
    """The whole application; without `pages` only what programs use (Gradio takes seconds)."""
    current = settings()
    require_loopback(current.host)
    app = FastAPI(
        title="Speclab",
        version=version("speclab"),
        summary="Train, prove, serve and watch speculators.",
        lifespan=_lifespan,
        docs_url="/api/docs",
        openapi_url="/api/openapi.json",
        redoc_url=None,
    )
    gate = Gate.of(current)
    # Gradio leaves CORS alone where its parent has a policy of its own (gradio #13594).
    app.add_middleware(CORSMiddleware, allow_origins=[])
    app.add_middleware(Guard, gate=gate)
    _answer_errors(app)
    _add_entrance(app, gate)
    app.include_router(api.router)
    app.include_router(gateway.router)
    if pages:
        _mount_pages(app, current)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    event_log.configure()
    # No time limit on reading: a server may think for long between two tokens.
    limits = httpx.Timeout(connect=10, read=None, write=60, pool=10)
    async with httpx.AsyncClient(timeout=limits, trust_env=False) as client:
        app.state.deployments = client
        yield


def _mount_pages(app: FastAPI, current: Settings) -> None:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    temporary = current.home / "gradio"  # one for each home: /tmp/gradio is shared by users
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["GRADIO_TEMP_DIR"] = str(temporary)
    from app.ui import shell  # late: Gradio reads the variables above when it is imported

    shell.mount(app, auth_dependency=current_user)


def _add_entrance(app: FastAPI, gate: Gate) -> None:
    @app.get("/healthz", include_in_schema=False)
    def healthz() -> JSONResponse:
        """For probes: 200 while the store and the broker answer. Says nothing private."""
        found = health.check()
        return JSONResponse({"ok": found.ok}, status_code=200 if found.ok else 503)

    @app.get("/enter", include_in_schema=False)
    def enter(request: Request, token: Annotated[str, Query()] = "") -> Response:
        """Trade a one-time link for a session."""
        if not gate.use_link(token):
            if current_user(request):
                return RedirectResponse("/", status_code=303)
            return way_in(403, "This link was used before, or a newer one has replaced it.")
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(
            gate.cookie,
            gate.open_session(),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )
        return response


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(SpeclabError)
    def known(request: Request, error: SpeclabError) -> JSONResponse:
        status = next((s for kind, s in _STATUS_OF if isinstance(error, kind)), 500)
        return JSONResponse({"error": error.as_dict()}, status_code=status)

    @app.exception_handler(RequestValidationError)
    def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        found = InputError(
            f"{where}: {first['msg']}", where=where, hint="see /api/docs for what is expected"
        )
        return JSONResponse({"error": found.as_dict()}, status_code=422)

    @app.exception_handler(HTTPException)
    def plain(request: Request, error: HTTPException) -> JSONResponse:
        found = NotFound if error.status_code == 404 else SpeclabError
        return JSONResponse(
            {"error": found(str(error.detail)).as_dict()},
            status_code=error.status_code,
            headers=error.headers,
        )

    @app.exception_handler(Exception)
    def unforeseen(request: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", exc_info=error, extra={"path": request.url.path})
        found = SpeclabError("an unexpected fault", hint="the app's log has the details")
        # This answer is made outside the guard.
        return JSONResponse({"error": found.as_dict()}, status_code=500, headers=SECURITY_HEADERS)
