"""After any death: no run forgotten, no process left, no slot held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from app.services import broker, claims, runs
from app.settings import settings
from app.store.engine import writing
from app.store.models import Deployment, Run, RunState, Slot, now
from speculators_core.data import occupancy
from tests.workers.lab import submit, wait_for, wait_for_state
from workers import leases, leftovers, processes
from workers.reaper import HOST_GONE_S, Reaper

_SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def reaper(home, monkeypatch):
    """A reaper that is swept by hand, and a bell that counts instead of ringing."""
    leases.host_slots.cache_clear()
    rung = []
    monkeypatch.setattr(broker, "wake", lambda run_id: not rung.append(run_id))
    made = Reaper("here")
    made.rung = rung
    made.sweep()
    return made


@pytest.fixture
def group():
    """A process group that nobody supervises any more."""
    child = subprocess.Popen(_SLEEPER, start_new_session=True)
    yield child.pid, processes.start_time(child.pid)
    child.kill()
    child.wait()


def _claimed(kind: str = "verifier", does: str = "sleep:1") -> str:
    run = submit(does, kind=kind)
    assert claims.claim("here").run_id == run.id
    return run.id


def _set(run_id: str, **values) -> None:
    with writing() as session:
        run = session.get(Run, run_id)
        for name, value in values.items():
            setattr(run, name, value)


def _sweep_for(reaper: Reaper, seconds: float) -> None:
    """As its thread would for that long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reaper.sweep()
        time.sleep(0.1)


def test_a_heartbeat_of_yesterday_is_reconciled_and_the_run_queued_again(reaper):
    run_id = _claimed()
    _set(run_id, heartbeat_at=now() - timedelta(days=1))
    _sweep_for(reaper, 2.0)
    run = runs.get(run_id)
    assert (run.state, run.attempt) == (RunState.QUEUED, 1)
    assert "no sign of life for 8640" in run.progress_text
    assert all(slot.run_id is None for slot in claims.list_slots())
    assert run_id in reaper.rung


def test_a_lost_deployment_is_explained_and_waits_for_a_person(reaper):
    run_id = _claimed("deploy", "sleep:1")
    _set(run_id, heartbeat_at=now() - timedelta(days=1))
    _sweep_for(reaper, 2.0)
    run = runs.get(run_id)
    assert run.state is RunState.LOST
    assert "its worker on here died" in run.error["message"]


def test_a_run_whose_job_is_gone_is_lost_long_before_its_heartbeat_is_old(reaper):
    run_id = _claimed()
    claims.set_job(run_id, 999_999_999, 1.0)
    _sweep_for(reaper, 2.0)
    assert runs.get(run_id).state is RunState.QUEUED


def test_a_silent_runs_group_is_ended_before_the_run_is_given_to_another(reaper, group):
    run_id = _claimed()
    claims.set_job(run_id, *group)
    _set(run_id, heartbeat_at=now() - timedelta(minutes=1))
    _sweep_for(reaper, 2.0)
    assert not processes.group_alive(*group)
    assert runs.get(run_id).state is RunState.QUEUED


def test_a_run_that_beats_is_left_alone_however_old_its_last_beat_was(reaper, group):
    """The store was away for a minute, and the supervisor speaks again while the reaper looks."""
    run_id = _claimed()
    claims.set_job(run_id, *group)
    for _ in range(20):
        _set(run_id, heartbeat_at=now() - timedelta(minutes=1))
        reaper.sweep()
        time.sleep(0.1)
    assert runs.get(run_id).state is RunState.RUNNING
    assert processes.group_alive(*group)


def test_the_server_of_a_dead_deployment_is_ended_and_a_reused_number_is_not(reaper, group):
    pgid, started = group
    for start, alive in ((started - 1, True), (started, False)):
        run_id = _claimed("deploy", f"sleep:{start}")
        with writing() as session:
            deployment = session.get(Deployment, run_id)
            deployment.server_pgid, deployment.server_started = pgid, start
        claims.finish(run_id, RunState.FAILED)
        reaper.sweep()
        assert processes.group_alive(pgid, started) is alive
        with writing() as session:
            assert session.get(Deployment, run_id).server_pgid is None


def test_the_group_of_a_run_that_ended_is_ended(reaper, group):
    run_id = _claimed()
    claims.set_job(run_id, *group)
    claims.finish(run_id, RunState.FAILED)
    reaper.sweep()
    assert not processes.group_alive(*group)


def test_the_server_that_a_dead_job_had_beside_it_is_ended(reaper, group):
    """vLLM for hidden states, in a group of its own; of this attempt, not of a later one."""
    run_id = _claimed()
    claims.set_job(run_id, os.getpid() + 10**6, 1.0)  # long gone
    record = leftovers.recorder(runs.get(run_id))
    record(*group)
    assert leftovers.end_leftovers(run_id, 7)
    assert processes.group_alive(*group) and leftovers.remembers_server(run_id)
    claims.finish(run_id, RunState.FAILED)
    reaper.sweep()
    assert not processes.group_alive(*group)
    assert not leftovers.remembers_server(run_id)


def test_runs_of_a_host_that_vanished_are_queued_again_and_of_a_living_one_not(reaper):
    long_ago = now() - timedelta(seconds=HOST_GONE_S + 60)
    claims.register_slots("gone", [], 1, 0)
    claims.register_slots("alive", [], 1, 0)
    ids = {}
    for host in ("gone", "alive"):
        ids[host] = submit(f"sleep:{len(host)}").id
        assert claims.claim(host).run_id == ids[host]
        _set(ids[host], heartbeat_at=long_ago)
    with writing() as session:
        session.get(Slot, "gone/jobs:0").host_seen_at = long_ago
    reaper.sweep()
    assert runs.get(ids["gone"]).state is RunState.QUEUED
    assert runs.get(ids["alive"]).state is RunState.RUNNING


def test_a_slot_whose_run_has_ended_is_freed(reaper):
    run_id = _claimed()
    claims.finish(run_id, RunState.FAILED)
    with writing() as session:
        session.get(Slot, "here/jobs:0").run_id = run_id
    reaper.sweep()
    assert claims.list_slots("here")[0].run_id is None


def test_a_queued_run_that_nobody_woke_is_sent_again(reaper):
    run = submit("sleep:1")
    _set(run.id, woken_at=None)
    reaper.rung.clear()
    reaper.sweep()
    assert reaper.rung == [run.id]


def test_half_written_outputs_go_when_no_running_job_can_be_their_writer(reaper, home):
    folder = home / "speculators"
    old, fresh, finished = folder / ".a.1.partial", folder / ".b.2.partial", folder / "c"
    for place in (old, fresh, finished):
        place.mkdir(parents=True)
        (place / "model").write_text("x")
    an_hour_ago = time.time() - 3600
    for place in (old, finished):
        os.utime(place / "model", (an_hour_ago, an_hour_ago))
        os.utime(place, (an_hour_ago, an_hour_ago))
    run_id = _claimed()
    _set(run_id, started_at=now() - timedelta(hours=2))  # may be the writer
    reaper.sweep()
    assert old.exists()
    claims.finish(run_id, RunState.FAILED)
    reaper.sweep()
    assert not old.exists()
    assert fresh.exists() and finished.exists()


def test_a_step_that_fails_does_not_keep_the_others_from_theirs(reaper, monkeypatch):
    monkeypatch.setattr(reaper, "reap_silent_runs", lambda: 1 / 0)
    run = submit("sleep:1")
    _set(run.id, woken_at=None)
    reaper.rung.clear()
    reaper.sweep()
    assert reaper.rung == [run.id]


def test_after_a_killed_worker_nothing_is_left_and_its_run_is_done_by_the_next(lab):
    worker = lab.start_worker()
    run = submit("family:1.5")
    wait_for((lab.home / "starts" / run.id).exists, 60, "the job's start")
    wait_for(lambda: runs.get(run.id).job_pgid, 10, "its group in the store")
    group = runs.get(run.id).job_pgid, runs.get(run.id).job_started
    worker.kill()
    worker.wait()
    killed = time.monotonic()
    lab.start_worker()
    wait_for(lambda: not processes.group_alive(*group), 30, "the end of the first job's group")
    done = wait_for_state(run.id, RunState.SUCCEEDED, seconds=60)
    assert time.monotonic() - killed < 30
    assert done.attempt == 2


def test_a_killed_pool_process_costs_an_attempt_and_no_run(lab):
    lab.start_worker()
    run = submit("sleep:1.5")
    wait_for((lab.home / "starts" / run.id).exists, 60, "the job's start")
    job = int((lab.home / "starts" / run.id).read_text().split()[2])
    supervisor = int(_stat(job)[1])
    os.kill(supervisor, signal.SIGKILL)
    assert wait_for_state(run.id, RunState.SUCCEEDED, seconds=60).attempt == 2


def test_a_worker_told_to_end_hands_its_run_back_and_leaves_nothing(lab):
    worker = lab.start_worker()
    run = submit("sleep:2")
    deployment = submit("sleep:60", kind="deploy")
    for made in (run, deployment):
        wait_for((lab.home / "starts" / made.id).exists, 60, "the jobs' start")
    worker.terminate()
    assert worker.wait(30) == 0
    wait_for(lambda: not lab.processes(), 5, lambda: f"no process left: {lab.processes()}")
    back, gone = runs.get(run.id), runs.get(deployment.id)
    assert (back.state, back.attempt) == (RunState.QUEUED, 0)
    assert gone.state is RunState.CANCELLED
    assert "its worker was asked to end" in gone.error["message"]
    lab.start_worker()
    assert wait_for_state(run.id, RunState.SUCCEEDED, seconds=60).attempt == 1


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_caches_are_cleaned_only_where_an_age_is_set(home, reaper, monkeypatch) -> None:
    old = home / "datasets" / "chats.states-0123"
    occupancy.occupy(old, {}).close()
    os.utime(old / occupancy.MARK, (0, 0))
    reaper.sweep()
    assert old.exists()
    monkeypatch.setenv("SPECLAB_CACHE_DAYS", "30")
    settings.cache_clear()
    reaper.sweep()
    assert not old.exists()
    occupancy.occupy(old, {}).close()
    os.utime(old / occupancy.MARK, (0, 0))
    reaper.sweep()  # within the hour: not looked at again
    assert old.exists()
