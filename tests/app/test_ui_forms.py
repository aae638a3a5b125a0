"""Forms say what the parameter models say, and command lines say what forms say."""

from __future__ import annotations

import shlex

import gradio as gr
import pytest

from app.commands.flags import parse
from app.ui.commands import submit_line
from app.ui.components.corrections import Correction
from app.ui.fields import from_address, label
from app.ui.fields import parse as parse_field
from app.ui.forms import Form
from speculators_core.errors import InputError
from speculators_core.params import (
    PARAMS_OF,
    ConvertParams,
    DeployParams,
    JobKind,
    Params,
    PrepareParams,
    TrainParams,
)


def drawn(model: type[Params], *names: str) -> Form:
    form = Form(model)
    with gr.Blocks():
        form.draw(*(names or model.model_fields))
    return form


@pytest.mark.parametrize("kind", list(JobKind))
def test_an_untouched_form_gives_the_models_own_defaults(kind: JobKind):
    model = PARAMS_OF[kind]
    form = drawn(model)
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    given = {name: "org/x" if name == "repository" else "x" for name in needed}
    entered = [given.get(name, field.value) for name, field in form.fields.items()]
    assert form.params(entered) == model.model_validate(
        {**given, "data": ("x",)} if kind == JobKind.PREPARE else given
    )


def test_help_and_default_come_from_the_model():
    form = drawn(TrainParams, "lr", "norm_output", "compile", "dtype")
    described = TrainParams.model_fields["lr"].description
    assert form.fields["lr"].info == described.capitalize()
    assert form.fields["lr"].value == "0.001"
    assert form.fields["norm_output"].value == "default"  # open: yes, or the start's own
    assert form.fields["compile"].value is False
    assert [value for _, value in form.fields["dtype"].choices] == ["auto", "float32", "bfloat16"]


def test_a_choice_that_may_be_left_open_offers_that_first():
    form = drawn(ConvertParams, "aux_convention")
    assert form.fields["aux_convention"].choices[0] == ("default", "")
    assert form.values([""]) == {"aux_convention": None}


def test_a_field_of_several_values_with_choices_takes_many_of_them_and_others():
    form = Form(PrepareParams, ids="prepare")
    with gr.Blocks():
        form.draw("data", "weights", "verifier", choices={"data": ["chats"]})
    assert form.fields["data"].multiselect and form.fields["data"].elem_id == "prepare-data"
    params = form.params([["chats", "org/name"], "1, 0.5", "v"])
    assert (params.data, params.weights) == (("chats", "org/name"), (1.0, 0.5))


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("epochs", "3", "3"),
        ("compile", "True", True),
        ("compile", "false", False),
        ("norm_output", "False", "no"),
        ("norm_output", "", "default"),
        ("max_minutes", "", ""),
    ],
)
def test_the_address_fills_any_field(name: str, given: str, held: object):
    assert from_address(TrainParams, name, given) == held


def test_layers_are_written_with_commas_and_a_third_way_is_the_layouts_own():
    form = drawn(ConvertParams)
    entered = dict(zip(form.fields, (f.value for f in form.inputs), strict=True))
    entered |= {"checkpoint": "c", "verifier": "v", "aux_layers": " 2, 15,27 "}
    params = form.params([*entered.values()])
    assert params.aux_layers == (2, 15, 27)
    assert params.norm_before_residual is None
    entered["norm_before_residual"] = "no"
    assert form.params([*entered.values()]).norm_before_residual is False


@pytest.mark.parametrize(
    ("name", "entered", "sentence"),
    [
        ("speculative_tokens", "0", "Must be at least 1, found '0'."),
        ("speculative_tokens", "three", "Must be a whole number, found 'three'."),
        ("aux_layers", "2,x", "Must be a whole number, found 'x'."),
        ("checkpoint", "", "This is needed."),
    ],
)
def test_what_is_wrong_is_said_of_the_field_it_is_wrong_in(name: str, entered: str, sentence: str):
    form = drawn(ConvertParams)
    values = {key: field.value for key, field in form.fields.items()}
    values |= {"checkpoint": "c", "verifier": "v", name: entered}
    assert form.problems([*values.values()]) == {name: sentence}
    [correction] = form.corrections([*values.values()])
    element = form.fields[name].elem_id
    assert correction == Correction(element, label(name), sentence)
    with pytest.raises(InputError, match=label(name).split(" (")[0]):
        form.params([*values.values()])


def test_a_rule_over_two_fields_is_told_without_a_field():
    form = drawn(TrainParams, "norm_before_fc", "fc_norm")
    wrong = form.problems([True, True], data="d", verifier="v")
    assert wrong[""].startswith("Norm_before_fc and fc_norm exclude each other")


def test_an_empty_number_is_the_fields_none():
    assert parse_field(DeployParams.model_fields["port"], " ") is None
    assert Form(DeployParams).preset == {}


def test_a_preset_fills_every_field_and_puts_back_what_it_does_not_name():
    form = drawn(TrainParams, "epochs", "max_minutes", "compile")
    assert form.entered({"max_minutes": 4.0}) == ["10", "4", False]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (JobKind.CONVERT, {"checkpoint": "a b", "verifier": "v", "aux_layers": [2, 15, 27]}),
        (JobKind.TRAIN, {"data": "d", "verifier": "v", "fc_norm": True, "norm_output": False}),
        (JobKind.DEPLOY, {"verifier": "v", "speculator": "s", "port": 8000}),
        (JobKind.PREPARE, {"data": ["a", "b"], "verifier": "v", "draft_vocab_size": None}),
    ],
)
def test_the_command_line_means_the_same_parameters(kind: JobKind, params: dict):
    words = shlex.split(submit_line(kind, params))
    assert words[:3] == ["speclab", "submit", kind.value]
    assert parse(PARAMS_OF[kind], _flags(kind, words[3:])) == PARAMS_OF[kind].model_validate(params)


def test_the_command_line_leaves_out_what_is_the_default():
    params = DeployParams(verifier="v").model_dump(mode="json")
    assert submit_line(JobKind.DEPLOY, params) == "speclab submit deploy --verifier v"
    typed = {"verifier": "v", "max_model_len": "2048"}
    assert submit_line(JobKind.DEPLOY, typed) == "speclab submit deploy --verifier v"


def test_a_choice_that_stands_for_nothing_is_an_empty_field():
    form = Form(DeployParams, nothing="none at all")
    with gr.Blocks():
        form.draw("verifier", "speculator")
    assert form.params(["v", "none at all"]).speculator is None
    assert submit_line(JobKind.DEPLOY, form.values(["v", "none at all"])).endswith("--verifier v")


def test_numbers_are_shown_as_exactly_as_they_are():
    form = drawn(ConvertParams)
    for base in (1e6, 283461213.0, 10000.0):
        entered = form.entered({"checkpoint": "c", "verifier": "v", "rope_theta": base})
        assert form.params(entered).rope_theta == base
    assert form.changed(entered).keys() == {"checkpoint", "verifier", "rope_theta"}
    assert form.holds(entered, {"rope_theta": 1e4}) and not form.holds(entered, {"rope_theta": 1e5})


def _flags(kind: JobKind, words: list[str]) -> dict:
    """Flags as the command line's own reader takes them."""
    from app.commands.flags import _raw

    fields, given, at = PARAMS_OF[kind].model_fields, {}, 0
    while at < len(words):
        name = words[at][2:].replace("-", "_")
        if name in fields and fields[name].annotation in (bool, bool | None):
            given[name], at = True, at + 1
        elif name.startswith("no_") and name[3:] in fields:
            given[name[3:]], at = False, at + 1
        else:
            given[name], at = _raw(fields[name], words[at + 1]), at + 2
    return given
