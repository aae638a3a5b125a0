"""One supervised job, without a worker around it."""

from __future__ import annotations

import threading
import time

import pytest

from app.services import claims, runs
from app.store.engine import writing
from app.store.models import Run, RunState
from speculators_core.errors import Unavailable
from tests.workers.lab import submit, wait_for
from workers import leases, processes
from workers.supervision import supervise

JOB = "tests.workers.stand_in_job"


@pytest.fixture
def claimed(home):
    leases.host_slots.cache_clear()
    leases.register()

    def make(does: str) -> claims.Claim:
        run = submit(does)
        claim = claims.claim("here")
        assert claim.run_id == run.id
        return claim

    return make


def _at_work(home, run_id: str) -> None:
    wait_for((home / "starts" / run_id).exists, 60, "the job's start")
    wait_for(lambda: runs.get(run_id).job_pgid, 10, "its group in the store")


def _supervised(claim, **options) -> threading.Thread:
    options.setdefault("stopping", lambda: False)
    thread = threading.Thread(target=supervise, args=(claim, options["stopping"], JOB))
    thread.start()
    return thread


def test_while_the_store_is_away_the_job_goes_on_and_its_end_is_recorded_later(
    claimed, home, monkeypatch
):
    claim = claimed("sleep:0.3")
    away = threading.Event()
    for module, name in ((claims, "beat"), (claims, "finish"), (runs, "get")):
        real = getattr(module, name)

        def call(*arguments, real=real, **options):
            if away.is_set():
                raise Unavailable("the store is away")
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)
    away.set()  # in this process; the job's own has its store
    watching = _supervised(claim)
    ended = home / "starts" / claim.run_id
    wait_for(lambda: ended.exists() and "end" in ended.read_text(), 60, "the job's end")
    time.sleep(2)
    assert watching.is_alive(), "the supervisor gave up"
    away.clear()
    watching.join(20)
    assert runs.get(claim.run_id).state is RunState.SUCCEEDED


def test_a_leased_gpu_is_shown_to_the_job_once_by_its_index(claimed):
    claim = claimed("say").model_copy(update={"devices": (3,)})
    supervise(claim, lambda: False, JOB)
    log = runs.log(claim.run_id).text
    assert "CUDA_VISIBLE_DEVICES=[3]\nCUDA_DEVICE_ORDER=[PCI_BUS_ID]" in log


def test_a_run_that_was_given_to_another_attempt_is_left_alone_and_its_old_job_ends(claimed, home):
    claim = claimed("deaf:60")
    watching = _supervised(claim)
    _at_work(home, claim.run_id)
    group = runs.get(claim.run_id).job_pgid, runs.get(claim.run_id).job_started
    with writing() as session:
        session.get(Run, claim.run_id).attempt += 1
    watching.join(20)
    assert not watching.is_alive()
    assert not processes.group_alive(*group)
    run = runs.get(claim.run_id)
    assert (run.state, run.attempt) == (RunState.RUNNING, 2)


def test_a_job_whose_worker_ends_is_asked_to_save_and_its_run_handed_back(claimed, home):
    claim = claimed("sleep:60")
    ending = threading.Event()
    watching = _supervised(claim, stopping=ending.is_set)
    _at_work(home, claim.run_id)
    ending.set()
    watching.join(20)
    run = runs.get(claim.run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 0)
    assert "its worker was asked to end" in run.progress_text
    assert "saving" in runs.log(claim.run_id).text


def test_a_job_that_can_not_be_started_fails_its_run_in_words(claimed, home, monkeypatch):
    claim = claimed("sleep:1")
    (home / "runs").mkdir()
    (home / "runs" / claim.run_id).write_text("a file where the directory belongs")
    supervise(claim, lambda: False, JOB)
    run = runs.get(claim.run_id)
    assert run.state is RunState.FAILED
    assert "could not be supervised" in run.error["message"]
    assert all(slot.run_id is None for slot in claims.list_slots())
