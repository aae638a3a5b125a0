"""The reference engine behind an OpenAI-compatible API.

    python -m workers.reference_server --verifier DIR [--speculator DIR] --speculative-tokens K
                                       --port P --served-name NAME

Routes, request ids, per-request metrics and metric names are vLLM's, so a deployment of it looks
the same from outside. Answers are made one at a time, in the order of arrival; a client that
leaves ends its answer at the next step. Without a speculator it drafts n-grams. Steps go to the
trace socket where `SPECLAB_TRACE_SOCKET` names one; `SPECLAB_SERVER_KEY`, where set, guards /v1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any, get_args

import torch
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from speculators_core.decode.eagle import load_eagle
from speculators_core.decode.ngram import NgramDrafter
from speculators_core.decode.prompt import chat_ids, text_ids
from speculators_core.errors import Forbidden, NotFound, SpeclabError
from speculators_core.models.verifier import fastest, load_verifier
from speculators_core.params import DeployParams
from workers.reference_api import Body, ChatBody, CompletionBody
from workers.reference_replies import Chat, Completion, reply
from workers.reference_service import Service

KEY_VARIABLE = "SPECLAB_SERVER_KEY"
_GRACE_S = 5  # for open answers when the server is asked to stop
_STATUS: dict[type[SpeclabError], int] = {Forbidden: 401, NotFound: 404}


def application(service: Service) -> FastAPI:
    """The routes over a service."""
    app = FastAPI(title="Speclab reference engine", docs_url=None, redoc_url=None)
    guarded = [Depends(_guard(os.environ.get(KEY_VARIABLE)))]

    @app.exception_handler(SpeclabError)
    async def refuse(_request: Request, error: SpeclabError) -> Response:
        return _refusal(_STATUS.get(type(error), 400), str(error))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_request: Request, error: RequestValidationError) -> Response:
        return _refusal(400, _sentence(error.errors()[0]))

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": f"reference, torch {torch.__version__}"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        model = {
            "id": service.served_name,
            "object": "model",
            "owned_by": "speclab",
            "max_model_len": service.verifier.facts.max_position_embeddings,
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(body: ChatBody, request: Request) -> Response:
        prompt = chat_ids(service.verifier.tokenizer, body.turns())
        answer = service.admit(body, prompt, "chatcmpl", _name(body, request), "")
        return await reply(service, answer, request, Chat)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        given = body.prompt
        prompt = text_ids(service.verifier.tokenizer, given) if isinstance(given, str) else given
        answer = service.admit(body, prompt, "cmpl", _name(body, request), "-0")
        return await reply(service, answer, request, Completion)

    return app


def _guard(key: str | None) -> Any:
    """A dependency that lets in only who sends the key; everyone where there is none."""

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not secrets.compare_digest(given.encode(), key.encode()):
            raise Forbidden("the API key is missing or wrong")

    return check


def _name(body: Body, request: Request) -> str:
    """The client's own id where it gave one; the header wins, as in vLLM."""
    return request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex


def _refusal(status: int, message: str) -> JSONResponse:
    kind = {401: "Unauthorized", 404: "NotFoundError"}.get(status, "BadRequestError")
    error = {"message": message, "type": kind, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _sentence(error: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
    if error["type"] == "extra_forbidden":
        return f"the reference engine does not support {place}"
    return f"{place}: {error['msg']}, found {str(error.get('input'))[:80]!r}"


def load(
    verifier_dir: str, speculator_dir: str | None, k: int | None, name: str, dtype: str
) -> Service:
    """Load both models, in the precision that is named or else is fast here. K defaults to what
    the speculator's config proposes, or 3 for n-grams."""
    device, fast = fastest()
    wanted = fast if dtype == "auto" else getattr(torch, dtype)
    verifier = load_verifier(verifier_dir, dtype=wanted, device=device)
    if speculator_dir is None:
        return Service(verifier, NgramDrafter(), k or 3, name)
    drafter = load_eagle(speculator_dir, verifier)
    return Service(verifier, drafter, k or drafter.draft.config.speculative_tokens, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 asked to stop, 1 could not start."""
    parser = argparse.ArgumentParser(prog="python -m workers.reference_server")
    parser.add_argument("--verifier", required=True)
    parser.add_argument("--speculator")
    parser.add_argument("--speculative-tokens", type=int)
    asked = DeployParams.model_fields["dtype"]
    parser.add_argument("--dtype", choices=get_args(asked.annotation), default=asked.default)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-name", required=True)
    chosen = parser.parse_args(arguments)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", chosen.port))  # a busy port shows before models load
            k = chosen.speculative_tokens
            service = load(chosen.verifier, chosen.speculator, k, chosen.served_name, chosen.dtype)
        except (OSError, SpeclabError) as error:
            sys.stderr.write(f"ERROR: the reference server can't start: {error}\n")
            return 1
        config = uvicorn.Config(
            application(service), log_level="info", timeout_graceful_shutdown=_GRACE_S
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
