"""The demo's chain of runs, walked through with a stand-in for the worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.services import claims, demo, deployments, runs
from app.services.views import DemoView
from app.settings import settings
from app.store.models import DeploymentPhase, RunState

KEYS = ("verifier", "chat", "self_write", "prepare", "train", "evaluate", "deploy")
JOBS = ("verifier", "self_write", "prepare", "train", "evaluate")


class Worker:
    """A stand-in for a worker on a machine without GPUs: work is done when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        claims.register_slots("here", [], 1, 1)

    def claim(self) -> str | None:
        claimed = claims.claim("here")
        return claimed.run_id if claimed else None

    def claim_all(self) -> set[str]:
        return {run_id for run_id in iter(self.claim, None) if run_id}

    def succeed(self, run_id: str) -> None:
        output = self.folder / run_id
        output.mkdir()
        result = {"output": str(output), "held_out": str(output)}
        if runs.get(run_id).kind == "evaluate":
            result = {"acceptance_length": 1.83}
        claims.set_result(run_id, result)
        assert claims.finish(run_id, "succeeded")

    def serve(self, run_id: str) -> None:
        assert deployments.update(run_id, phase=DeploymentPhase.READY, endpoint="http://x")

    def stopping(self) -> set[str]:
        return {run.id for run in runs.list_runs(state="cancelling").items}

    def work_through(self) -> DemoView:
        """Start what can start and let every job succeed, until nothing is left to start."""
        while (started := self.claim_all()) | (stopping := self.stopping()):
            for run_id in started - stopping:
                if runs.get(run_id).kind == "deploy":
                    self.serve(run_id)
                else:
                    self.succeed(run_id)
            for run_id in stopping:
                claims.finish(run_id, "cancelled")
        return demo.status()


@pytest.fixture
def worker(store, tmp_path) -> Worker:
    (tmp_path / "outputs").mkdir()
    return Worker(tmp_path / "outputs")


def ids(view: DemoView) -> dict[str, str | None]:
    return {stage.key: stage.run_id for stage in view.stages}


def test_before_it_is_started_the_demo_tells_what_it_would_do(store):
    view = demo.status()
    assert view.state == "absent" and view.headline is None and view.deployment_id is None
    assert tuple(stage.key for stage in view.stages) == KEYS
    assert all(stage.title and stage.purpose and stage.run_id is None for stage in view.stages)
    assert "maths" in view.domain and view.limits


def test_starting_submits_the_whole_chain_as_ordinary_runs(store, rings):
    view = demo.start("ada")
    assert view.state == "running"
    assert {stage.state for stage in view.stages} == {RunState.QUEUED}
    chain = {stage.key: runs.get(stage.run_id) for stage in view.stages}
    needs = {
        key: {k for k, other in chain.items() if other.id in run.needs}
        for key, run in chain.items()
    }
    assert needs == {
        "verifier": set(),
        "chat": {"verifier"},
        "self_write": {"verifier"},
        "prepare": {"verifier", "self_write"},
        "train": {"verifier", "prepare"},
        "evaluate": {"verifier", "self_write", "train"},
        "deploy": {"verifier", "train", "evaluate"},
    }
    assert chain["deploy"].replaces_id == chain["chat"].id
    assert chain["chat"].params["engine"] == "reference"
    assert chain["chat"].params["speculator"] is None
    assert chain["deploy"].params["engine"] == "vllm"
    assert chain["evaluate"].params["data"] == f"run:{chain['self_write'].id}/held_out"
    assert all(run.owner == "ada" and run.name.startswith("Demo: ") for run in chain.values())
    assert rings == [chain["verifier"].id]


def test_starts_at_once_by_several_people_are_one_chain(store):
    with ThreadPoolExecutor(4) as pool:
        views = list(pool.map(demo.start, ["ada", "bob", "ada", "eve"]))
    assert len({tuple(ids(view).items()) for view in views}) == 1
    assert runs.list_runs().total == len(KEYS)


def test_people_chat_with_the_n_gram_deployment_while_the_rest_goes_on(worker):
    view = demo.start("ada")
    verifier, chat = ids(view)["verifier"], ids(view)["chat"]
    assert worker.claim_all() == {verifier}
    worker.succeed(verifier)
    assert worker.claim_all() == {chat, ids(view)["self_write"]}
    assert demo.status().deployment_id is None
    worker.serve(chat)
    assert demo.status().deployment_id == chat
    assert demo.status().stage("chat").phase is DeploymentPhase.READY


def test_the_trained_speculator_takes_over_and_the_headline_says_what_it_accepts(worker):
    demo.start("ada")
    view = worker.work_through()
    assert view.state == "done"
    assert view.acceptance_length == 1.83 and "1.83" in view.headline
    assert view.stage("chat").state is RunState.CANCELLED
    assert view.deployment_id == view.stage("deploy").run_id


def test_a_second_start_uses_what_is_done_and_what_runs(worker):
    first = demo.start("ada")
    view = worker.work_through()
    again = demo.start("bob")
    assert ids(again) == ids(view) == ids(first) and again.state == "done"
    runs.cancel(ids(view)["deploy"], "ada")
    claims.finish(ids(view)["deploy"], "cancelled")
    later = demo.start("bob")
    assert {k: v for k, v in ids(later).items() if k != "deploy"} == {
        k: v for k, v in ids(view).items() if k != "deploy"
    }
    assert later.stage("deploy").state is RunState.QUEUED
    assert runs.list_runs().total == len(KEYS) + 1


def test_work_whose_output_is_gone_is_done_again_and_the_rest_is_not(worker):
    demo.start("ada")
    view = worker.work_through()
    trained = ids(view)["train"]
    Path(runs.get(trained).result["output"]).rmdir()
    runs.cancel(ids(view)["deploy"], "ada")
    claims.finish(ids(view)["deploy"], "cancelled")
    again = demo.start("ada")
    assert ids(again)["train"] != trained
    assert ids(again)["prepare"] == ids(view)["prepare"]
    assert worker.work_through().state == "done"


def test_a_stage_that_fails_fails_the_demo_and_starting_again_goes_on_from_there(worker):
    view = demo.start("ada")
    for key in ("verifier", "self_write", "prepare"):
        worker.claim_all()
        worker.succeed(ids(view)[key])
    worker.claim_all()
    claims.finish(ids(view)["train"], "failed", {"message": "no memory"})
    failed = demo.status()
    assert failed.state == "failed" and failed.stage("train").error == {"message": "no memory"}
    assert failed.stage("deploy").state is RunState.FAILED
    again = demo.start("ada")
    assert again.state == "running"
    same = {key for key in KEYS if ids(again)[key] == ids(view)[key]}
    assert same == {"verifier", "chat", "self_write", "prepare"}
    assert runs.get(ids(again)["deploy"]).replaces_id == ids(view)["chat"]
    assert worker.work_through().state == "done"


def test_a_small_demo_is_other_work_than_the_full_one(sqlite_store, monkeypatch):
    full = demo.start("ada")
    monkeypatch.setenv("SPECLAB_DEMO_SCALE", "small")
    settings.cache_clear()
    small = demo.start("ada")
    shared = {key for key in KEYS if ids(small)[key] == ids(full)[key]}
    assert shared == {"verifier", "chat"}
    samples = [runs.get(ids(view)["self_write"]).params["samples"] for view in (full, small)]
    assert samples[1] < samples[0] / 4
