"""Where the chats to train on come from: written by the verifier, registered, or uploaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gradio as gr

from app.services import capacity, data_sets, uploads
from app.ui.choices import data_names
from app.ui.components.corrections import Correction, sentence_of
from app.ui.forms import Form, Mirror
from app.ui.page import QUIET
from speculators_core.data.rows import SUFFIXES
from speculators_core.errors import NotFound
from speculators_core.params import JobKind, PrepareParams, SelfWriteParams

WRITTEN, REGISTERED, UPLOADED = "Let the verifier write it", "A data set", "Upload a file"
_VERIFIER = {"verifier": "chosen above"}  # these two models need one; the page has one field


@dataclass(frozen=True)
class DataChoice:
    """What to train on: `prepared` data, or `chats` to prepare, or (neither) chats to write.

    `tokens`: about so many; None where that can't be known yet.
    """

    self_write: dict[str, Any] = field(default_factory=dict)
    prepare: dict[str, Any] = field(default_factory=dict)
    prepared: str | None = None
    chats: str | None = None
    tokens: int | None = None
    draft_vocab_size: int | None = None


class DataSection:
    """The fields of this part of the page, as a preset starts them."""

    def __init__(self, start: Mapping[JobKind, Mapping[str, Any]]) -> None:
        self.writing = Form(SelfWriteParams, ids="write")
        self.preparing = Form(PrepareParams, ids="prepare")
        self.filled: list[Any] = []
        self.source = gr.Radio(
            [WRITTEN, REGISTERED, UPLOADED], value=WRITTEN, label="Data", elem_id="source"
        )
        with gr.Row() as self.written:
            self.writing.draw(
                *("domain", "samples", "held_out", "max_prompt_tokens", "max_answer_tokens"),
                start=start[JobKind.SELF_WRITE],
            )
        self.registered = gr.Dropdown(
            [],
            allow_custom_value=True,  # what was registered since the app started, too
            label="Data set",
            info="Chats, or data that is prepared already; more on the Data page",
            visible=False,
            elem_id="data-set",
        )
        self.uploaded = gr.File(
            label="A file of chats or text: JSONL, JSON, Parquet",
            file_types=list(SUFFIXES),
            visible=False,
            elem_id="upload",
        )
        with gr.Row() as self.prepared:
            self.preparing.draw(
                *("seq_length", "draft_vocab_size", "validation_fraction"),
                start=start[JobKind.PREPARE],
            )

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

    def corrections(self, entered: Sequence[Any]) -> list[Correction]:
        """What is wrong in the fields of the chosen source."""
        where, name, file, wrote, prepared = self._parts(entered)
        found = []
        if where == REGISTERED and not name:
            found.append(Correction("data-set", "Data set", "Choose a data set."))
        if where == UPLOADED and not file:
            found.append(Correction("upload", "File", "Choose a file."))
        if where == WRITTEN:
            found += self.writing.corrections(wrote, **_VERIFIER)
        try:
            ready = self.seen(entered).prepared is not None
        except NotFound as error:
            return [*found, Correction("data-set", "Data set", sentence_of(error))]
        if not ready:
            found += self.preparing.corrections(prepared, data=("chosen above",), **_VERIFIER)
        return found

    def choice(self, entered: Sequence[Any]) -> DataChoice:
        """What was chosen, once there is nothing to correct; an uploaded file is checked and kept.

        Raises `DataError` with the row that is wrong.
        """
        seen = self.seen(entered)
        where, _, file, *_ = self._parts(entered)
        if where != UPLOADED:
            return seen
        return replace(seen, chats=uploads.keep_chats(file).name)

    def seen(self, entered: Sequence[Any], *, arrived: bool = False) -> DataChoice:
        """What is chosen while the form is being filled; nothing is kept, a file is its name."""
        where, name, file, wrote, prepared = self._parts(entered)
        writing, preparing = self.writing.values(wrote), self.preparing.values(prepared)
        size = preparing.get("draft_vocab_size")
        vocabulary = int(size) if size and str(size).isdecimal() else None
        found = DataChoice(prepare=preparing, draft_vocab_size=vocabulary)
        if where == WRITTEN:
            return replace(found, self_write=writing, tokens=_written(writing))
        if where == UPLOADED:
            return replace(found, chats="FILE", tokens=_uploaded(file, arrived))
        if not name:
            return replace(found, chats="DATA")
        chosen = data_sets.get(str(name))
        tokens = capacity.of_data_set(chosen)
        if chosen.kind != "prepared":
            return replace(found, chats=chosen.name, tokens=tokens)
        known = chosen.facts.get("draft_vocab_size")
        return DataChoice(prepared=chosen.name, tokens=tokens, draft_vocab_size=known)

    def _parts(self, entered: Sequence[Any]) -> tuple[Any, Any, Any, Sequence[Any], Sequence[Any]]:
        where, name, file, *rest = entered
        split = len(self.writing.fields)
        return where, name, file, rest[:split], rest[split:]


def data_section(blocks: gr.Blocks, start: Mapping[JobKind, Mapping[str, Any]]) -> DataSection:
    """Place the section here; only the fields of the chosen source are seen."""
    section = DataSection(start)

    def show(where: str, name: str | None) -> list[Any]:
        kinds = {one.name: one.kind for one in data_sets.list_data_sets()}
        ready = where == REGISTERED and kinds.get(name or "") == "prepared"
        return [
            gr.Row(visible=where == WRITTEN),
            gr.Dropdown(visible=where == REGISTERED),
            gr.File(visible=where == UPLOADED),
            gr.Row(visible=not ready),
        ]

    def opened(request: gr.Request) -> list[Any]:
        named = request.query_params.get("data")
        known = gr.Dropdown(choices=data_names("chats", "prepared"), value=named)
        return [known, gr.Radio(value=REGISTERED) if named else gr.skip()]

    shown = [section.written, section.registered, section.uploaded, section.prepared]
    chosen = [section.registered, section.source]
    section.filled.append(blocks.load(opened, None, chosen, **QUIET))
    mirror = Mirror(blocks, [section.source, section.registered], section.filled)
    mirror.change(lambda text: show(*json.loads(text)), shown)
    return section


def _uploaded(file: Any, arrived: bool) -> int | None:
    """Tokens in a file as the browser describes it, or as it has `arrived` here: only then is it
    a path that Gradio has checked, else it could be that of any file of the host.
    """
    size = file.get("size") if isinstance(file, Mapping) else None
    if arrived and file:
        size = Path(file).stat().st_size
    return capacity.tokens_in(size) if isinstance(size, int) and size > 0 else None


def _written(writing: Mapping[str, Any]) -> int | None:
    """Tokens that the verifier would write at most."""
    try:
        longest = int(writing["max_prompt_tokens"]) + int(writing["max_answer_tokens"])
        return int(writing["samples"]) * longest
    except (KeyError, ValueError):
        return None
