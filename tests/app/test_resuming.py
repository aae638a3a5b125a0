"""Going on with a training that ended early: the same run, another attempt."""

from __future__ import annotations

import pytest

from app.services import claims, resuming, runs
from app.store.models import RunState
from app.ui import run_view
from app.ui.components.elements import text_of
from speculators_core.errors import Conflict, NotFound
from tests.app.web import script

TRAIN = {"data": "d", "verifier": "v"}


def ended(state: str, kind: str = "train", params: dict | None = None) -> str:
    run = runs.submit(kind, params or TRAIN, owner="ada")
    claims.register_slots("here", [], 1, 1)
    claimed = claims.claim("here")
    assert claimed and claimed.run_id == run.id
    claims.add_metrics(run.id, {5: {"loss": 1.0}})
    claims.finish(run.id, state, {"message": "no space"} if state == "failed" else None)
    return run.id


@pytest.mark.parametrize("state", ["failed", "cancelled", "lost"])
def test_a_training_that_ended_early_goes_on_as_itself(store, rings, state: str):
    run_id = ended(state)
    rings.clear()
    seen = resuming.resume(run_id, "bob")
    assert (seen.state, seen.error, seen.finished_at) == (RunState.QUEUED, None, None)
    assert seen.params == runs.get(run_id).params and rings == [run_id]
    claimed = claims.claim("here")
    assert claimed and (claimed.run_id, claimed.attempt) == (run_id, 2)
    assert len(runs.metrics(run_id)) == 1 and runs.list_runs().total == 1


def test_what_cannot_go_on_says_so(sqlite_store):
    done = ended("succeeded")
    prepare = ended("failed", "prepare", {"data": ["x"], "verifier": "v"})
    waiting = runs.submit("train", {**TRAIN, "lr": 1e-4}, owner="ada").id
    never = runs.submit("train", {**TRAIN, "lr": 2e-4}, owner="ada").id
    runs.cancel(never, "ada")
    for run_id in (done, prepare, waiting, never):
        with pytest.raises(Conflict, match="can't be resumed"):
            resuming.resume(run_id, "ada")
    with pytest.raises(NotFound):
        resuming.resume("nothing", "ada")


def test_resume_is_offered_where_it_can_be_and_over_rest(sqlite_store):
    run_id = ended("failed")
    assert "Resume" in text_of(run_view.header_tree(runs.get(run_id)))
    answer = script().post(f"/api/runs/{run_id}/resume")
    assert (answer.status_code, answer.json()["state"]) == (200, "queued")
    assert "Resume" not in text_of(run_view.header_tree(runs.get(run_id)))
    assert script().post(f"/api/runs/{run_id}/resume").status_code == 409
