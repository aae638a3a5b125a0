"""Data: what the lab has to train and to measure on, and how to add and make more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

import gradio as gr

from app.services import capacity, data_sets, references, uploads
from app.services.names import checked
from app.services.views import DataSetView
from app.ui import caches, data_set
from app.ui.capacity import estimate_tree
from app.ui.choices import chats_names, verifier_names
from app.ui.components import state
from app.ui.components.corrections import Correction, corrections_tree, sentence_of
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.job_form import JobForm
from app.ui.page import QUIET, attempt, frame, keep_current, unfold
from speculators_core.data.rows import SUFFIXES
from speculators_core.errors import InputError, SpeclabError
from speculators_core.params import JobKind, Params, PrepareParams

FORMS = (
    JobForm(
        JobKind.PREPARE,
        "prepare",
        "Prepare: chats to tokens and masks",
        "Prepare",
        rows=(
            ("data", "weights"),
            ("verifier", "seq_length", "draft_vocab_size", "validation_fraction"),
        ),
        choices={"data": chats_names, "verifier": verifier_names},
        about="Several sources are mixed by their weights. A source is a data set of the lab, a "
        "path, or a hub id, which is downloaded first.",
        needs=lambda params: estimate_tree(_preparing(params), "Preparing will take"),
        require=lambda params: _preparing(params).require(),
    ),
    JobForm(
        JobKind.SELF_WRITE,
        "self-write",
        "Let the verifier write chats",
        "Write",
        rows=(
            ("verifier", "domain", "samples", "held_out"),
            ("max_prompt_tokens", "max_answer_tokens", "temperature", "top_p"),
        ),
        choices={"verifier": verifier_names},
        about="No data at all is needed: the verifier writes the questions and answers them.",
    ),
    JobForm(
        JobKind.REGENERATE,
        "regenerate",
        "Regenerate answers with the verifier",
        "Regenerate",
        rows=(
            ("data", "verifier", "samples"),
            ("endpoint", "model", "concurrency"),
            ("temperature", "top_p", "max_tokens"),
        ),
        choices={"data": chats_names, "verifier": verifier_names},
        about="The same questions with the verifier's own answers: what a draft has to predict.",
    ),
)


def build(blocks: gr.Blocks) -> None:
    """The page at /data; `?set=NAME` shows one data set, `?form=KEY` opens a form."""
    with frame("Data") as navigation:
        with gr.Column(elem_id="data-list", elem_classes="sl-page") as everything:
            Panel(introduction())
            known = Panel(elem_id="data-sets")
            _adding(blocks)
            for form in FORMS:
                form.draw(blocks)
            caches.draw(blocks)
        with gr.Column(elem_id="data-set", elem_classes="sl-page", visible=False) as one:
            data_set.build(blocks)

    def choose(request: gr.Request) -> list[Any]:
        single = bool(request.query_params.get("set"))
        return [gr.Column(visible=not single), gr.Column(visible=single)]

    blocks.load(choose, None, [everything, one], **QUIET)
    keep_current(
        blocks,
        "Data",
        navigation,
        lambda request: [sets_table(data_sets.list_data_sets())],
        [known],
    )


def introduction() -> Node:
    return el(
        "div",
        el("h1", "Data"),
        el(
            "p",
            "Chats become tokens and loss masks before a draft learns from them. Look at any "
            "sample token by token: what is trained is what the assistant wrote.",
            cls="lead",
        ),
        cls="stack",
    )


def _adding(blocks: gr.Blocks) -> None:
    with gr.Accordion("Add chats", open=False, elem_id="add-form") as folded:
        with gr.Row():
            file = gr.File(
                label="Upload a file of chats", file_types=list(SUFFIXES), elem_id="add-file"
            )
            with gr.Column():
                path = gr.Textbox(
                    label="Or a path",
                    info="A file on this machine; it is copied into the lab",
                    max_lines=1,
                    elem_id="add-path",
                )
                name = gr.Textbox(
                    label="Name", info="Empty: the file's", max_lines=1, elem_id="add-name"
                )
        with gr.Row(elem_classes="sl-actions"):
            go = gr.Button("Add", variant="primary", elem_id="add", scale=0)
        answer = Panel(elem_id="add-answer")
    go.click(add, [file, path, name], answer, **QUIET)
    unfold(blocks, folded, "add")


def add(file: str | None, path: str, name: str) -> Node:
    """Check and keep chats that were uploaded or lie at a path; says what became of them."""

    def work() -> Node:
        if not (file or path.strip()):
            sentence = "Upload a file, or name the path of one."
            return corrections_tree([Correction("add-file", "File", sentence)])
        try:
            source = file or references.check_path(path.strip())
        except SpeclabError as error:
            return corrections_tree([Correction("add-path", "Path", sentence_of(error))])
        try:
            called = checked(name.strip()) if name.strip() else None
        except InputError as error:
            return corrections_tree([Correction("add-name", "Name", sentence_of(error))])
        made = uploads.keep_chats(source, called)
        link = el("a", made.name, href=_address(made))
        return notice("success", f"{made.samples:,} chats are kept as", link)

    return attempt(work)


def sets_table(found: Sequence[DataSetView]) -> Node:
    """All data sets: what they hold, how large they are, where they come from."""
    if not found:
        return state.empty(
            "No data yet. Add chats below, or let the verifier write some: that needs no data."
        )
    rows = (
        (
            el("a", one.name, href=_address(one)),
            one.kind,
            f"{one.samples:,}",
            _counted(one.facts.get("tokens")),
            state.size(capacity.size_of(one)),
            str(one.facts.get("verifier") or "–"),
            el("a", "run", href=f"/runs?run={one.run_id}") if one.run_id else "added",
            _use(one),
            state.ago(one.created_at),
        )
        for one in found
    )
    headings = [
        "Name",
        "Kind",
        "#Samples",
        "#Tokens",
        "#Size",
        "Verifier",
        "Origin",
        "Use",
        "Added",
    ]
    return state.table(headings, rows, label="Data sets")


def _use(one: DataSetView) -> Node:
    query = urlencode({"data": one.name}, quote_via=quote)
    if one.kind == "prepared":
        return el("a", "Train on it", href=f"/train?{query}")
    if one.kind == "prompts":
        return el("a", "Evaluate on it", href=f"/models?form=evaluate&{query}")
    return el("a", "Prepare", href=f"/data?form=prepare&{query}")


def _address(one: DataSetView) -> str:
    return f"/data?{urlencode({'set': one.name}, quote_via=quote)}"


def _counted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def _preparing(params: Params) -> Any:
    assert isinstance(params, PrepareParams)
    references.check_params(JobKind.PREPARE, params.model_dump(mode="json"))
    return capacity.of_preparing(params.data)
