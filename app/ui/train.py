"""Train: data, verifier and a few numbers become a chain of runs (self-write, prepare, train)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.services import references, runs
from app.services.views import RunView
from app.ui.choices import verifier_names
from app.ui.commands import submit_line
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.forms import Form
from app.ui.page import QUIET, SUBMIT, attempt, frame, keep_current, run_link, user_of
from app.ui.training_data import DataChoice, data_section
from app.ui.training_presets import PRESETS, preset_values
from speculators_core.params import JobKind, TrainParams

MAIN = ("epochs", "max_minutes", "lr", "tokens_per_batch", "ttt_steps")
ADVANCED = tuple(
    name for name in TrainParams.model_fields if name not in {"data", "verifier", *MAIN}
)


def build(blocks: gr.Blocks) -> None:
    """The page at /train."""
    form = Form(TrainParams, {"data": "run:PREPARED"})
    with frame("Train") as navigation:
        Panel(introduction())
        with gr.Row():
            form.draw("verifier")
            preset = gr.Radio(
                list(PRESETS),
                value=PRESETS[0],
                label="Preset",
                info="Quick: minutes, to see the whole way once. Demo: what the demo does",
                elem_id="preset",
            )
        data = data_section(blocks)
        with gr.Row():
            form.draw(*MAIN)
        with gr.Accordion("Advanced", open=False), gr.Row():
            form.draw(*ADVANCED)
        with gr.Row(elem_classes="sl-actions"):
            go = gr.Button("Train", variant="primary", elem_id="train", scale=0)
        command = Panel(elem_id="train-command")
        answer = Panel(elem_id="train-answer")

    split = len(data.inputs)

    def check(*entered: Any) -> list[Any]:
        return [*data.marks(entered[:split]), *form.marks(entered[split:])]

    def submit(request: gr.Request, *entered: Any) -> Node:
        def work() -> Node:
            choice, values = data.choice(entered[:split]), form.values(entered[split:])
            return chain_tree(submit_chain(choice, values, user_of(request)))

        return attempt(work)

    def choose(name: str) -> list[Any]:
        chosen = preset_values(name)
        return [*data.entered(chosen), *form.entered(chosen.get(JobKind.TRAIN, {}))[1:]]

    go.click(submit, [*data.inputs, *form.inputs], answer, validator=check, **SUBMIT)
    preset.input(choose, preset, [*data.preset_inputs, *form.inputs[1:]], **QUIET)
    form.show_command(command, JobKind.TRAIN, blocks)
    form.open_with(blocks, {"verifier": verifier_names})
    keep_current(blocks, "Train", navigation, lambda request: [], [])


def introduction() -> Node:
    return el(
        "div",
        el("h1", "Train"),
        el(
            "p",
            "Train an EAGLE-3 speculator for a verifier. Answers that the verifier wrote itself "
            "teach the most: what it will be asked to predict is what the verifier says.",
            cls="lead",
        ),
        cls="stack",
    )


def submit_chain(choice: DataChoice, values: Mapping[str, Any], user: str) -> list[RunView]:
    """Submit what is missing before the training, then the training; each needs the one before."""
    verifier = str(values["verifier"])
    references.check_params(JobKind.TRAIN, {**values, "data": "run:PREPARED"})
    chain: list[RunView] = []
    prepared = choice.prepared
    if prepared is None:
        prepared = _submit_data(choice, verifier, user, chain)
    training = {**values, "data": prepared}
    chain.append(runs.submit(JobKind.TRAIN, training, owner=user))
    return chain


def _submit_data(choice: DataChoice, verifier: str, user: str, chain: list[RunView]) -> str:
    chats = choice.chats
    if chats is None:
        writing = {**choice.self_write, "verifier": verifier}
        chain.append(runs.submit(JobKind.SELF_WRITE, writing, owner=user))
        chats = f"run:{chain[-1].id}"
    preparing = {**choice.prepare, "data": [chats], "verifier": verifier}
    references.check_params(JobKind.PREPARE, preparing)
    chain.append(runs.submit(JobKind.PREPARE, preparing, owner=user))
    return f"run:{chain[-1].id}"


def chain_tree(chain: Sequence[RunView]) -> Node:
    """The runs that a form has become, in their order, and the same from a terminal."""
    links = [part for run in chain for part in (el("span", "→", cls="quiet"), run_link(run))][1:]
    lines = [submit_line(run.kind, run.params) for run in chain]
    return el(
        "div",
        notice("success", "Queued:", *links),
        [state.command(line, f"{i}. from a terminal") for i, line in enumerate(lines, 1)],
        cls="stack",
    )
