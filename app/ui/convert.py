"""Convert: someone's checkpoint, looked at tensor by tensor, to the format that is served."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import gradio as gr

from app.services import conversions, references, runs, speculators
from app.services.views import RunView, SpeculatorView
from app.ui.choices import verifier_names
from app.ui.components import state
from app.ui.components.corrections import corrections_tree
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action
from app.ui.conversion import acceptance, deploy_link
from app.ui.forms import Form
from app.ui.inspection import doubts_tree, params_text, tables_tree, warnings_tree
from app.ui.page import (
    QUIET,
    frame,
    keep_current,
    problem,
    problem_of,
    run_link,
    user_of,
)
from app.ui.submission import submit, told
from speculators_core.errors import InputError, SpeclabError
from speculators_core.params import ConvertParams, JobKind

PAIR = ("checkpoint", "verifier")
SETTLING = tuple(name for name in ConvertParams.model_fields if name not in PAIR)
"""All that a person can settle about a pair."""
MAIN = ("aux_layers", "aux_convention", "speculative_tokens")
RECENT = 8


def build(blocks: gr.Blocks) -> None:
    """The page at /convert."""
    form = Form(ConvertParams)
    with frame("Convert") as navigation:
        Panel(introduction())
        with gr.Row():
            form.draw(*PAIR)
        with gr.Row():
            form.draw(*MAIN)
        with gr.Accordion("Advanced", open=False), gr.Row():
            form.draw(*(name for name in SETTLING if name not in MAIN))
        with gr.Row(elem_classes="sl-actions"):
            look = gr.Button("Inspect", elem_id="inspect", scale=0)
            go = gr.Button("Convert", variant="primary", elem_id="convert", scale=0)
        command = Panel(elem_id="convert-command")
        queued = Panel(elem_id="convert-queued")
        answer = Panel(elem_id="convert-answer")
        recent = Panel(elem_id="conversions")
    seen = gr.State(None)

    def inspect(*entered: Any) -> list[Any]:
        return shown(form, entered, None)

    def choose(event: gr.EventData, before: dict[str, Any] | None, *entered: Any) -> list[Any]:
        try:
            chosen = settle(form, entered, action(event)[1])
        except SpeclabError as error:
            return [before, problem_of(error), *entered[len(PAIR) :]]
        return [*shown(form, chosen, before), *chosen[len(PAIR) :]]

    def convert(request: gr.Request, *entered: Any) -> Node:
        return submit(form, JobKind.CONVERT, entered, user_of(request))

    settings = form.inputs[len(PAIR) :]
    look.click(inspect, form.inputs, [seen, answer], **QUIET)
    answer.click(choose, [seen, *form.inputs], [seen, answer, *settings], **QUIET)
    go.click(convert, form.inputs, queued, **QUIET)
    form.open_with(blocks, {"verifier": verifier_names})
    form.show_command(command, JobKind.CONVERT, blocks)
    keep_current(blocks, "Convert", navigation, lambda request: [_recent()], [recent])


def introduction() -> Node:
    return el(
        "div",
        el("h1", "Convert"),
        el(
            "p",
            "Bring someone's draft into the format that vLLM serves. Inspect shows what every "
            "tensor becomes and what the checkpoint leaves open, before anything is written.",
            cls="lead",
        ),
        cls="stack",
    )


def shown(form: Form, entered: Sequence[Any], before: dict[str, Any] | None) -> list[Any]:
    """What was seen (for the next choice; None where nothing could be), and the tree of it."""
    open_ = {} if "verifier" in form.values(entered) else {"verifier": "not chosen yet"}
    if wrong := form.corrections(entered, **open_):
        return [None, corrections_tree(wrong)]
    try:
        now = examine(form, entered, before)
    except Exception as error:
        return [None, told(error, form)]
    return [now, inspection_tree(now, form, entered)]


def examine(
    form: Form, entered: Sequence[Any], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The pair as it is, with its doubts, and as the form settles it.

    `asked`: checkpoint and verifier; `bare`: the inspection without anything settled, taken from
    `before` where the pair is still the same; `found`: with what the form says, or `bare` where
    that can't be (`problem`).
    """
    values, changed = form.values(entered), form.changed(entered)
    checkpoint, verifier = values["checkpoint"], values.get("verifier")
    references.check_params(JobKind.CONVERT, values)
    asked = [checkpoint, verifier]
    known = before if before and before["asked"] == asked else None
    bare = known["bare"] if known else _bare(checkpoint, verifier)
    settled = {name: value for name, value in changed.items() if name not in PAIR}
    found, wrong = bare, None
    if settled:
        try:
            found = references.inspect_checkpoint(checkpoint, verifier, settled)
        except SpeclabError as error:
            wrong = error.as_dict()
    return {"asked": asked, "bare": bare, "found": found, "problem": wrong}


def _bare(checkpoint: str, verifier: str | None) -> dict[str, Any]:
    """An inspection, with what earlier conversions measured beside each choice."""
    found = references.inspect_checkpoint(checkpoint, verifier)
    measured = conversions.measured(checkpoint, verifier)
    for doubt in found["doubts"]:
        for choice in doubt["choices"]:
            key = conversions.choice_key(choice["params"])
            choice["first_token_acceptance"] = measured.get(key)
    return found


def settle(form: Form, entered: Sequence[Any], chosen: str) -> list[Any]:
    """What the fields hold once a choice (parameters as JSON, None: the default) is made."""
    try:
        params = json.loads(chosen)
        known = {name: value for name, value in params.items() if name in SETTLING}
    except (ValueError, AttributeError) as error:
        raise InputError("this is no choice", hint="press Inspect again") from error
    values = {name: v for name, v in form.values(entered).items() if name not in known}
    return form.entered({**values, **{n: v for n, v in known.items() if v is not None}})


def inspection_tree(seen: Mapping[str, Any], form: Form, entered: Sequence[Any]) -> Node:
    """Layout, doubts first, warnings, tensors and config of what `examine` found."""
    found, changed = seen["found"], form.changed(entered)
    return el(
        "div",
        el("h2", f"Layout: {found['layout']}"),
        problem(seen["problem"]) if seen["problem"] else None,
        doubts_tree(
            seen["bare"]["doubts"],
            lambda params: form.holds(entered, params),
            lambda names: params_text({n: changed[n] for n in names if n in changed}),
        ),
        warnings_tree(found["warnings"]),
        tables_tree(found),
        cls="stack",
    )


def _recent() -> Node:
    past = runs.list_runs(kind=JobKind.CONVERT, limit=RECENT)
    return recent_tree(past.items, {one.name: one for one in speculators.list_speculators()})


def recent_tree(past: Sequence[RunView], known: Mapping[str, SpeculatorView]) -> Node:
    """The last conversions: how they went, and whether what they made can be deployed."""
    if not past:
        return state.empty("Nothing has been converted yet. Paste a checkpoint above.")
    rows = (_row(run, known.get(str((run.result or {}).get("name")))) for run in past)
    headings = ["Conversion", "Checkpoint", "State", "#First tokens accepted", "Deploy", "When"]
    table = state.table(headings, rows, label="Conversions")
    return el("section", el("h2", "Conversions"), table, cls="stack")


def _row(run: RunView, made: SpeculatorView | None) -> Sequence[Node]:
    checkpoint = str(run.params.get("checkpoint", ""))
    return (
        run_link(run),
        el("code", PurePath(checkpoint).name or checkpoint, title=checkpoint),
        state.chip(run.state),
        acceptance((run.result or {}).get("validation")),
        _deploy(run, made),
        state.ago(run.created_at),
    )


def _deploy(run: RunView, made: SpeculatorView | None) -> Node:
    if made is None:
        return ""
    if made.servable:
        return deploy_link(made)
    return el("a", "Decide", href=f"/runs?run={run.id}", title="; ".join(made.obstacles))
