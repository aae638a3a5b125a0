"""What holds of every parameter model."""

from __future__ import annotations

from typing import Any

import pytest

from speculators_core import params
from speculators_core.errors import InputError
from speculators_core.params import (
    EvaluateParams,
    GenerateParams,
    LaunchParams,
    Params,
    PullParams,
    PushParams,
    VerifierParams,
    parse_model,
)


def models(parent: type[Params] = Params) -> list[type[Params]]:
    found = [m for child in parent.__subclasses__() for m in (child, *models(child))]
    return [model for model in found if model.__module__ == params.__name__]


def texts(model: type[Params]) -> list[str]:
    """Fields that take any text."""
    return [n for n, f in model.model_fields.items() if f.annotation in (str, str | None)]


def fault(model: type[Params], field: str, value: Any) -> str:
    """What is said of one field, whatever else is missing."""
    try:
        model.model_validate({field: value})
    except ValueError as error:
        return "; ".join(e["msg"] for e in error.errors() if e["loc"][:1] == (field,))
    return ""


@pytest.mark.parametrize("model", models())
def test_no_text_takes_control_characters_unless_it_is_prose(model: type[Params]) -> None:
    for field in texts(model):
        for character in ("\n", "\x1b", "\x00", "\u2028", "\u202e"):
            said = fault(model, field, f"org/a{character}b")
            expected = f"control character U+{ord(character):04X}"
            if field in model.prose:
                assert "control character" not in said, field
            else:
                narrower = ("match pattern", "can't be a name", "is no ")
                assert expected in said or any(rule in said for rule in narrower), (field, said)


def test_a_tuple_of_texts_is_looked_at_too() -> None:
    assert "U+000A" in fault(params.PrepareParams, "data", ("a.jsonl", "b\nc"))


@pytest.mark.parametrize(
    "model", [model for model in models() if "speculative_tokens" in model.model_fields]
)
def test_k_has_a_bound(model: type[Params]) -> None:
    assert not fault(model, "speculative_tokens", 64)
    assert "less than or equal to 64" in fault(model, "speculative_tokens", 65)


def test_a_prompt_may_have_lines() -> None:
    assert GenerateParams(verifier="v", prompt="a\nb").prompt == "a\nb"


def test_the_error_shows_what_was_found_without_its_effect() -> None:
    with pytest.raises(InputError) as caught:
        parse_model(LaunchParams, {"speculator": "s", "verifier_name": "a\x1b[2Jb"}, "x")
    assert "'a\\x1b[2Jb'" in caught.value.message


@pytest.mark.parametrize(
    ("model", "field", "given"),
    [
        (PullParams, "repository", "nonsense"),
        (PullParams, "repository", "a/b/c"),
        (PullParams, "name", "a b/../c"),
        (PushParams, "repository", "../../etc"),
        (PushParams, "verifier_name", "a b/../c"),
        (VerifierParams, "name", "a b/../c"),
        (EvaluateParams, "engine", "banana"),
    ],
)
def test_a_text_that_can_mean_nothing_is_refused(
    model: type[Params], field: str, given: str
) -> None:
    assert fault(model, field, given)


def test_a_text_of_another_form_is_told_what_is_meant_and_no_pattern() -> None:
    values = {"speculator": "s", "verifier": "v", "data": "d", "engine": "banana"}
    with pytest.raises(InputError) as refused:
        parse_model(EvaluateParams, values, "here")
    assert "the URL of a running server, found 'banana'" in refused.value.message
    assert "pattern" not in refused.value.message
