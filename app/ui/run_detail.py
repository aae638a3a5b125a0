"""One run: its trees, live charts and log kept current; cancel, retry, resume."""

from __future__ import annotations

from typing import Any

import gradio as gr

from app.services import resuming, runs
from app.services.views import LogChunk
from app.ui import conversion, results, run_view
from app.ui.components.chart import Chart, chart_payload
from app.ui.components.elements import Node, el
from app.ui.components.log_view import LogView, log_payload
from app.ui.components.panel import Panel, action, notice
from app.ui.page import POLL_SECONDS, QUIET, attempt, problem_of, run_link, user_of

FAR_BEHIND = 256 * 1024


def build(blocks: gr.Blocks) -> None:
    """The parts that `/runs?run=ID` shows."""
    header = Panel(elem_id="run-header")
    answer = Panel(elem_id="run-answer")
    result = Panel(elem_id="run-result")
    chart = Chart(elem_id="run-chart")
    log = LogView(elem_id="run-log")
    rest = Panel(elem_id="run-rest")
    timer = gr.Timer(POLL_SECONDS)
    position = gr.State({})
    outputs = [position, header, result, chart, log, rest, timer]

    def opened(request: gr.Request) -> list[Any]:
        return refresh(start(request.query_params.get("run", "")))

    def again(at: dict[str, Any]) -> list[Any]:
        return refresh(start(at.get("run", "")))

    def act(event: gr.EventData, request: gr.Request) -> Node:
        return attempt(lambda: _act(*action(event), user=user_of(request)))

    blocks.load(opened, None, outputs, **QUIET)
    timer.tick(refresh, position, outputs, **QUIET)

    def decide(event: gr.EventData, at: dict[str, Any], request: gr.Request) -> Node:
        user = user_of(request)
        return attempt(lambda: conversion.act(*action(event), at.get("run", ""), user))

    header.click(act, None, answer, **QUIET).then(again, position, outputs, **QUIET)
    result.click(decide, position, answer, **QUIET).then(again, position, outputs, **QUIET)
    gr.on([chart.input, log.input], again, position, outputs, **QUIET)


def start(run_id: str) -> dict[str, Any]:
    """Nothing of this run has been shown yet."""
    return {"run": run_id, "after": 0, "end": None, "trees": (None, None, None)}


def refresh(at: dict[str, Any]) -> list[Any]:
    """Updates of position, header, result, chart, log, rest and timer: what changed since `at`,
    which holds the last metric row, the log offset and the hashes of what is shown."""
    if not at.get("run"):
        return [gr.skip()] * 6 + [gr.Timer(active=False)]
    try:
        return _refresh(at)
    except Exception as error:
        return [{**at, "trees": (None, None, None)}, problem_of(error), *[gr.skip()] * 5]


def _refresh(at: dict[str, Any]) -> list[Any]:
    run = runs.get(at["run"])
    rows = runs.metrics(run.id, after=at["after"])
    chunk = _unread(run.id, at["end"])
    trees = run_view.header_tree(run), results.tree(run), run_view.rest_tree(run)
    hashes = tuple(hash(str(tree)) for tree in trees)
    now = {
        "run": run.id,
        "after": rows[-1].id if rows else at["after"],
        "end": chunk.end,
        "trees": hashes,
    }
    header, result, rest = (
        gr.skip() if old == new else tree
        for old, new, tree in zip(at["trees"], hashes, trees, strict=True)
    )
    unread = chunk.end != at["end"]
    return [
        gr.skip() if now == at else now,
        header,
        result,
        chart_payload(run.id, rows, at["after"]) if rows else gr.skip(),
        log_payload(run.id, chunk, reset=chunk.start != at["end"]) if unread else gr.skip(),
        rest,
        gr.Timer(active=not (run.ended and now == at)),
    ]


def _unread(run_id: str, end: int | None) -> LogChunk:
    """The log from `end` on; its tail at first, and where it outruns its reader."""
    chunk = runs.log(run_id, offset=end)
    return runs.log(run_id) if chunk.size - chunk.end > FAR_BEHIND else chunk


def _act(what: str, run_id: str, user: str) -> Node:
    if what == "cancel":
        runs.cancel(run_id, user)
    elif what == "retry":
        again = runs.retry(run_id, user)
        return notice("success", "Queued again as", run_link(again))
    elif what == "resume":
        resuming.resume(run_id, user)
    return el("div")
