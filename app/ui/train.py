"""Train: data, verifier and a few numbers become a chain of runs (self-write, prepare, train)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.services import references, runs
from app.services.views import RunView
from app.ui import training_fields
from app.ui.capacity import of_chain, require_room
from app.ui.choices import speculator_names, verifier_names
from app.ui.commands import submit_line, yaml_tree
from app.ui.components import state
from app.ui.components.corrections import corrections_tree
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, notice
from app.ui.forms import Form, Mirror
from app.ui.page import QUIET, attempt, frame, keep_current, problem_of, run_link, user_of
from app.ui.submission import answered
from app.ui.training_data import DataChoice, DataSection, data_section
from app.ui.training_presets import NAMES, expectation, values_of
from speculators_core.params import JobKind, Params, TrainParams, parse_params

PREPARED = "run:PREPARED"
"""Stands for data that does not exist yet."""


def build(blocks: gr.Blocks) -> None:
    """The page at /train."""
    form = Form(TrainParams)
    start = values_of(NAMES[0])
    with frame("Train") as navigation:
        Panel(introduction())
        with gr.Row():
            form.draw(*training_fields.TOP)
        preset = gr.Radio(
            NAMES, value=NAMES[0], label="Preset", info="Fills the fields below", elem_id="preset"
        )
        expected = Panel(expectation(NAMES[0]), elem_id="expectation")
        data = data_section(blocks, start)
        training_fields.draw(form, start[JobKind.TRAIN])
        needed = Panel(elem_id="train-estimate")
        with gr.Row(elem_classes="sl-actions"):
            go = gr.Button("Train", variant="primary", elem_id="train", scale=0)
        answer = Panel(elem_id="train-answer")
        command = Panel(elem_id="train-command")

    split, kept = len(data.inputs), len(training_fields.TOP)

    def submit(request: gr.Request, *entered: Any) -> Node:
        def work() -> Node:
            wrong = form.corrections(entered[split:], data=PREPARED)
            if wrong := [*data.corrections(entered[:split]), *wrong]:
                return corrections_tree(wrong)
            values = form.values(entered[split:])
            params = form.params(entered[split:], data=PREPARED)
            seen = data.seen(entered[:split], arrived=True)
            require_room(seen, params)
            return chain_tree(submit_chain(data.choice(entered[:split]), values, user_of(request)))

        return answered(work, form, data.writing, data.preparing)

    def choose(name: str) -> list[Any]:
        chosen = values_of(name)
        return [
            expectation(name),
            *data.entered(chosen),
            *form.entered(chosen.get(JobKind.TRAIN, {}))[kept:],
        ]

    def follow(text: str) -> list[Node]:
        try:
            return followed(data, form, json.loads(text))
        except Exception as error:
            return [problem_of(error), el("div")]

    go.click(submit, [*data.inputs, *form.inputs], answer, **QUIET)
    preset.input(choose, preset, [expected, *data.preset_inputs, *form.inputs[kept:]], **QUIET)
    form.open_with(
        blocks,
        {"verifier": verifier_names, "start_from": speculator_names},
        empty=("start_from",),
    )
    mirror = Mirror(blocks, [*data.inputs, *form.inputs], [*form.filled, *data.filled])
    mirror.change(follow, [needed, command])
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


def followed(data: DataSection, form: Form, entered: Sequence[Any]) -> list[Node]:
    """What the form as it is would take, and how the same is asked for elsewhere."""
    split = len(data.inputs)
    choice = data.seen(entered[:split])
    values = {**form.values(entered[split:]), "data": choice.prepared or PREPARED}
    problems = form.problems(entered[split:], data=values["data"])
    if problems:
        whole = problems.get("")
        told = notice("warning", whole) if whole else el("div")
        return [told, commands_tree(choice, values)]
    params = form.params(entered[split:], data=values["data"])
    return [attempt(lambda: of_chain(choice, params)), commands_tree(choice, values, params)]


def commands_tree(
    choice: DataChoice, values: Mapping[str, Any], params: Params | None = None
) -> Node:
    """The command lines of the chain, and the training as YAML once it is valid."""
    lines = [submit_line(kind, chosen) for kind, chosen in chain(choice, values)]
    return el(
        "div",
        [state.command(line, _numbered(i, len(lines))) for i, line in enumerate(lines, 1)],
        yaml_tree(params) if params else None,
        cls="stack",
    )


def _numbered(i: int, count: int) -> str:
    if count == 1:
        return "Same from a terminal"
    return f"{i}. from a terminal" + (", with the ids of the runs before it" if i > 1 else "")


def chain(choice: DataChoice, values: Mapping[str, Any]) -> list[tuple[JobKind, dict[str, Any]]]:
    """Kind and parameters of each run that is missing; each stands for the run before it by
    `run:KIND`, as nothing is submitted yet."""
    verifier = values.get("verifier")
    training = {**values, "data": choice.prepared or PREPARED}
    if choice.prepared:
        return [(JobKind.TRAIN, training)]
    found = []
    chats = choice.chats
    if chats is None:
        found.append((JobKind.SELF_WRITE, {**choice.self_write, "verifier": verifier}))
        chats = "run:WRITTEN"
    preparing = {**choice.prepare, "data": [chats], "verifier": verifier}
    return [*found, (JobKind.PREPARE, preparing), (JobKind.TRAIN, training)]


def submit_chain(choice: DataChoice, values: Mapping[str, Any], user: str) -> list[RunView]:
    """Submit what is missing before the training, then the training; each needs the one before."""
    planned = chain(choice, values)
    for kind, params in planned:  # typed first: one `held_out` is a count, another one names a file
        references.check_params(kind, parse_params(kind, params).model_dump(mode="json"))
    return runs.submit_chain(planned, _following, owner=user)


def _following(params: Mapping[str, Any], before: str) -> dict[str, Any]:
    return {name: _real(value, f"run:{before}") for name, value in params.items()}


def _real(value: Any, before: str) -> Any:
    if isinstance(value, list):
        return [_real(item, before) for item in value]
    return before if value in (PREPARED, "run:WRITTEN") else value


def chain_tree(made: Sequence[RunView]) -> Node:
    """The runs that a form has become, in their order."""
    links = [part for run in made for part in (el("span", "→", cls="quiet"), run_link(run))][1:]
    return notice("success", "Queued:", *links)
