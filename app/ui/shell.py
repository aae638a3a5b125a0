"""The pages as one Gradio app, mounted in the web application."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse

from app.services import runs
from app.settings import Settings, settings
from app.ui import convert, data, deploy, home, models, playground, train
from app.ui import runs as runs_page
from app.ui.theme import STYLESHEET, theme
from speculators_core.errors import NotFound

CONCURRENT_EVENTS = 40
"""Of each kind: Gradio's default of one would let a long answer block everyone else's."""
HEAD = '<meta name="viewport" content="width=device-width, initial-scale=1">'
PRIVATE = ("api-token", "secret", "links", "broker", "runs", "logs", "speclab.db", "speculators")


def build() -> gr.Blocks:
    """All pages. Their addresses are in `page.PAGES`."""
    with gr.Blocks(title="Speclab", analytics_enabled=False, fill_width=True) as blocks:
        home.build(blocks)
    for name, path, page in (
        ("Playground", "/playground", playground),
        ("Runs", "/runs", runs_page),
        ("Data", "/data", data),
        ("Convert", "/convert", convert),
        ("Train", "/train", train),
        ("Deploy", "/deploy", deploy),
        ("Models", "/models", models),
    ):
        with blocks.route(name, path):
            page.build(blocks)
    blocks.queue(default_concurrency_limit=CONCURRENT_EVENTS, max_size=512)
    return blocks


def mount(app: FastAPI, *, auth_dependency: Callable[[Request], str | None]) -> FastAPI:
    """Add the pages at / and the whole logs at /runs/ID/log. Call it after all other routes."""
    app.add_api_route("/runs/{run_id}/log", whole_log, include_in_schema=False)
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        build(),
        path="/",
        auth_dependency=auth_dependency,
        blocked_paths=private_paths(settings()),
        footer_links=["settings"],
        run_history=False,
        show_error=False,
        enable_monitoring=False,
        ssr_mode=False,
        max_file_size="512mb",
        theme=theme(),
        css_paths=STYLESHEET,
        head=HEAD,
    )
    return mounted


def whole_log(run_id: str) -> FileResponse:
    """A run's log from its first line on, as a file."""
    runs.get(run_id)
    path = runs.log_path(run_id)
    if not path.exists():
        raise NotFound(f"run {run_id} has written no log yet")
    return FileResponse(path, media_type="text/plain; charset=utf-8", filename=f"{run_id}.log")


def private_paths(current: Settings) -> list[str]:
    """What Gradio's file routes must never serve, whatever a handler returns."""
    return [str(Path(current.home, name)) for name in PRIVATE]
