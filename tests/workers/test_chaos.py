"""kill -9 at any moment of worker, supervisor, job or broker: no run forgotten, none executed
twice at once, no process and no lease left. The seed of a failed round is in the message.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app import embedded_broker
from app.services import claims, runs
from app.services.views import RunView
from app.settings import settings
from app.store.models import ENDED, RunState
from tests.conftest import ROOT
from tests.workers.lab import Lab, submit, wait_for

ROUNDS = 15
PROVE_BATCHES, PROVE_ROUNDS = 10, 20
PROOF = ROOT / "docs" / "proofs" / "chaos.jsonl"
SLOTS = "2"


@pytest.fixture
def patient(monkeypatch):
    """Attempts enough for the worst luck: every run must then succeed."""
    monkeypatch.setenv("SPECLAB_MAX_ATTEMPTS", "100")
    monkeypatch.setenv("SPECLAB_JOB_SLOTS", SLOTS)


def test_a_sample_of_kills_forgets_no_run_and_leaves_nothing(patient, lab):
    _chaos(lab, ROUNDS, seed=random.randrange(10**6))


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", range(PROVE_BATCHES))
def test_many_kills_forget_no_run_and_leave_nothing(patient, lab, batch):
    """Batch by batch, so that a proof that was interrupted goes on where it stopped."""
    commit = _commit()
    if any((done["commit"], done["batch"]) == (commit, batch) for done in _proven()):
        pytest.skip(f"batch {batch} has been proven at commit {commit}")
    figures = _chaos(lab, PROVE_ROUNDS, seed=random.randrange(10**6))
    PROOF.parent.mkdir(exist_ok=True)
    with PROOF.open("a") as file:
        told = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit, "batch": batch}
        file.write(json.dumps(told | figures) + "\n")


def _proven() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PROOF.read_text().splitlines()] if PROOF.exists() else []


def _commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip() or "unknown"


def _chaos(lab: Lab, rounds: int, seed: int) -> dict[str, Any]:
    """Submit, kill, restart; the figures of it."""
    began = time.monotonic()
    dice = random.Random(seed)
    made: list[str] = []
    kills: list[str] = []
    lab.start_worker()
    for number in range(rounds):
        made += [
            submit(f"{dice.choice(['sleep', 'family'])}:{dice.uniform(0.1, 1.5):.2f}#{number}").id
            for _ in range(dice.randrange(1, 3))
        ]
        time.sleep(dice.uniform(0, 2.0))
        kills.append(_kill(lab, dice))
        _restart_what_died(lab)
    told = f"seed {seed}, kills {kills}"
    _wait_for_the_end_of_all(told)
    _check(lab, made, told)
    return {
        "seed": seed,
        "rounds": rounds,
        "runs": len(set(made)),
        "kills": dict(Counter(kills)),
        "attempts": sum(runs.get(run_id).attempt for run_id in set(made)),
        "seconds": round(time.monotonic() - began),
    }


def _wait_for_the_end_of_all(told: str) -> None:
    """However slow the machine is, as long as runs keep ending."""
    while left := _unfinished():
        wait_for(
            lambda left=left: len(_unfinished()) < len(left),
            90,
            lambda left=left: f"the end of any of {left}; {told}",
        )


def _unfinished() -> list[RunView]:
    return list(runs.list_runs(state=set(RunState) - ENDED, limit=500).items)


def _check(lab: Lab, made: list[str], told: str) -> None:
    for run_id in made:
        run = runs.get(run_id)
        assert run.state is RunState.SUCCEEDED, f"{run}; {told}; {runs.log(run_id).text}"
        lines = (lab.home / "starts" / run_id).read_text()
        assert "overlap" not in lines, f"run {run_id} was executed twice at once: {lines}; {told}"
    wait_for(lambda: not any(slot.run_id for slot in claims.list_slots()), 10, "free slots")
    lab.workers[-1].terminate()
    lab.workers[-1].wait(60)
    wait_for(lambda: not lab.processes(), 30, lambda: f"no process: {lab.processes()}; {told}")


def _kill(lab: Lab, dice: random.Random) -> str:
    """Kill one thing at random; what it was."""
    victim = dice.choice(["worker", "supervisor", "job", "job", "broker"])
    if victim == "broker":
        lab.kill_broker()
    elif victim == "worker":
        lab.workers[-1].kill()
        lab.workers[-1].wait()
    else:
        pids = _jobs(lab) if victim == "job" else _supervisors(lab)
        if not pids:
            return f"no {victim}"
        os.kill(dice.choice(pids), signal.SIGKILL)
    return victim


def _restart_what_died(lab: Lab) -> None:
    """As the parent of `speclab up` does."""
    if not embedded_broker.answers(settings()):
        lab.start_broker()
    if lab.workers[-1].poll() is not None:
        lab.start_worker()


def _jobs(lab: Lab) -> list[int]:
    """Pids of running jobs."""
    held = [runs.get(slot.run_id) for slot in claims.list_slots() if slot.run_id]
    living = set(lab.processes())
    return [run.job_pgid for run in held if run.job_pgid in living]


def _supervisors(lab: Lab) -> list[int]:
    """Pids of the pool's processes."""
    main = lab.workers[-1].pid
    return [pid for pid in lab.processes() if _parent(pid) == main]


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
