"""Reports arrive, in batches, also when the store was away."""

from __future__ import annotations

import threading
import time

import pytest

from app.services import claims, runs
from speculators_core.errors import Stopped, Unavailable
from tests.workers.lab import submit, wait_for
from workers import leases
from workers.reporter import Reporter


@pytest.fixture
def run(home):
    leases.host_slots.cache_clear()
    leases.register()
    made = submit("sleep:1")
    assert claims.claim("here").run_id == made.id
    return made


class Away:
    """The store's two report functions, away while `gone`; counts the writes that went through."""

    def __init__(self, monkeypatch) -> None:
        self.gone = False
        self.writes = 0
        for name in ("progress", "add_metrics"):
            monkeypatch.setattr(claims, name, self._guarded(getattr(claims, name)))

    def _guarded(self, real):
        def call(*arguments, **options):
            if self.gone:
                raise Unavailable("the store is away")
            self.writes += 1
            return real(*arguments, **options)

        return call


def test_progress_and_metrics_reach_the_store_while_the_work_goes_on(run):
    with Reporter(run.id, every_s=0.05) as reporter:
        reporter.update(0.5, "half", 10.0)
        reporter.metrics(1, {"loss": 2.0})
        seen = wait_for(lambda: runs.get(run.id).progress == 0.5 and runs.get(run.id), 5, "it")
        assert (seen.progress_text, seen.eta_s) == ("half", 10.0)
        assert wait_for(lambda: runs.metrics(run.id), 5, "metrics")[0].values == {"loss": 2.0}


def test_many_reports_are_few_writes(run, monkeypatch):
    store = Away(monkeypatch)
    with Reporter(run.id, every_s=0.2) as reporter:
        for step in range(1000):
            reporter.update(step / 1000, f"step {step}")
            reporter.metrics(step, {"loss": float(step)})
    assert store.writes <= 6
    assert len(runs.metrics(run.id)) == 1000
    assert runs.get(run.id).progress_text == "step 999"


def test_a_step_reported_again_replaces_the_earlier_one(run):
    with Reporter(run.id, every_s=60) as reporter:
        reporter.metrics(1, {"loss": 2.0})
        reporter.metrics(1, {"loss": 1.0})
    assert [m.values for m in runs.metrics(run.id)] == [{"loss": 1.0}]


def test_nothing_is_lost_while_the_store_is_away(run, monkeypatch):
    store = Away(monkeypatch)
    store.gone = True
    reporter = Reporter(run.id, every_s=0.02)
    ended = threading.Event()

    def work():
        with reporter:
            for step in range(20):
                reporter.metrics(step, {"loss": 1.0})
                reporter.update(step / 20, f"step {step}")
                time.sleep(0.01)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert not ended.wait(0.6), "the reporter gave up although the store was away"
    store.gone = False
    assert ended.wait(5)
    assert [m.step for m in runs.metrics(run.id)] == list(range(20))
    assert runs.get(run.id).progress_text == "step 19"


def test_insisting_on_an_absent_store_ends_when_the_job_is_asked_to_stop(run):
    reporter = Reporter(run.id, every_s=0.01)

    def action():
        reporter.stop()
        raise Unavailable("the store is away")

    with pytest.raises(Stopped):
        reporter.insist(action)
