"""How each way a job can end ends its run."""

from __future__ import annotations

import signal

import pytest

from app.store.models import RunState
from speculators_core.params import JobKind
from workers.conclusion import Again, Ask, conclude
from workers.outcome import Outcome

pytestmark = pytest.mark.usefixtures("home")

TRAIN, DEPLOY = JobKind.TRAIN, JobKind.DEPLOY
ERROR = {"kind": "data", "message": "no chats", "where": None, "hint": None}


def _end(kind=TRAIN, attempt=1, status=0, ask=None, left=Outcome(), last=None):
    return conclude(kind, attempt, status, ask, left, last)


def test_status_0_succeeds_with_the_result_even_if_a_cancel_came_too_late():
    for ask in (None, Ask.CANCEL, Ask.WORKER_ENDS):
        end = _end(ask=ask, left=Outcome(result={"output": "x"}))
        assert (end.state, end.result) == (RunState.SUCCEEDED, {"output": "x"})


@pytest.mark.parametrize("status", [3, 1, -signal.SIGTERM, -signal.SIGKILL])
def test_a_cancelled_run_ends_cancelled_however_its_process_went(status):
    for kind in (TRAIN, DEPLOY):
        end = _end(kind, status=status, ask=Ask.CANCEL)
        assert (end.state, end.error, end.again) == (RunState.CANCELLED, None, None)


def test_a_deployment_that_was_asked_to_stop_is_cancelled_not_succeeded():
    assert _end(DEPLOY, status=0, ask=Ask.CANCEL).state is RunState.CANCELLED


def test_a_worker_that_ends_hands_resumable_runs_back_and_explains_the_others():
    assert _end(status=3, ask=Ask.WORKER_ENDS).again is Again.FREE
    deployment = _end(DEPLOY, status=3, ask=Ask.WORKER_ENDS)
    assert deployment.state is RunState.CANCELLED
    assert "its worker was asked to end" in deployment.error["message"]


def test_the_error_that_the_job_left_is_the_runs_error():
    end = _end(status=1, left=Outcome(error=ERROR), last="noise")
    assert (end.state, end.error) == (RunState.FAILED, ERROR)


def test_a_failure_without_a_word_names_status_and_last_line():
    end = _end(status=1, last="RuntimeError: boom")
    assert end.state is RunState.FAILED
    assert "status 1" in end.error["message"]
    assert "RuntimeError: boom" in end.error["message"]


def test_a_killed_job_is_tried_again_while_it_has_attempts_and_then_fails_saying_why():
    killed = -signal.SIGKILL
    assert _end(attempt=2, status=killed).again is Again.COUNTED
    last = _end(attempt=3, status=killed)
    assert last.state is RunState.FAILED
    assert "killed by SIGKILL (out of memory?), on attempt 3 of 3" in last.error["message"]


def test_a_killed_deployment_waits_for_a_person():
    end = _end(DEPLOY, status=-signal.SIGSEGV)
    assert (end.state, end.again) == (RunState.FAILED, None)
    assert "SIGSEGV" in end.error["message"]
