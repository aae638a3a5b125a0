"""Claims: who gets what slot when, and what becomes of runs whose process died."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from app.services import claims, deployments, recovery, runs
from app.settings import settings
from app.store.engine import writing
from app.store.models import DeploymentPhase, Run, RunState, now
from speculators_core.errors import InputError, NotFound

FORK = multiprocessing.get_context("fork")
PREPARE = {"data": ["chats.jsonl"], "verifier": "v"}


def prepare(owner="ada", seed=0, **more) -> str:
    return runs.submit("prepare", {**PREPARE, "seed": seed}, owner=owner, **more).id


def train(owner="ada", seed=0, processes=1, **more) -> str:
    params = {"data": "d", "verifier": "v", "seed": seed, "processes": processes}
    return runs.submit("train", params, owner=owner, **more).id


def deploy(owner="ada", port=None, **more) -> str:
    return runs.submit("deploy", {"verifier": "v", "port": port}, owner=owner, **more).id


def claim(host="here") -> str | None:
    claimed = claims.claim(host)
    return claimed.run_id if claimed else None


def state(run_id: str) -> RunState:
    return runs.get(run_id).state


def held() -> set[str]:
    return {slot.run_id for slot in claims.list_slots() if slot.run_id}


def silent_for(run_id: str, seconds: float) -> None:
    with writing() as session:
        session.get(Run, run_id).heartbeat_at = now() - timedelta(seconds=seconds)


@pytest.fixture
def here(store):
    claims.register_slots("here", [], 1, 1)
    return store


@pytest.fixture
def two_gpus(store):
    claims.register_slots("here", [0, 3], 1, 1)
    return store


def test_a_claim_takes_run_and_slot_together_and_finishing_frees_the_slot(here):
    run_id = prepare()
    claimed = claims.claim("here")
    assert claimed.run_id == run_id and claimed.slot_id == "here/jobs:0"
    assert claimed.devices == () and claimed.attempt == 1
    run = runs.get(run_id)
    assert run.state is RunState.RUNNING and run.host == "here" and run.heartbeat_at is not None
    assert [slot.run_id for slot in claims.list_slots()] == [run_id, None]
    assert claims.finish(run_id, "succeeded")
    assert [slot.run_id for slot in claims.list_slots()] == [None, None]
    assert runs.get(run_id).progress == 1.0 and runs.get(run_id).finished_at is not None


def test_nothing_is_claimed_without_a_free_slot_or_on_a_host_without_slots(here):
    first, second = prepare(seed=1), prepare(seed=2)
    assert claim("elsewhere") is None
    assert claim() == first and claim() is None
    claims.finish(first, "failed", {"message": "no"})
    assert claim() == second


def test_kinds_take_the_slots_of_a_cpu_host(here):
    job, served = train(), deploy()
    assert {claims.claim("here").slot_id, claims.claim("here").slot_id} == {
        "here/jobs:0",
        "here/serving:0",
    }
    assert state(job) is state(served) is RunState.RUNNING


def test_a_gpu_host_trains_and_serves_on_gpus_and_prepares_beside_them(two_gpus):
    train(), deploy(), prepare()
    taken = [claims.claim("here") for _ in range(3)]
    assert {(c.kind.value, c.devices) for c in taken} == {
        ("train", (0,)),
        ("deploy", (3,)),
        ("prepare", ()),
    }
    train(seed=2)
    assert claim() is None


def test_a_training_of_two_processes_takes_two_gpus_at_once_or_waits(two_gpus):
    other = train()
    assert claim() == other
    both = train(seed=2, processes=2)
    behind = train(seed=3)
    assert claim() == behind  # one GPU is free, which is enough for this one alone
    claims.finish(other, "succeeded")
    assert claim() is None
    claims.finish(behind, "succeeded")
    claimed = claims.claim("here")
    assert claimed.run_id == both and claimed.devices == (0, 3)
    assert {slot.run_id for slot in claims.list_slots() if slot.kind == "gpu"} == {both}
    claims.finish(both, "succeeded")
    assert {slot.run_id for slot in claims.list_slots()} == {None}


def test_processes_share_the_slot_of_a_cpu_host(here):
    run_id = train(processes=4)
    assert claim() == run_id


def test_twenty_threads_for_two_gpus_never_give_one_slot_or_run_two_holders(store):
    claims.register_slots("here", [0, 1], 0, 0)
    ids = [train(seed=n) for n in range(12)]
    taken: list[claims.Claim] = []
    guard = threading.Lock()

    def work(_: int) -> None:
        deadline = time.monotonic() + 90
        while len(taken) < 12 and time.monotonic() < deadline:
            mine = claims.claim("here")
            if mine is None:
                time.sleep(0.05)
                continue
            with guard:
                taken.append(mine)
            holders = Counter(s.run_id for s in claims.list_slots() if s.run_id)
            assert holders[mine.run_id] == 1
            running = runs.list_runs(state="running").items
            assert len(running) <= 2
            assert claims.finish(mine.run_id, "succeeded")

    with ThreadPoolExecutor(20) as pool:
        for done in [pool.submit(work, n) for n in range(20)]:
            done.result()
    assert sorted(c.run_id for c in taken) == sorted(ids)  # each exactly once


def claim_in_child(start, results) -> None:
    start.wait()
    results.put([claim() for _ in range(3)])


def test_processes_that_claim_at_once_never_share_a_run_or_a_slot(two_gpus):
    for n in range(8):
        train(seed=n)
    start, results = FORK.Event(), FORK.Queue()
    children = [FORK.Process(target=claim_in_child, args=(start, results)) for _ in range(4)]
    for child in children:
        child.start()
    start.set()
    found = [run_id for _ in children for run_id in results.get(timeout=60) if run_id]
    for child in children:
        child.join(60)
    assert len(found) == len(set(found)) == 2
    held = [slot.run_id for slot in claims.list_slots() if slot.run_id]
    assert sorted(held) == sorted(found)


def test_a_cancel_and_a_claim_at_once_never_both_win(store):
    claims.register_slots("here", [], 30, 0)
    ids = [train(seed=n) for n in range(12)]
    with ThreadPoolExecutor(6) as pool:
        pool.map(lambda run_id: runs.cancel(run_id, "ada"), ids)
        pool.map(lambda _: claim(), ids)
    states = Counter(state(run_id) for run_id in ids)
    assert set(states) <= {RunState.CANCELLED, RunState.CANCELLING}
    held = {slot.run_id for slot in claims.list_slots() if slot.run_id}
    assert held == {run_id for run_id in ids if state(run_id) is RunState.CANCELLING}


def test_priority_comes_first_then_who_has_less_running_then_age(store):
    claims.register_slots("here", [], 8, 0)
    greedy = [train("ada", seed=n) for n in range(3)]
    modest = train("bob", seed=7)
    urgent = train("ada", seed=8, priority=5)
    assert claim() == urgent
    assert claim() == modest  # ada has one running, bob none
    assert [claim(), claim(), claim()] == greedy


def test_a_run_waits_for_all_that_it_needs_and_is_woken_by_their_success(here, rings):
    first, second = prepare(seed=1), prepare(seed=2)
    third = train(needs=[first, second])
    claim()
    assert claim() is None
    claims.finish(first, "succeeded")
    assert claim() == second
    rings.clear()
    claims.finish(second, "succeeded")
    assert rings == [third]
    assert claim() == third


def test_what_needs_a_failed_run_fails_and_what_needs_that_fails_too_saying_so(here):
    first = prepare(name="the first")
    second = train(needs=[first])
    third = deploy(needs=[second])
    claim()
    claims.finish(first, "failed", {"message": "no data"})
    for run_id, needed in ((second, first), (third, second)):
        run = runs.get(run_id)
        assert run.state is RunState.FAILED and run.finished_at is not None
        assert needed in run.error["message"] and run.error["hint"]
    assert "the first" in runs.get(second).error["message"]


def test_cancelling_a_queued_run_fails_what_needs_it(here):
    first = prepare()
    second = train(needs=[first])
    runs.cancel(first, "ada")
    assert state(second) is RunState.FAILED


def test_a_replacement_stops_the_deployment_when_all_else_is_ready_and_takes_its_slot(here):
    old = deploy(port=1)
    assert claim() == old
    job = prepare()
    other = deploy("bob", port=2)
    new = deploy(port=3, needs=[job], replaces=old)
    assert claim() == job
    assert claim() is None and state(old) is RunState.RUNNING  # not ready: nothing is stopped
    claims.finish(job, "succeeded")
    assert claim() is None and state(old) is RunState.CANCELLING
    assert new in runs.get(old).progress_text
    assert claims.finish(old, "cancelled")
    assert claim() == new and state(other) is RunState.QUEUED


def test_a_replacement_of_a_deployment_that_never_started_cancels_it(here):
    busy, old = deploy(port=1), deploy(port=2)
    claim()
    new = deploy(port=3, replaces=old)
    assert claim() is None and state(old) is RunState.QUEUED  # no room for the new one either
    claims.finish(busy, "succeeded")
    assert claim() == new and state(old) is RunState.CANCELLED


def test_only_the_host_that_can_serve_the_replacement_asks_the_old_one_to_stop(here):
    claims.register_slots("small", [], 1, 0)
    old = deploy(port=1)
    claim()
    deploy(port=2, replaces=old)
    assert claim("small") is None and state(old) is RunState.RUNNING


def test_a_beat_says_that_the_run_should_stop(here):
    run_id = prepare()
    claim()
    assert claims.beat(run_id) is RunState.RUNNING
    runs.cancel(run_id, "ada")
    assert claims.beat(run_id) is RunState.CANCELLING
    with pytest.raises(NotFound):
        claims.beat("nosuchrun")


def test_a_beat_keeps_the_run_and_its_slot_alive(here):
    run_id = prepare()
    claim()
    silent_for(run_id, 60)
    assert [run.id for run in claims.lost_runs("here", 20)] == [run_id]
    claims.beat(run_id)
    assert claims.lost_runs("here", 20) == []
    assert claims.list_slots()[0].heartbeat_at == runs.get(run_id).heartbeat_at


def test_late_reports_of_an_ended_run_change_nothing_and_are_logged(here, caplog):
    run_id = prepare()
    claim()
    assert claims.progress(run_id, 0.5, "half", 10.0)
    assert claims.set_job(run_id, 4321, 99.0)
    assert claims.set_result(run_id, {"output": "/a"})
    runs.cancel(run_id, "ada")
    assert claims.progress(run_id, 0.6, "saving")
    assert claims.finish(run_id, "cancelled")
    before = runs.get(run_id)
    with caplog.at_level(logging.WARNING):
        assert not claims.finish(run_id, "succeeded")
        assert not claims.progress(run_id, 0.9, "still here")
        assert not claims.set_result(run_id, {"output": "/b"})
        assert claims.beat(run_id) is RunState.CANCELLED
    assert runs.get(run_id) == before
    assert caplog.text.count(run_id) == 3


def test_an_attempt_that_was_lost_can_not_speak_for_the_next_one(here):
    run_id = train()
    first = claims.claim("here")
    assert claims.lose(run_id, "it was silent") is RunState.QUEUED
    second = claims.claim("here")
    assert (first.attempt, second.attempt) == (1, 2)
    silent_for(run_id, 60)
    before = runs.get(run_id)
    assert claims.beat(run_id, first.attempt) is RunState.LOST
    assert not claims.progress(run_id, 0.9, "old news", attempt=first.attempt)
    assert not claims.set_result(run_id, {"output": "/old"}, attempt=first.attempt)
    assert not claims.set_job(run_id, 1, 1.0, attempt=first.attempt)
    assert not claims.finish(run_id, "failed", attempt=first.attempt)
    assert claims.lose(run_id, "its worker died", attempt=first.attempt) is None
    assert not recovery.hand_back(run_id, "its worker ends", attempt=first.attempt)
    claims.add_metrics(run_id, {1: {"loss": 9.0}}, attempt=first.attempt)
    assert runs.get(run_id) == before and runs.metrics(run_id) == []
    assert claims.beat(run_id, second.attempt) is RunState.RUNNING
    assert claims.finish(run_id, "succeeded", attempt=second.attempt)


def test_progress_that_is_not_finite_is_unknown(here):
    run_id = prepare()
    claim()
    claims.progress(run_id, float("nan"), "a\x00b", float("inf"))
    run = runs.get(run_id)
    assert (run.progress, run.eta_s, run.progress_text) == (None, None, "a\ufffdb")


def test_a_lost_run_that_can_resume_is_queued_again_until_its_attempts_are_used_up(here):
    run_id = train()
    follower = deploy(needs=[run_id])
    for attempt in range(1, settings().max_attempts + 1):
        assert claim() == run_id and runs.get(run_id).attempt == attempt
        more = attempt < settings().max_attempts
        after = RunState.QUEUED if more else RunState.LOST
        assert claims.lose(run_id, "the job process is gone") is after
        assert state(run_id) is after
        assert all(slot.run_id is None for slot in claims.list_slots())
        assert state(follower) is (RunState.QUEUED if more else RunState.FAILED)
        if more:
            assert "the job process is gone" in runs.get(run_id).progress_text
    assert state(run_id) is RunState.LOST
    assert "the job process is gone" in runs.get(run_id).error["message"]


def test_whoever_dies_right_after_losing_a_run_has_queued_it_again(here, monkeypatch):
    run_id = train()
    claim()

    def die(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(recovery, "wake", die)
    with pytest.raises(SystemExit):
        claims.lose(run_id, "power loss")
    assert state(run_id) is RunState.QUEUED


def test_a_lost_deployment_waits_for_a_person_and_a_cancelling_one_ends_cancelled(here):
    served, job = deploy(), train()
    claim(), claim()
    assert claims.lose(served, "power loss") is RunState.LOST
    assert state(served) is RunState.LOST
    runs.cancel(job, "ada")
    assert claims.lose(job, "power loss") is RunState.CANCELLED
    assert state(job) is RunState.CANCELLED
    assert claims.lose(job, "again") is None


def test_a_run_that_its_worker_hands_back_is_queued_again_and_loses_no_attempt(here):
    run_id, follower = train(), deploy()
    with writing() as session:
        session.get(Run, run_id).attempt = settings().max_attempts - 1
    needing = prepare(needs=[run_id])
    claim(), claim()
    assert recovery.hand_back(run_id, "the worker was told to end")
    run = runs.get(run_id)
    assert run.state is RunState.QUEUED and run.attempt == settings().max_attempts - 1
    assert state(needing) is RunState.QUEUED and run_id not in held()
    assert claim() == run_id
    runs.cancel(run_id, "ada")
    assert not recovery.hand_back(run_id, "again") and state(run_id) is RunState.CANCELLING
    assert follower in held()


def test_lost_runs_are_those_of_one_host_or_of_all(here):
    claims.register_slots("there", [], 1, 0)
    mine, theirs = train(seed=1), train(seed=2)
    assert (claim("here"), claim("there")) == (mine, theirs)
    silent_for(mine, 100), silent_for(theirs, 200)
    assert [run.id for run in claims.lost_runs("here", 20)] == [mine]
    assert [run.id for run in claims.lost_runs(None, 150)] == [theirs]
    assert claims.lost_runs("here", 150) == []


def test_slots_without_a_living_run_are_freed(here):
    run_id = train()
    claim()
    assert claims.free_stale_slots("here") == []
    with writing() as session:
        session.get(Run, run_id).state = RunState.FAILED  # as a crash between two writes leaves it
    assert claims.free_stale_slots("elsewhere") == []
    assert claims.free_stale_slots("here") == ["here/jobs:0"]
    assert all(slot.run_id is None for slot in claims.list_slots())


def test_registering_again_adds_and_drops_slots_but_keeps_held_ones(store):
    claims.register_slots("here", [0, 1], 1, 1)
    assert [slot.id for slot in claims.list_slots("here")] == [
        "here/gpu:0",
        "here/gpu:1",
        "here/jobs:0",
    ]
    held = train()
    claim()
    claims.register_slots("here", [], 1, 2)
    assert {slot.id: slot.run_id for slot in claims.list_slots("here")} == {
        "here/gpu:0": held,
        "here/jobs:0": None,
        "here/serving:0": None,
        "here/serving:1": None,
    }
    seen = claims.list_slots("here")[0].host_seen_at
    claims.finish(held, "succeeded")
    claims.register_slots("here", [], 1, 2)
    slots = claims.list_slots("here")
    assert "here/gpu:0" not in {slot.id for slot in slots} and slots[0].host_seen_at > seen


def test_runs_that_nobody_was_woken_for_are_found_once_they_could_start(here, monkeypatch):
    monkeypatch.setattr("app.services.broker.wake", lambda run_id: False)
    first = prepare()
    second = train(needs=[first])
    assert claims.unwoken(0) == [first]
    monkeypatch.setattr("app.services.broker.wake", lambda run_id: True)
    assert claims.wake([first]) == 1
    assert claims.unwoken(60) == [] and claims.unwoken(0) == [first]
    claim()
    assert claims.unwoken(0) == []
    monkeypatch.setattr("app.services.broker.wake", lambda run_id: False)
    claims.finish(first, "succeeded")
    assert claims.unwoken(60) == [second]


def test_a_deployment_is_updated_while_it_runs_and_out_of_reach_when_it_has_ended(here):
    run_id = deploy()
    claim()
    assert deployments.get(run_id).phase is None and not deployments.get(run_id).ready
    assert deployments.update(
        run_id,
        phase=DeploymentPhase.READY,
        endpoint="http://127.0.0.1:8000",
        command=["vllm", "serve"],
        server_pgid=77,
    )
    view = deployments.get(run_id)
    assert view.ready and view.ready_at is not None and view.command == ["vllm", "serve"]
    with pytest.raises(TypeError, match="colour"):
        deployments.update(run_id, colour="red")
    assert deployments.stop(run_id, "bob").state is RunState.CANCELLING
    claims.finish(run_id, "cancelled")
    ended = deployments.get(run_id)
    assert ended.phase is None and ended.endpoint is None and not ended.active
    assert not deployments.update(run_id, phase=DeploymentPhase.READY)
    assert deployments.list_deployments(active_only=True) == []
    assert [d.id for d in deployments.list_deployments()] == [run_id]
    with pytest.raises(NotFound):
        deployments.stop("nosuchrun", "bob")


def test_a_training_that_no_machine_could_ever_run_is_refused(store):
    train(processes=9)  # no machine is known yet: one may come that can
    claims.register_slots("small", [0, 1], 1, 1)
    train(processes=2)
    with pytest.raises(InputError, match="3 processes take a GPU each") as refused:
        train(processes=3)
    assert refused.value.where == "processes"
    claims.register_slots("cpu", [], 1, 1)  # its processes share the cores
    train(processes=3)
    with pytest.raises(InputError, match="one of several nodes"):
        params = {"data": "d", "verifier": "v", "nodes": 2, "rendezvous": "a:1"}
        runs.submit("train", params, owner="ada")
