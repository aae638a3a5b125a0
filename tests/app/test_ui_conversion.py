"""The Convert page and a conversion's result as trees: questions, choices, tables, decisions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import gradio as gr
import pytest

from app.services import references, speculators
from app.services.views import SpeculatorView
from app.ui import conversion, convert, models
from app.ui.components import state
from app.ui.components.elements import Node, text_of
from app.ui.components.markdown import markdown
from app.ui.forms import Form
from speculators_core.errors import InputError
from speculators_core.params import ConvertParams, ExportParams
from tests import tiny
from tests.app.test_conversions import LAYERS, RESIDUAL, barred, converted
from tests.app.test_ui_payloads import a_run

HOSTILE = '<img src=x onerror="window.__xss=7">${1}'
CHOICES = [
    {"params": {"aux_layers": [2, 4, 5], "aux_convention": "after"}, "meaning": "usual"},
    {"params": {"aux_layers": [2, 4, 5], "aux_convention": "output"}, "meaning": "one later"},
]
OPEN = {"about": "aux layers", "choices": CHOICES, "chosen": None}
RULED = {
    "about": "rope_theta is not in the checkpoint",
    "choices": [
        {"params": {"rope_theta": 1e6}, "meaning": "the verifier's: 1e+06"},
        {"params": {"rope_theta": 1e4}, "meaning": "what silence means"},
    ],
    "chosen": 0,
}
TENSOR = {
    "source": HOSTILE,
    "target": None,
    "shape": [4, 2],
    "dtype": "float16",
    "reason": "why",
    "how": "unused",
}


@pytest.fixture
def form() -> Form:
    drawn = Form(ConvertParams)
    with gr.Blocks():
        drawn.draw(*convert.PAIR, *convert.SETTLING)
    return drawn


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the core's inspection; what it was asked to settle, call by call."""
    asked: list[Any] = []

    def inspect(path: str, verifier: str | None, settled: Any = None) -> dict[str, Any]:
        asked.append(settled)
        if settled and settled.get("speculative_tokens") == "9":
            raise InputError("nine is too many")
        return {
            "layout": "eagle3-research",
            "tensors": [TENSOR],
            "config": {"field": {"value": 1, "origin": "parameter" if settled else "layout"}},
            "doubts": json.loads(json.dumps([RULED, OPEN])),
            "warnings": [HOSTILE],
        }

    monkeypatch.setattr(references, "inspect_checkpoint", inspect)
    monkeypatch.setattr(references, "check_params", lambda kind, params: None)
    return asked


def filled(form: Form, **values: Any) -> list[Any]:
    return form.entered({"checkpoint": "c", "verifier": "v", **values})


def nodes(tree: Node, tag: str) -> list[Any]:
    if isinstance(tree, str):
        return []
    return [*([tree] if tree[0] == tag else []), *(n for c in tree[2] for n in nodes(c, tag))]


def checked(tree: Node) -> list[str]:
    return [text_of(n) for n in nodes(tree, "label") if "checked" in nodes(n, "input")[0][1]]


def test_doubts_are_questions_with_radio_buttons_and_open_ones_come_first(
    sqlite_store, form, inspected
):
    _, tree = convert.shown(form, filled(form), None)
    first, second = nodes(tree, "fieldset")
    assert text_of(first).startswith("Which verifier states does the draft see?")
    assert len(nodes(first, "input")) == 3 and len(nodes(second, "input")) == 2
    assert [text.split(":")[0] for text in checked(tree)] == ["Leave it open", "the verifier's"]
    assert HOSTILE in text_of(tree) and inspected == [None]


def test_a_choice_fills_the_form_and_is_seen_settled(sqlite_store, form, inspected):
    seen, tree = convert.shown(form, filled(form), None)
    button = nodes(nodes(tree, "fieldset")[0], "input")[1]
    entered = convert.settle(form, filled(form), button[1]["data-value"])
    params = form.params(entered)
    assert (params.aux_layers, params.aux_convention) == ((2, 4, 5), "output")
    seen, tree = convert.shown(form, entered, seen)
    assert checked(tree)[0].startswith("one later")
    assert inspected == [None, {"aux_layers": ("2", "4", "5"), "aux_convention": "output"}]
    assert "parameter" in text_of(tree)
    left_open = nodes(nodes(tree, "fieldset")[0], "input")[-1]
    entered = convert.settle(form, entered, left_open[1]["data-value"])
    assert form.changed(entered).keys() == {"checkpoint", "verifier"}
    convert.shown(form, entered, seen)
    assert len(inspected) == 2  # what is known of the pair is not read again


def test_what_was_typed_is_no_choice_but_shown_as_such(sqlite_store, form, inspected):
    _, tree = convert.shown(form, filled(form, aux_layers=[1, 2, 3]), None)
    assert checked(tree)[0] == "As entered above:  Aux layers 1, 2, 3"


def test_settings_that_cannot_be_leave_the_doubts_in_sight(sqlite_store, form, inspected):
    _, tree = convert.shown(form, filled(form, speculative_tokens=9), None)
    assert "nine is too many" in text_of(tree) and len(nodes(tree, "fieldset")) == 2


def test_what_was_measured_before_stands_beside_its_choice(sqlite_store, form, inspected):
    known = {**OPEN, "choices": [{**CHOICES[0], "first_token_acceptance": 0.25}, CHOICES[1]]}
    converted({"doubts": [known]}, checkpoint="c", verifier="v")
    _, tree = convert.shown(form, filled(form), None)
    usual, later, _ = nodes(nodes(tree, "fieldset")[0], "label")
    assert "25.0 % of first tokens accepted" in text_of(usual)
    assert "accepted" not in text_of(later)


@pytest.mark.parametrize("sent", ["", "[]", "x", "7"])
def test_a_choice_that_is_none_is_refused(form, sent: str):
    with pytest.raises(InputError, match="no choice"):
        convert.settle(form, filled(form), sent)


def test_a_choice_sets_nothing_but_what_can_be_settled(form):
    sent = json.dumps({"checkpoint": "/etc", "lr": 1, "rope_theta": 5e5})
    entered = convert.settle(form, filled(form), sent)
    assert form.params(entered).checkpoint == "c"
    assert form.params(entered).rope_theta == 5e5


def test_a_long_table_says_how_many_rows_it_has_and_a_short_one_is_just_a_table():
    rows = [[str(i)] for i in range(31)]
    long = state.long_table(["N"], rows, label="T")
    assert long[1]["data-limit"] == "20" and "31 in all" in text_of(long)
    assert nodes(long, "input")[0][1]["type"] == "search"
    assert nodes(state.long_table(["N"], rows[:30], label="T"), "input") == []


def test_a_result_offers_what_its_verdict_allows(sqlite_store, tmp_path):
    offered = {}
    for name, doubts, failed in (
        ("failed", (), ("acceptance is exactly 0",)),
        ("open", (LAYERS,), ()),
        ("fine", (), ()),
    ):
        if name == "fine":
            made = barred(tmp_path / name)
            speculators.register(made.path, name)
        else:
            barred(tmp_path / name, *doubts, failed=failed)
        result = {"name": name, "doubts": list(doubts), "validation": {"ok": None}}
        tree = conversion.result_tree(a_run(kind="convert", state="succeeded", result=result))
        links = [n[1]["href"] for n in nodes(tree, "a") if n[1]["href"].startswith("/deploy")]
        offered[name] = [n[1].get("data-action") for n in nodes(tree, "button")], links
    assert offered["failed"] == (["allow"], [])
    assert offered["open"] == (["again", "again"], [])
    assert offered["fine"] == ([], ["/deploy?speculator=fine&verifier=org%2Fmodel"])


def test_buttons_of_a_result_do_what_they_say(sqlite_store, tmp_path):
    barred(tmp_path / "mine", RESIDUAL)
    told = conversion.act("allow", "mine", "run", "ada")
    assert "your decision is recorded" in text_of(told)
    assert speculators.get("mine").allowed_by == "ada"
    result = {"name": "mine", "doubts": [RESIDUAL]}
    tree = conversion.result_tree(a_run(kind="convert", state="succeeded", result=result))
    assert "Allowed by ada" in text_of(tree)
    assert "norm_before_residual must be settled first" in text_of(tree)


def test_a_result_whose_files_are_gone_is_still_a_page(sqlite_store, tmp_path):
    barred(tmp_path / "mine", RESIDUAL)
    tree = conversion.result_tree(a_run(kind="convert", result={"name": "mine"}))
    assert "mine has no README.md" in text_of(tree)
    lost = conversion.result_tree(a_run(kind="convert", result={"name": "nobody"}))
    assert "there is no speculator 'nobody'" in text_of(lost)
    assert conversion.result_tree(a_run(kind="convert")) is None


def test_the_models_page_says_who_allowed_and_where_to_decide():
    one = SpeculatorView(
        id="i",
        name=HOSTILE,
        path="/p",
        verifier="v",
        algorithm="eagle3",
        draft_vocab_size=1,
        speculative_tokens=3,
        deployable=False,
        doubts=[RESIDUAL],
        failed=[],
        allowed_by=None,
        allowed_at=None,
        allowed_despite=None,
        run_id="r",
        created_at=datetime.now(UTC),
    )
    told = text_of(models.speculators_table([one]))
    assert "doubtful norm_before_residual must be settled first Decide" in told
    allowed = one.model_copy(update={"allowed_by": "ada"})
    assert "Deploy   allowed by ada" in text_of(models.speculators_table([allowed]))


def test_a_card_is_drawn_without_anything_in_it_becoming_markup():
    text = (
        f"---\nlicense: x\n---\n# Title {HOSTILE}\n\nA `code` **bold** [web](https://a.b/c) "
        "[code](javascript:alert(1))\nsecond line\n\n- one\n- <b>two</b>\n\n```sh\n# a\n<x>\n```\n"
        "| a | b |\n|---|---|\n| 1 |\n"
    )
    tree = markdown(text)
    assert "license" not in text_of(tree)
    assert text_of(nodes(tree, "h2")[0]) == f"Title {HOSTILE}"
    assert [n[1] for n in nodes(tree, "a")] == [{"href": "https://a.b/c"}]
    assert "[code](javascript:alert(1)) second line" in text_of(tree)
    assert [text_of(item) for item in nodes(tree, "li")] == ["one", "<b>two</b>"]
    assert text_of(nodes(tree, "pre")[0]) == "# a\n<x>"
    assert [text_of(cell) for cell in nodes(tree, "td")] == ["1", ""]


@pytest.mark.parametrize("text", ["", "```", "|", "---\n", "#", "* ", "`" * 5000, "**" * 5000])
def test_an_unfinished_card_is_drawn_too(text: str):
    assert markdown(text)[0] == "div"


def test_an_export_form_says_beforehand_what_would_be_lost(sqlite_store, tmp_path):
    verifier = tiny.build_verifier(tmp_path / "verifier")
    speculators.register(tiny.build_speculator(tmp_path / "draft", verifier), "mine")
    refused = text_of(models.losses_tree(ExportParams(speculator="mine")))
    assert "It would not be written" in refused and "norm_output" in refused
    accepted = text_of(models.losses_tree(ExportParams(speculator="mine", accept_losses=True)))
    assert "It would not be written" not in accepted and "norm_output" in accepted
