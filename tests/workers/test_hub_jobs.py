"""Runs that export, pull and push: what they record and register; the hub is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.services import claims, runs, speculators, verifiers
from speculators_core.errors import Stopped
from speculators_core.hub import download
from speculators_core.params import JobKind
from tests import tiny
from tests.core.stand_in_hub import TOKEN, StandInHub, stand_in_hub
from workers import job, leases
from workers.jobs import job_of
from workers.reporter import Reporter


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    leases.host_slots.cache_clear()
    leases.register()
    with stand_in_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def models(home: Path) -> tuple[Path, Path]:
    """A tiny verifier and a draft that every layout holds."""
    verifier = tiny.build_verifier(home / "models" / "tiny")
    plain = {"norm_before_residual": False, "norm_output": False}
    config = tiny.draft_config(verifier, **plain)
    return verifier, tiny.build_speculator(home / "models" / "draft", verifier, config=config)


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def done(kind: str, params: dict, reporter: type[Reporter] = Reporter) -> tuple[str, dict]:
    run = runs.submit(kind, params, owner="ada")
    assert claims.claim("here").run_id == run.id
    try:
        with reporter(run.id, every_s=0.0) as listener:
            values = job.resolved(run.kind, run.params, listener)
            result = job_of(JobKind(kind))(runs.get(run.id), values, listener)
    except BaseException:
        claims.finish(run.id, "failed")
        raise
    claims.set_result(run.id, json.loads(json.dumps(result)))
    claims.finish(run.id, "succeeded")
    return run.id, result


def test_an_export_lies_among_the_runs_own_files(hub, models, home):
    verifier, draft = models
    speculators.register(draft, "mine", verifier=str(verifier))
    run_id, result = done("export", {"speculator": "mine", "format": "specforge"})
    assert Path(result["output"]) == home / "runs" / run_id / "artifacts" / "specforge"
    assert "sglang.launch_server" in result["commands"]["sglang"]
    assert (Path(result["output"]) / "export_report.json").exists()


def test_what_was_pulled_is_registered_with_its_commit(hub, models):
    verifier, draft = models
    commit = hub.add("org/model", files_of(verifier)).commit
    _, result = done("pull", {"repository": "org/model", "name": "theirs"})
    known = verifiers.get("theirs")
    assert known.source == f"org/model@{commit}" and result["revision"] == commit
    hub.add("org/draft", files_of(draft))
    run_id, result = done("pull", {"repository": "org/draft"})
    known = speculators.get("draft")
    assert (known.path, known.run_id) == (str(Path(result["output"]).resolve()), run_id)


def test_a_pulled_draft_that_names_no_aux_layers_waits_for_a_person(hub, models, home):
    config = tiny.draft_config("org/model", aux_layers=None)
    draft = tiny.build_speculator(home / "models" / "silent", models[0], config=config)
    hub.add("org/silent", files_of(draft))
    _, result = done("pull", {"repository": "org/silent"})
    known = speculators.get(result["name"])
    assert not known.deployable and known.doubts[0]["about"] == "aux layers"


def test_another_layout_is_left_to_be_converted(hub, models, home):
    research = tiny.build_research(home / "models" / "research", models[0], safetensors=True)
    hub.add("org/research", files_of(research))
    _, result = done("pull", {"repository": "org/research"})
    assert result["what"] == "checkpoint" and "name" not in result
    assert speculators.list_speculators() == []


def test_a_cancelled_pull_goes_on_when_it_is_tried_again(hub, models, monkeypatch):
    class Cancelled(Reporter):
        def update(self, fraction, text, eta_s=None):
            super().update(fraction, text, eta_s)
            if fraction is not None and fraction >= 0.3:
                self.stop()

    monkeypatch.setattr(download, "_EVERY_S", 0.0)
    hub.add("org/draft", files_of(models[1]))
    with pytest.raises(Stopped, match="goes on from there"):
        done("pull", {"repository": "org/draft"}, Cancelled)
    before = hub.sent
    done("pull", {"repository": "org/draft", "name": "again"})
    assert hub.sent - before < sum(map(len, hub.repositories["org/draft"].files.values()))


def test_a_push_records_the_commit_and_never_the_token(hub, models, home):
    draft = models[1]
    speculators.register(draft, "mine")
    asked = {"speculator": "mine", "repository": "me/draft", "verifier_name": "org/model"}
    run_id, result = done("push", asked)
    assert result["revision"] == hub.repositories["me/draft"].commit
    assert hub.repositories["me/draft"].private
    assert TOKEN not in json.dumps(runs.get(run_id).model_dump(mode="json"))
    for file in (home / "runs").rglob("*.*"):
        assert file.is_dir() or TOKEN.encode() not in file.read_bytes()
