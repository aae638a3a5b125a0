"""Convert: someone's EAGLE-3 checkpoint, looked at tensor by tensor, to the speculators format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.services import references, runs
from app.ui.choices import verifier_names
from app.ui.commands import submit_line
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.forms import Form
from app.ui.page import QUIET, SUBMIT, attempt, frame, keep_current, submitted, user_of
from speculators_core.errors import InputError
from speculators_core.params import ConvertParams, JobKind


def build(blocks: gr.Blocks) -> None:
    """The page at /convert."""
    form = Form(ConvertParams)
    with frame("Convert") as navigation:
        Panel(introduction())
        with gr.Row():
            form.draw("checkpoint", "verifier")
        with gr.Row():
            form.draw("aux_layers", "aux_convention", "speculative_tokens")
        with gr.Accordion("Advanced", open=False), gr.Row():
            form.draw("norm_before_residual", "validate_on_verifier")
        with gr.Row(elem_classes="sl-actions"):
            look = gr.Button("Inspect", elem_id="inspect", scale=0)
            go = gr.Button("Convert", variant="primary", elem_id="convert", scale=0)
        command = Panel(elem_id="convert-command")
        answer = Panel(elem_id="convert-answer")

    def inspect(*entered: Any) -> Node:
        return attempt(lambda: inspection_tree(_inspect(form.values(entered))))

    def submit(request: gr.Request, *entered: Any) -> Node:
        return attempt(lambda: _submit(form, entered, user_of(request)))

    look.click(inspect, form.inputs, answer, **QUIET)
    go.click(submit, form.inputs, answer, validator=form.validator(), **SUBMIT)
    form.show_command(command, JobKind.CONVERT, blocks)
    form.open_with(blocks, {"verifier": verifier_names})
    keep_current(blocks, "Convert", navigation, lambda request: [], [])


def introduction() -> Node:
    return el(
        "div",
        el("h1", "Convert"),
        el(
            "p",
            "Bring an EAGLE-3 checkpoint of another layout into the speculators format that vLLM "
            "serves. Inspect shows what every tensor becomes and what the checkpoint leaves open, "
            "before anything is written.",
            cls="lead",
        ),
        cls="stack",
    )


def _inspect(values: Mapping[str, Any]) -> dict[str, Any]:
    if not values.get("checkpoint"):
        raise InputError("Checkpoint: this is needed", hint="enter a path or a hub id")
    references.check_params(JobKind.CONVERT, values)
    return references.inspect_checkpoint(values["checkpoint"], values.get("verifier"))


def _submit(form: Form, entered: Sequence[Any], user: str) -> Node:
    params = form.params(entered).model_dump(mode="json")
    references.check_params(JobKind.CONVERT, params)
    run = runs.submit(JobKind.CONVERT, params, owner=user)
    return submitted(run, submit_line(run.kind, run.params))


def inspection_tree(found: Mapping[str, Any]) -> Node:
    """Layout, doubts, config and tensors of an inspected checkpoint."""
    doubts = found["doubts"]
    return el(
        "div",
        el("div", el("h2", f"Layout: {found['layout']}"), cls="row"),
        [_doubt(doubt) for doubt in doubts],
        None if doubts else notice("success", "Nothing is in doubt."),
        el("h3", f"{len(found['tensors'])} tensors"),
        state.table(
            ["In the checkpoint", "Becomes", "Shape", "Type", "Why"],
            (_tensor(tensor) for tensor in found["tensors"]),
            label="Tensors",
        ),
        el("h3", "Config"),
        state.table(
            ["Field", "Value", "Taken from"],
            (_field(name, entry) for name, entry in found["config"].items()),
            label="Config",
        ),
        cls="stack",
    )


def _doubt(doubt: Mapping[str, Any]) -> Node:
    choices = "; ".join(str(choice) for choice in doubt.get("choices", ()))
    more = (el("span", f"Possible: {choices}", cls="hint"),) if choices else ()
    return notice("warning", str(doubt["about"]), *more)


def _tensor(tensor: Mapping[str, Any]) -> Sequence[Node]:
    shape = " × ".join(str(size) for size in tensor["shape"])
    target = tensor["target"]
    return (
        el("code", tensor["source"] or "–"),
        el("code", target) if target else el("span", "left out", cls="quiet"),
        shape,
        tensor["dtype"],
        el("span", tensor["reason"], cls="quiet"),
    )


def _field(name: str, entry: Mapping[str, Any]) -> Sequence[Node]:
    return (
        el("code", name),
        el("code", str(entry["value"])),
        el("span", str(entry["origin"]), cls="quiet"),
    )
