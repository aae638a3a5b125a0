"""The commands that serve a speculator elsewhere, each to be copied: for any of the registered
ones, and for what an export wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import gradio as gr

from app.services import launching
from app.ui.choices import all_speculator_names
from app.ui.components import state
from app.ui.components.corrections import corrections_tree
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.forms import Form, Mirror
from app.ui.page import unfold
from app.ui.submission import answered
from speculators_core.params import LaunchParams

KEY = "launch"
_ENGINES = {
    "vllm": "vLLM",
    "podman": "vLLM in the container of Red Hat AI Inference",
    "sglang": "SGLang",
}


def draw(blocks: gr.Blocks) -> None:
    """Place the folded form here; the lines follow its fields."""
    form = Form(LaunchParams, ids=KEY)
    with gr.Accordion("Serve a speculator elsewhere", open=False, elem_id=f"{KEY}-form") as folded:
        with gr.Row():
            form.draw("speculator", "verifier_name", "speculative_tokens")
        with gr.Row():
            form.draw("image", "gpus", "port")
        lines = Panel(elem_id=f"{KEY}-lines")

    form.open_with(blocks, {"speculator": all_speculator_names})
    mirror = Mirror(blocks, form.inputs, form.filled)
    mirror.change(lambda text: lines_of(form, json.loads(text)), lines)
    unfold(blocks, folded, KEY)


def lines_of(form: Form, entered: list[Any]) -> Node:
    """The lines for what is in the fields, or what is wrong with it."""

    def work() -> Node:
        if wrong := form.corrections(entered):
            return corrections_tree(wrong)
        params = form.params(entered)
        assert isinstance(params, LaunchParams)
        return lines_tree(launching.commands(params).model_dump())

    if not entered[0]:
        return state.empty("Choose a speculator.")
    return answered(work, form)


def lines_tree(commands: Mapping[str, Any]) -> Node:
    """`commands`: those of `speculators_core.launch.Commands`, and what they say beside."""
    told = [
        state.command(str(commands[engine]), title)
        for engine, title in _ENGINES.items()
        if commands.get(engine)
    ]
    notes = [notice("info", _sentence(note)) for note in commands.get("notes") or ()]
    return el(
        "section",
        el("h2", "Launch commands"),
        told or state.empty("No engine serves these files as they are."),
        notes,
        cls="card",
        aria_label="Launch commands",
    )


def _sentence(note: Any) -> str:
    text = str(note)
    return f"{text[:1].upper()}{text[1:]}."
