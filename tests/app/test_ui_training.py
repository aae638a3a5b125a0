"""The Train page: presets, groups of fields, estimates and files; a training's result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import gradio as gr
import pytest
import yaml

from app.commands.flags import read_config
from app.services import data_sets, runs
from app.settings import settings
from app.ui import capacity, train, training_fields, training_result
from app.ui.components.chart import chart_payload
from app.ui.components.elements import text_of
from app.ui.forms import Form
from app.ui.training_data import REGISTERED, UPLOADED, WRITTEN, DataSection
from app.ui.training_presets import NAMES, expectation, values_of
from speculators_core.data.capacity import Estimate, Need
from speculators_core.errors import Unavailable
from speculators_core.params import PARAMS_OF, JobKind, TrainParams
from speculators_core.training.presets import PRESETS
from tests.app.test_ui_conversion import nodes
from tests.app.test_ui_payloads import a_run, row
from tests.e2e import files


@pytest.fixture
def page(sqlite_store: str) -> tuple[DataSection, Form]:
    """The two parts of the page as the first preset starts them."""
    form, start = Form(TrainParams), values_of(NAMES[0])
    with gr.Blocks():
        form.draw(*training_fields.TOP)
        data = DataSection(start)
        training_fields.draw(form, start[JobKind.TRAIN])
    return data, form


def entered(page: tuple[DataSection, Form], where: str = WRITTEN, **changes: Any) -> list[Any]:
    data, form = page
    values = [field.value for field in form.inputs]
    for name, value in changes.items():
        if name in form.fields:
            values[list(form.fields).index(name)] = value
    first = [where, changes.get("data_set"), changes.get("file")]
    return [*first, *(field.value for field in data.preset_inputs), *values]


def test_every_parameter_of_a_training_is_on_the_page_once(page):
    _, form = page
    elsewhere = {"data", "nodes", "node_rank", "rendezvous"}  # the data's part; terminals alone
    assert sorted(form.fields) == sorted(set(TrainParams.model_fields) - elsewhere)
    assert "Further" not in training_fields.groups()


def test_every_field_has_a_line_of_explanation(page):
    _, form = page
    assert all(field.info for field in form.inputs)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_is_made_of_parameters_that_exist_and_are_allowed(sqlite_store, preset):
    for kind, values in values_of(preset.name).items():
        needed = {n: "x" for n, f in PARAMS_OF[kind].model_fields.items() if f.is_required()}
        if kind is JobKind.PREPARE:
            needed["data"] = ("x",)
        PARAMS_OF[kind].model_validate({**needed, **values, "verifier": "v"})


def test_what_to_expect_of_a_quick_look_stands_beside_it():
    """C10"""
    assert "about 0.40 of first tokens" in text_of(expectation("Quick look"))
    assert "5,000 varied chats" in text_of(expectation("Quick look"))


def test_the_reference_band_is_on_a_trainings_page_and_in_its_chart(sqlite_store):
    """C10"""
    assert "0.35 to 0.45 5,000 varied chats" in text_of(training_result.tree(a_run()))
    figures = chart_payload("r", [row(1, 1, acceptance_0=0.3)], 0)["figures"]
    assert figures[0]["band"] == [0.35, 0.45]


def test_validation_and_every_live_number_have_a_chart():
    """C14"""
    values = {"loss": 1.0, "val_loss": 1.1, "loss_0": 0.5, "loss_1": 0.5, "acceptance_0": 0.4}
    values |= {"coverage": 0.9, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 9.0}
    values |= {"memory_mb": 512.0, "skipped": 1.0, "measured_acceptance_length": 1.5}
    figures = {f["id"]: f for f in chart_payload("r", [row(1, 5, **values)], 0)["figures"]}
    assert list(figures) == [
        *("loss", "acceptance", "length", "coverage", "grad_norm", "lr"),
        *("tokens_per_second", "memory_mb", "skipped"),
    ]
    named = [series["name"] for series in figures["loss"]["series"]]
    assert named == ["training", "validation", "step 1", "step 2"]


def test_the_page_shows_command_and_yaml_of_what_is_entered(page, tmp_path):
    data_sets.register(chats(tmp_path), "mine", "prepared", samples=3, facts={"tokens": 90})
    filled = entered(page, REGISTERED, data_set="mine", verifier="v", lr="2e-4")
    needed, told = train.followed(*page, filled)
    assert "v" in text_of(needed)  # nothing is known of this verifier: said in words
    assert "speclab submit train --verifier v" in text_of(told)
    assert "--data mine" in text_of(told)
    text = nodes(told, "pre")[0][2][0]
    config = tmp_path / "train.yaml"
    config.write_text(text)
    params = TrainParams.model_validate(read_config(config, TrainParams))
    assert (params.data, params.verifier, params.lr) == ("mine", "v", 2e-4)
    assert yaml.safe_load(text).keys() == TrainParams.model_fields.keys()


def test_a_chain_is_shown_run_by_run_before_it_is_submitted(page):
    _, told = train.followed(*page, entered(page, verifier="v"))
    lines = [text_of(node) for node in nodes(told, "code")]
    assert [line.split()[2] for line in lines[:3]] == ["self-write", "prepare", "train"]
    assert "--data run:WRITTEN" in lines[1] and "--data run:PREPARED" in lines[2]


def test_options_that_exclude_each_other_are_said_while_filling(page):
    filled = entered(page, verifier="v", norm_before_fc="yes", fc_norm="yes")
    told, _ = train.followed(*page, filled)
    assert "exclude each other" in text_of(told)


def test_the_estimate_is_bytes_with_their_product(page, tmp_path):
    """B12"""
    verifier = files.verifier(settings().home / "models" / "verifier")
    file = {"path": "x", "size": 30_000, "orig_name": "chats.jsonl"}
    needed, _ = train.followed(*page, entered(page, UPLOADED, file=file, verifier=str(verifier)))
    assert "10000 tokens x 4 states x 576 x 4 bytes" in text_of(needed)
    assert "92.2 MB" in text_of(needed)  # 10,000 x 4 x 576 x 4
    assert "a guess until the data is prepared" in text_of(needed)
    elsewhere = entered(page, UPLOADED, file=file, verifier=str(files.verifier(tmp_path / "v")))
    assert "is not in a directory that pages may read" in text_of(
        train.followed(*page, elsewhere)[0]
    )


def test_a_browser_learns_nothing_of_files_that_it_names(page, tmp_path):
    """What follows the form takes the browser's word; only what arrived is looked at."""
    for named in ("/etc/passwd", "/no/such/file"):
        needed, _ = train.followed(*page, entered(page, UPLOADED, file=named, verifier="v"))
        assert "tokens x" not in text_of(needed)


def test_more_than_is_free_is_refused_before_anything_starts(page, tmp_path, monkeypatch):
    """B12"""
    small = Estimate(
        where="/d", free=10, needs=(Need(what="hidden states", size=11, arithmetic="x"),)
    )
    monkeypatch.setattr(capacity, "_estimate", lambda choice, params: small)
    data, form = page
    filled = entered(page, verifier="v")
    needed, _ = train.followed(data, form, filled)
    assert "It needs 11 bytes, and 10 bytes are free." in text_of(needed)
    params = form.params(filled[len(data.inputs) :], data="d")
    with pytest.raises(Unavailable, match="hidden states need 11 bytes"):
        capacity.require_room(data.seen(filled[: len(data.inputs)]), params)
    assert runs.list_runs().total == 0


@pytest.mark.parametrize("preset", NAMES)
def test_each_preset_as_it_stands_becomes_a_chain_of_three_runs(sqlite_store, preset):
    start = values_of(preset)
    with gr.Blocks():
        data = DataSection(start)
    filled = [WRITTEN, None, None, *(field.value for field in data.preset_inputs)]
    values = {**start[JobKind.TRAIN], "verifier": "org/v"}
    made = train.submit_chain(data.choice(filled), values, "ada")
    assert [run.kind for run in made] == [JobKind.SELF_WRITE, JobKind.PREPARE, JobKind.TRAIN]


def test_no_two_fields_of_the_page_have_one_id(page):
    data, form = page
    forms = (data.writing, data.preparing, form)
    ids = [field.elem_id for one in forms for field in one.fields.values()]
    assert len(ids) == len(set(ids))


def test_a_result_lists_trained_and_frozen_tensors_and_an_early_end(sqlite_store):
    """C8, C14"""
    result = {
        "output": "/x",
        "steps": 700,
        "seconds": 60.0,
        "best": {
            "acceptance_0": 0.41,
            "served_acceptance_length": 1.6,
            "measured_acceptance_length": 1.1,
            "step": 400.0,
        },
        "trainable": ["fc.weight", "lm_head.weight"],
        "frozen": ["embed_tokens.weight"],
        "skipped": 2,
        "ended_early": True,
        "name": "gone",
    }
    run = a_run(state="succeeded", result=result, params={"patience": 3})
    told = text_of(training_result.tree(run))
    assert "Trained: 2 tensors fc.weight lm_head.weight" in told
    assert "Frozen: 1 tensor embed_tokens.weight" in told
    assert "Ended early at step 700: 3 times in a row nothing got better; the best" in told
    assert "the best weights are those of step 400" in told
    assert "Where both are far apart, the chats are not what the verifier would say" in told
    assert "41.0 %" in told


def test_train_further_starts_from_the_speculator_with_the_same_settings(sqlite_store, tmp_path):
    data_sets.register(chats(tmp_path), "mine", "prepared", samples=3, run_id=None)
    params = {"data": "mine", "verifier": "v", "lr": 3e-4, "num_layers": 2, "max_minutes": None}
    link = training_result.further(a_run(params=params), _Made("my draft"))
    query = parse_qs(urlsplit(link).query, keep_blank_values=True)
    kept = {"verifier": ["v"], "lr": ["0.0003"], "max_minutes": [""]}
    assert query == {"data": ["mine"], **kept, "start_from": ["my draft"]}


class _Made:
    """As much of a speculator as a link needs."""

    def __init__(self, name: str) -> None:
        self.name = name


def chats(folder: Path) -> Path:
    place = folder / "chats.jsonl"
    place.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    return place
