"""What the live components get: token steps, log chunks, chart points, run details."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from app.services.playground import PlaygroundUpdate
from app.services.views import DemoStage, DemoView, LogChunk, MetricView, Page, RunView
from app.ui import answering, home, playground, run_view, runs
from app.ui.components.chart import chart_payload
from app.ui.components.elements import Node, text_of
from app.ui.components.log_view import log_payload
from app.ui.components.token_view import token_payload

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def update(**changes: object) -> PlaygroundUpdate:
    values = {
        "run": "r",
        "seq": 0,
        "reset": True,
        "steps": (),
        "numbers": {"tokens_per_second": 20.0, "drafted": 4},
        "state": "done",
        "message": "",
        "text": "four",
    }
    return PlaygroundUpdate.model_validate(values | changes)


def a_run(**changes: object) -> RunView:
    values = dict.fromkeys(RunView.model_fields) | {
        "id": "abc",
        "kind": "train",
        "name": "a run",
        "state": "running",
        "params": {"data": "run:d0", "lr": 0.001},
        "fingerprint": "f",
        "owner": "ada",
        "priority": 0,
        "attempt": 1,
        "created_at": NOW,
        "updated_at": NOW,
        "progress": 0.42,
        "progress_text": "step 3",
        "needs": (),
    }
    return RunView.model_validate(values | changes)


def row(number: int, step: int, **values: float | None) -> MetricView:
    return MetricView(id=number, step=step, at=NOW, values=values)


def test_the_bare_text_travels_only_while_no_step_has_arrived():
    assert token_payload(update(), "A", coloured=False)["text"] == "four"
    assert token_payload(update(), "A", coloured=True)["text"] == ""


def test_a_token_update_keeps_run_and_sequence():
    payload = token_payload(update(seq=3, reset=False), "A", plain=True)
    assert (payload["run"], payload["seq"], payload["reset"]) == ("r", 3, False)
    assert payload["plain"] is True


def test_equal_texts_are_called_identical_and_the_speed_is_compared():
    told = text_of(
        answering.comparison(update(), update(numbers={"tokens_per_second": 10.0}), greedy=True)
    )
    assert "identical" in told
    assert "2.00 times as fast" in told


def test_greedy_texts_that_differ_name_the_first_difference():
    told = text_of(answering.comparison(update(text="four"), update(text="fork"), greedy=True))
    assert "differ from character 3" in told
    assert "samples" in text_of(answering.comparison(update(), update(text="x"), greedy=False))


def test_a_chart_gets_only_points_that_exist_and_the_last_rows_number():
    rows = [row(7, 10, loss=2.0, acceptance_0=0.5), row(9, 20, loss=None, val_loss=1.5)]
    payload = chart_payload("r", rows, 4)
    assert (payload["after"], payload["last"]) == (4, 9)
    loss, acceptance = payload["figures"]
    assert [(s["name"], s["x"], s["y"]) for s in loss["series"]] == [
        ("training", [10], [2.0]),
        ("validation", [20], [1.5]),
    ]
    assert [s["name"] for s in acceptance["series"]] == ["position 1"]


def test_a_chart_of_nothing_has_no_figures():
    assert chart_payload("r", [row(1, 1, seconds_left=3.0)], 0)["figures"] == []


def test_a_log_payload_links_the_whole_log():
    payload = log_payload("abc", LogChunk(text="x\n", start=5, end=7, size=7), reset=False)
    assert payload["href"] == "/runs/abc/log"
    assert (payload["start"], payload["end"], payload["reset"]) == (5, 7, False)


def test_a_running_run_can_be_cancelled_and_an_ended_one_retried():
    assert _actions(run_view.header_tree(a_run())) == ["cancel"]
    assert _actions(run_view.header_tree(a_run(state="cancelling"))) == []
    assert _actions(run_view.header_tree(a_run(state="failed"))) == ["retry"]


def test_an_error_is_shown_with_its_place_and_its_hint():
    error = {"message": "no such tensor", "where": "fc.weight", "hint": "look again"}
    told = text_of(run_view.header_tree(a_run(state="failed", error=error)))
    assert "no such tensor In fc.weight. Look again." in told


def test_a_run_shows_its_own_parameters_and_links_what_they_refer_to():
    tree = run_view.rest_tree(a_run())
    assert "speclab submit train --data run:d0" in text_of(tree)
    assert "/runs?run=d0" in _hrefs(tree)


def test_the_run_list_says_where_it_is_in_all_runs():
    page = Page[RunView](items=(a_run(),), total=51, limit=25, offset=25)
    told = text_of(runs.list_tree(page))
    assert "26–26 of 51 runs" in told
    assert "Newer" in told and "Older" in told


def test_an_empty_run_list_says_what_to_do():
    page = Page[RunView](items=(), total=0, limit=25, offset=0)
    assert "Try the demo" in text_of(runs.list_tree(page))


def test_the_demo_is_offered_before_it_runs_and_linked_while_it_does():
    stage = DemoStage(key="train", title="Train", purpose="learns")
    before = DemoView(
        state="absent",
        stages=(stage,),
        domain="maths",
        limits="small",
        acceptance_length=None,
        headline=None,
        deployment_id=None,
    )
    assert _actions(home.demo_card(before)) == ["start-demo"]
    running = stage.model_copy(update={"run_id": "abc", "state": "running", "progress": 0.5})
    during = before.model_copy(
        update={"state": "running", "stages": (running,), "deployment_id": "d1"}
    )
    assert _actions(home.demo_card(during)) == []
    assert {"/runs?run=abc", "/playground?deployment=d1"} <= set(_hrefs(home.demo_card(during)))


def _actions(tree: Node) -> list[str]:
    return [a["data-action"] for a in _attributes(tree) if "data-action" in a]


def _hrefs(tree: Node) -> list[str]:
    return [a["href"] for a in _attributes(tree) if "href" in a]


def _attributes(tree: Node) -> list[dict[str, str]]:
    if isinstance(tree, str):
        return []
    return [tree[1], *(a for child in tree[2] for a in _attributes(child))]


@pytest.mark.parametrize(
    ("wanted", "taken"), [(None, "ready"), ("starting", "starting"), ("gone", "ready")]
)
def test_a_message_goes_to_the_deployment_of_the_address_or_to_one_that_is_ready(wanted, taken):
    known = [SimpleNamespace(id="starting", ready=False), SimpleNamespace(id="ready", ready=True)]
    assert playground.preferred(known, wanted) == taken
    assert playground.preferred([], wanted) is None
