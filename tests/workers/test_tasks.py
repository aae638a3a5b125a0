"""The queue with real workers: every run is executed once, and ends for a reason."""

from __future__ import annotations

import json
import time

import pytest

from app.services import broker, claims, runs
from app.store.models import RunState
from tests import tiny
from tests.workers.lab import submit, wait_for, wait_for_state
from workers import processes

POOLS = [("--pool", "prefork"), ("--pool", "threads"), ("--pool", "solo")]


def _starts(lab, run_id: str) -> list[str]:
    file = lab.home / "starts" / run_id
    return file.read_text().splitlines() if file.exists() else []


def _started(lab, run) -> int:
    """The pid of the run's job, once it is at work."""
    wait_for(lambda: _starts(lab, run.id), 60, f"the start of run {run.id}")
    return int(_starts(lab, run.id)[-1].split()[-1])


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool[1])
def test_a_run_is_executed_reported_and_concluded(lab, pool):
    lab.start_worker(*pool)
    run = wait_for_state(submit("sleep:0.5").id, RunState.SUCCEEDED)
    assert run.result == {"output": str(lab.home), "name": "sleep:0.5"}
    assert run.progress == 1.0
    assert len(runs.metrics(run.id)) >= 5
    assert [line.split()[:2] for line in _starts(lab, run.id)] == [["start", "1"], ["end", "1"]]
    assert all(slot.run_id is None for slot in claims.list_slots())


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool[1])
def test_cancelling_stops_the_job_and_everything_it_started(lab, pool):
    lab.start_worker(*pool)
    run = submit("family:60")
    pid = _started(lab, run)
    began = time.monotonic()
    runs.cancel(run.id, "ada")
    assert wait_for_state(run.id, RunState.CANCELLED).error is None
    assert time.monotonic() - began < 8
    assert not processes.group_alive(pid, runs.get(run.id).job_started)
    assert "saving" in runs.log(run.id).text


def test_one_worker_concludes_runs_of_every_kind_of_end(lab):
    """Several ends on one worker, because starting one takes seconds."""
    lab.start_worker(SPECLAB_JOB_SLOTS="4")
    ended = (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.LOST)
    does = ["fail:no chats in it", "crash:by zero", "exit:5", "kill", "say", "deaf:60"]
    made = {word: submit(word) for word in does}
    _started(lab, made["deaf:60"])
    runs.cancel(made["deaf:60"].id, "ada")
    end = {word: wait_for_state(run.id, *ended, seconds=90) for word, run in made.items()}

    assert end["fail:no chats in it"].state is RunState.FAILED
    assert end["fail:no chats in it"].error == {
        "kind": "data",
        "message": "no chats in it",
        "where": "line 3",
        "hint": "mend it",
    }
    assert "Traceback" in runs.log(made["fail:no chats in it"].id).text

    assert end["crash:by zero"].error["kind"] == "internal"
    assert "ZeroDivisionError: by zero" in end["crash:by zero"].error["message"]
    assert "Traceback" not in str(end["crash:by zero"].error)

    silent = end["exit:5"]
    assert silent.state is RunState.FAILED
    assert "status 5" in silent.error["message"]
    assert "the GPU fell off the bus" in silent.error["message"]

    poison = end["kill"]
    assert poison.state is RunState.FAILED
    assert "killed by SIGKILL (out of memory?), on attempt 3 of 3" in poison.error["message"]
    assert [line.split()[:2] for line in _starts(lab, poison.id)] == [
        ["start", "1"],
        ["start", "2"],
        ["start", "3"],
    ]

    said = runs.log(made["say"].id).text
    assert "CUDA_VISIBLE_DEVICES=[]\nCUDA_DEVICE_ORDER=[PCI_BUS_ID]" in said
    assert "token ***" in said
    assert "to stderr" in said

    deaf = end["deaf:60"]
    assert deaf.state is RunState.CANCELLED
    assert not processes.group_alive(deaf.job_pgid, deaf.job_started)


def test_messages_doubled_lost_and_a_broker_that_restarts_lead_to_one_execution_each(lab):
    lab.start_worker()
    doubled = submit("sleep:0.5")
    for _ in range(5):
        broker.wake(doubled.id)
    wait_for_state(doubled.id, RunState.SUCCEEDED)

    broker.client().flushall()
    lost = submit("sleep:0.2")
    broker.client().delete(broker.QUEUE)
    wait_for_state(lost.id, RunState.SUCCEEDED)

    running = submit("sleep:3")
    _started(lab, running)
    lab.kill_broker()
    unheard = submit("sleep:0.3")
    lab.start_broker()
    wait_for_state(running.id, RunState.SUCCEEDED)
    wait_for_state(unheard.id, RunState.SUCCEEDED)

    for run in (doubled, lost, running, unheard):
        assert [line.split()[:2] for line in _starts(lab, run.id)] == [["start", "1"], ["end", "1"]]


def test_slots_are_used_side_by_side_and_never_by_two(lab):
    lab.start_worker(SPECLAB_JOB_SLOTS="2")
    made = [submit(f"sleep:1#{i}") for i in range(4)]
    most = 0
    while not all(runs.get(run.id).ended for run in made):
        held = [slot.run_id for slot in claims.list_slots() if slot.run_id]
        assert len(held) == len(set(held))
        most = max(most, len(held))
        time.sleep(0.05)
    assert most == 2
    assert all(runs.get(run.id).attempt == 1 for run in made)


def test_the_real_worker_carries_a_chain_through_and_fails_what_can_not_follow(lab):
    """No stand-in: `workers.celery_app` and `workers.job`, on a tiny verifier and tiny data."""
    lab.app = "workers.celery_app"
    lab.start_worker()
    model = tiny.build_verifier(lab.home / "models" / "tiny")
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2, clearly."}]
    data = lab.home / "chats.jsonl"
    data.write_text((json.dumps({"messages": chat}) + "\n") * 12)
    verifier = runs.submit("verifier", {"source": str(model), "name": "tiny"}, owner="ada")
    prepare = runs.submit(
        "prepare",
        {"data": [str(data)], "verifier": f"run:{verifier.id}", "draft_vocab_size": 64},
        owner="ada",
    )
    missing = runs.submit("verifier", {"source": "/no/such", "name": "none"}, owner="ada")
    after = runs.submit(
        "prepare", {"data": [str(data)], "verifier": f"run:{missing.id}"}, owner="ada"
    )
    assert wait_for_state(prepare.id, RunState.SUCCEEDED, seconds=240).result["samples"] == 12
    assert "no such directory" in wait_for_state(missing.id, RunState.FAILED).error["message"]
    assert missing.id in wait_for_state(after.id, RunState.FAILED).error["message"]
    assert runs.get(after.id).attempt == 0
