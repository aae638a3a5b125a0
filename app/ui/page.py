"""The frame of every page: navigation, the health word, and keeping what is shown current."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import gradio as gr

from app.services import health
from app.services.views import RunView
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.live import encode
from app.ui.components.panel import Panel, notice
from speculators_core.errors import SpeclabError

logger = logging.getLogger(__name__)

PAGES = (
    ("Home", "/"),
    ("Playground", "/playground"),
    ("Runs", "/runs"),
    ("Data", "/data"),
    ("Convert", "/convert"),
    ("Train", "/train"),
    ("Deploy", "/deploy"),
    ("Models", "/models"),
)
POLL_SECONDS = 2.0
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""For every event: nothing blinks, and it is no part of the public API."""


@contextmanager
def frame(title: str) -> Iterator[Panel]:
    """Draws the navigation; the page's own parts go inside. Yields the navigation's panel."""
    gr.Navbar(visible=False)
    navigation = Panel(navigation_tree(title, ()), elem_id="nav", elem_classes="sl-nav")
    with gr.Column(elem_classes="sl-page"):
        yield navigation


def navigation_tree(current: str, troubles: Sequence[str]) -> Node:
    """The bar at the top; what is amiss with the lab stands at its end."""
    strokes = (el("span", stroke, cls=cls) for stroke, cls in (("▮", "a"), ("▮", "b"), ("▯", "c")))
    mark = el("span", strokes, cls="mark", aria_hidden="true")
    links = (
        el("a", name, href=path, aria_current="page" if name == current else None)
        for name, path in PAGES
    )
    amiss = state.chip("trouble", "; ".join(troubles)) if troubles else None
    return el(
        "header",
        el("a", mark, "Speclab", href="/", cls="brand"),
        el("nav", links, aria_label="Pages"),
        el("span", amiss, cls="health"),
        cls="bar",
    )


def keep_current(
    blocks: gr.Blocks,
    title: str,
    navigation: Panel,
    read: Callable[..., Sequence[Any]],
    shown: Sequence[Any],
    inputs: Sequence[Any] = (),
) -> None:
    """Fill `shown` when the page opens and every two seconds; only what changed is sent.

    `read(request, *inputs)` gives a tree (or an update as a dict) for each of `shown`.
    """
    digests = gr.State([])

    def tick(request: gr.Request, before: list[int | None], *entered: Any) -> list[Any]:
        values = _attempt_all(lambda: read(request, *entered), len(shown))
        fresh = [navigation_tree(title, troubles()), *values]
        now = [hash(encode(value)) for value in fresh]
        known = before or [None] * len(now)
        sent = [
            gr.skip() if old == new else value
            for old, new, value in zip(known, now, fresh, strict=True)
        ]
        return [gr.skip() if before == now else now, *sent]

    outputs = [digests, navigation, *shown]
    sources = [digests, *inputs]
    blocks.load(tick, sources, outputs, **QUIET)
    gr.Timer(POLL_SECONDS).tick(tick, sources, outputs, **QUIET)


def unfold(blocks: gr.Blocks, fold: gr.Accordion, key: str) -> None:
    """Open the fold of a form where the page's address asks for it: `?form=KEY`."""

    def opened(request: gr.Request) -> Any:
        wanted = request.query_params.get("form") == key
        return gr.Accordion(open=True) if wanted else gr.skip()

    blocks.load(opened, None, fold, **QUIET)


def _attempt_all(read: Callable[[], Sequence[Any]], count: int) -> Sequence[Any]:
    """What `read` gives; where it fails, nothing new but what the log says."""
    try:
        return read()
    except Exception as error:
        logger.error("a page could not be read", exc_info=error)
        return [gr.skip()] * count


def attempt(work: Callable[[], Node]) -> Node:
    """The answer of `work`, or a sentence about why there is none."""
    try:
        return work()
    except Exception as error:
        return problem_of(error)


def problem_of(error: Exception) -> Node:
    """A sentence for a person; what nobody foresaw goes to the log with its traceback."""
    if isinstance(error, SpeclabError):
        return problem(error.as_dict())
    logger.error("a page's handler failed", exc_info=error)
    return notice("error", "Something unforeseen went wrong. The app's log has the details.")


def problem(error: dict[str, Any] | None) -> Node:
    """A stored or raised error in words: what, where, what to do."""
    error = error or {}
    where, hint = error.get("where"), error.get("hint")
    return notice(
        "error",
        str(error.get("message") or "It failed without saying why."),
        *([el("span", f"In {where}.", cls="quiet")] if where else []),
        *([el("span", state.sentence(hint), cls="hint")] if hint else []),
    )


def run_link(run: RunView) -> Node:
    return el("a", run.name, href=f"/runs?run={run.id}")


def user_of(request: gr.Request) -> str:
    """Who is signed in; the guard in front of the app lets nobody else through."""
    return request.username or "local"


def troubles() -> tuple[str, ...]:
    """What is wrong with the lab now, in sentences; at most five seconds old."""
    return _troubles(int(time.monotonic() / 5))


@lru_cache(maxsize=1)
def _troubles(moment: int) -> tuple[str, ...]:
    try:
        complaint = health.check().complaint
    except Exception as error:
        logger.error("the health check failed", exc_info=error)
        complaint = "The store does not answer."
    return (complaint,) if complaint else ()
