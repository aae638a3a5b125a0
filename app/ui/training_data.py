"""Where the chats to train on come from: written by the verifier, registered, or uploaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from app.services import data_sets, uploads
from app.ui.choices import data_names
from app.ui.forms import Form
from app.ui.page import QUIET
from speculators_core.errors import InputError
from speculators_core.params import JobKind, PrepareParams, SelfWriteParams

WRITTEN, REGISTERED, UPLOADED = "Let the verifier write it", "A data set", "Upload a file"
_VERIFIER = {"verifier": "chosen above"}  # these two models need one; the page has one field


@dataclass(frozen=True)
class DataChoice:
    """What to train on: `prepared` data, or `chats` to prepare, or (neither) chats to write."""

    self_write: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    prepared: str | None = None
    chats: str | None = None


class DataSection:
    """The fields of this part of the page."""

    def __init__(self) -> None:
        self.writing, self.preparing = Form(SelfWriteParams), Form(PrepareParams)
        self.source = gr.Radio(
            [WRITTEN, REGISTERED, UPLOADED], value=WRITTEN, label="Data", elem_id="source"
        )
        with gr.Row() as self.written:
            self.writing.draw("domain", "samples", "held_out", "max_answer_tokens")
        self.registered = gr.Dropdown(
            [],
            label="Data set",
            info="Chats, or data that is prepared already",
            visible=False,
            elem_id="data-set",
        )
        self.uploaded = gr.File(
            label="Chats as JSONL, `messages` in each line",
            file_types=[".jsonl"],
            visible=False,
            elem_id="upload",
        )
        with gr.Row():
            self.preparing.draw("seq_length", "draft_vocab_size", "validation_fraction")

    @property
    def preset_inputs(self) -> list[Any]:
        """The fields that a preset sets."""
        return [*self.writing.inputs, *self.preparing.inputs]

    @property
    def inputs(self) -> list[Any]:
        return [self.source, self.registered, self.uploaded, *self.preset_inputs]

    def entered(self, preset: Mapping[JobKind, Mapping[str, Any]]) -> list[Any]:
        """What `preset_inputs` hold under a preset."""
        return [
            *self.writing.entered(preset.get(JobKind.SELF_WRITE, {})),
            *self.preparing.entered(preset.get(JobKind.PREPARE, {})),
        ]

    def marks(self, entered: Sequence[Any]) -> list[Any]:
        """Whether each input is right, and what is wrong with it."""
        where, name, file, wrote, prepared = self._parts(entered)
        return [
            gr.validate(True, ""),
            gr.validate(where != REGISTERED or bool(name), "Choose a data set."),
            gr.validate(where != UPLOADED or bool(file), "Choose a file."),
            *self.writing.marks(wrote, **_VERIFIER),
            *self.preparing.marks(prepared, data=("chosen above",), **_VERIFIER),
        ]

    def choice(self, entered: Sequence[Any]) -> DataChoice:
        """What was chosen; an uploaded file is checked and kept. Raises `InputError`."""
        where, name, file, wrote, prepared = self._parts(entered)
        writing, preparing = self.writing.values(wrote), self.preparing.values(prepared)
        if where == WRITTEN:
            return DataChoice(self_write=writing, prepare=preparing)
        if where == UPLOADED:
            return DataChoice(prepare=preparing, chats=_keep(file))
        chosen = data_sets.get(str(name))
        if chosen.kind == "prepared":
            return DataChoice(prepared=chosen.name)
        return DataChoice(prepare=preparing, chats=chosen.name)

    def _parts(self, entered: Sequence[Any]) -> tuple[Any, Any, Any, Sequence[Any], Sequence[Any]]:
        where, name, file, *rest = entered
        split = len(self.writing.fields)
        return where, name, file, rest[:split], rest[split:]


def data_section(blocks: gr.Blocks) -> DataSection:
    """Place the section here; only the fields of the chosen source are seen."""
    section = DataSection()

    def show(where: str) -> list[Any]:
        return [
            gr.Row(visible=where == WRITTEN),
            gr.Dropdown(visible=where == REGISTERED),
            gr.File(visible=where == UPLOADED),
        ]

    def opened(request: gr.Request) -> list[Any]:
        named = request.query_params.get("data")
        known = gr.Dropdown(choices=data_names("chats", "prepared"), value=named)
        return [known, gr.Radio(value=REGISTERED) if named else gr.skip()]

    shown = [section.written, section.registered, section.uploaded]
    section.source.change(show, section.source, shown, **QUIET)
    blocks.load(opened, None, [section.registered, section.source], **QUIET)
    return section


def _keep(file: str | None) -> str:
    if not file:
        raise InputError("no file was uploaded", hint="choose a JSONL file of chats")
    return uploads.keep_chats(file).name
