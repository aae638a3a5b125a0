"""What conversions leave: files, measurements, choices, and a person's decision to deploy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.cli import main
from app.client import Client
from app.services import claims, conversions, runs, speculators
from app.services.views import RunView, SpeculatorView
from speculators_core.errors import CheckpointError, Conflict, InputError, NotFound
from tests.app.test_registries import speculator_directory
from tests.app.web import script

LAYERS = {
    "about": "aux layers",
    "choices": [
        {"params": {"aux_layers": [2, 4, 5]}, "meaning": "usual", "first_token_acceptance": 0.25},
        {"params": {"aux_layers": [1, 3, 4]}, "meaning": "earlier", "first_token_acceptance": None},
    ],
    "chosen": None,
}
RESIDUAL = {
    "about": "norm_before_residual",
    "choices": [{"params": {"norm_before_residual": True}, "meaning": "as vLLM reads silence"}],
    "chosen": None,
}
PAIR = {"checkpoint": "someones/head", "verifier": "tiny"}


def barred(place: Path, *doubts: dict[str, Any], failed: tuple[str, ...] = ()) -> SpeculatorView:
    directory = speculator_directory(place)
    return speculators.register(
        directory, place.name, deployable=False, doubts=doubts, failed=failed
    )


def converted(result: dict[str, Any], **params: Any) -> RunView:
    claims.register_slots("here", [], 4, 1)
    run = runs.submit("convert", {**PAIR, **params}, owner="ada")
    assert claims.claim("here").run_id == run.id
    claims.set_result(run.id, result)
    claims.finish(run.id, "succeeded")
    return runs.get(run.id)


def test_a_speculator_in_doubt_is_not_deployed_until_a_person_allows_it(store, tmp_path):
    made = barred(tmp_path / "mine", RESIDUAL, failed=("acceptance is exactly 0",))
    assert made.obstacles == [
        "norm_before_residual must be settled first",
        "acceptance is exactly 0",
    ]
    for reference in ("mine", made.path, f"{made.path}/"):
        with pytest.raises(Conflict, match="acceptance is exactly 0") as caught:
            runs.submit("deploy", {"verifier": "v", "speculator": reference}, owner="ada")
        assert "speclab allow mine" in caught.value.hint
    allowed = speculators.allow("mine", "ada")
    assert (allowed.deployable, allowed.servable, allowed.allowed_by) == (False, True, "ada")
    assert allowed.allowed_despite == made.obstacles and allowed.allowed_at is not None
    assert speculators.allow("mine", "bob") == allowed  # the first decision stays
    assert speculators.list_speculators(deployable_only=True) == [allowed]
    run = runs.submit("deploy", {"verifier": "v", "speculator": "mine"}, owner="ada")
    assert run.state == "queued"


def test_no_decision_helps_a_draft_whose_verifier_states_are_unknown(store, tmp_path):
    barred(tmp_path / "mine", LAYERS)
    with pytest.raises(Conflict, match="as it is") as caught:
        speculators.allow("mine", "ada")
    assert "choice of verifier states" in caught.value.hint
    with pytest.raises(NotFound):
        speculators.allow("nobody", "ada")
    assert speculators.list_speculators(deployable_only=True) == []


def test_a_decision_does_not_outlive_what_it_was_about(store, tmp_path):
    made = barred(tmp_path / "mine", RESIDUAL)
    speculators.allow("mine", "ada")
    again = speculators.register(made.path, "mine", deployable=False, failed=["not finite"])
    assert (again.id, again.servable, again.obstacles) == (made.id, False, ["not finite"])


def test_what_a_run_made_is_barred_by_the_runs_name_too(store, tmp_path):
    run = converted({"output": str(tmp_path)})
    directory = speculator_directory(tmp_path / "made")
    speculators.register(directory, "made", deployable=False, failed=["no"], run_id=run.id)
    with pytest.raises(Conflict, match="made is not ready"):
        speculators.require_servable(f"run:{run.id}")
    speculators.require_servable("run:another")
    speculators.require_servable("org/model")


def test_a_directory_that_nobody_registered_is_barred_by_its_own_report(
    sqlite_store, tmp_path, monkeypatch
):
    directory = speculator_directory(tmp_path / "mine")
    speculators.require_servable(str(directory))
    report = {"deployable": False, "doubts": [RESIDUAL], "validation": {"failed": ["accepts 0"]}}
    (directory / "conversion_report.json").write_text(json.dumps(report))
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    for reference in (str(directory), str(tmp_path / "link"), "mine", "./mine"):
        with pytest.raises(Conflict, match=r"norm_before_residual must .*; accepts 0") as caught:
            runs.submit("deploy", {"verifier": "v", "speculator": reference}, owner="ada")
        assert f"speclab allow {reference}" in caught.value.hint
    with pytest.raises(SystemExit) as ended:
        main(["allow", "./mine"])
    assert ended.value.code == 0
    speculators.require_servable(str(directory))
    allowed = speculators.get("mine")
    assert allowed.allowed_despite == ["norm_before_residual must be settled first", "accepts 0"]
    assert speculators.adopt(directory) == allowed  # registering again takes no decision back


def test_a_report_that_is_damaged_bars_as_well(sqlite_store, tmp_path):
    directory = speculator_directory(tmp_path / "mine")
    (directory / "conversion_report.json").write_text("{")
    with pytest.raises(CheckpointError, match="conversion_report"):
        speculators.require_servable(str(directory))


def test_a_conversion_is_repeated_with_a_choice_that_it_left(store):
    run = converted({"doubts": [RESIDUAL, LAYERS]}, speculative_tokens=4)
    again = conversions.again(run.id, 1, 1, "bob")
    assert (again.owner, again.name, again.state) == ("bob", run.name, "queued")
    assert again.params == {**run.params, "aux_layers": [1, 3, 4]}
    for doubt, choice in ((2, 0), (0, 7)):
        with pytest.raises(InputError, match="left no choice"):
            conversions.again(run.id, doubt, choice, "bob")


def test_what_was_measured_before_is_known_for_the_same_pair_alone(sqlite_store):
    converted({"doubts": [LAYERS]})
    newer = json.loads(json.dumps(LAYERS))
    newer["choices"][0]["first_token_acceptance"] = 0.5
    converted({"doubts": [newer]}, speculative_tokens=4)
    key = conversions.choice_key({"aux_layers": [2, 4, 5]})
    assert conversions.measured("someones/head", "tiny") == {key: 0.5}
    assert conversions.measured("someones/head", "another") == {}


def test_report_and_card_are_read_and_what_is_damaged_is_said(sqlite_store, tmp_path):
    directory = Path(barred(tmp_path / "mine", RESIDUAL).path)
    for read in (conversions.report, conversions.card):
        with pytest.raises(NotFound):
            read("mine")
    (directory / "README.md").write_bytes(b"# caf\xe9\n")
    assert conversions.card("mine") == "# caf\N{REPLACEMENT CHARACTER}\n"
    report = directory / "conversion_report.json"
    for damaged in ("{", "[]"):
        report.write_text(damaged)
        with pytest.raises(CheckpointError, match="report"):
            conversions.report("mine")
    report.write_text('{"layout": "x"}')
    assert conversions.report("mine") == {"layout": "x"}
    report.unlink()
    report.symlink_to("/etc/hostname")
    with pytest.raises(NotFound):
        conversions.report("mine")


def test_programs_allow_and_fetch_as_pages_do(sqlite_store, tmp_path, monkeypatch):
    directory = Path(barred(tmp_path / "mine", RESIDUAL).path)
    (directory / "README.md").write_text("<script>1</script>")
    with script() as client:
        lab = Client(str(client.base_url), token=None)
        monkeypatch.setattr(lab, "_http", client)
        refused = client.post(
            "/api/runs",
            json={"kind": "deploy", "params": {"verifier": "org/v", "speculator": "mine"}},
        )
        assert (refused.status_code, refused.json()["error"]["kind"]) == (409, "conflict")
        assert lab.allow("mine").allowed_by == "local"
        card = client.get("/api/speculators/mine/card")
        absent = client.get("/api/speculators/mine/report")
    assert card.text == "<script>1</script>"
    assert card.headers["content-type"].startswith("text/markdown")
    assert card.headers["content-disposition"].startswith("attachment")
    assert absent.status_code == 404


def test_a_person_allows_from_a_terminal(sqlite_store, tmp_path, capsys):
    barred(tmp_path / "mine", failed=("acceptance is exactly 0",))
    with pytest.raises(SystemExit) as left:
        main(["allow", "mine"])
    assert left.value.code == 0
    assert "despite acceptance is exactly 0" in capsys.readouterr().out
    assert speculators.get("mine").servable


def test_inspecting_over_rest_takes_what_is_settled(client_home: TestClient):
    body = {"checkpoint": "/nowhere", "params": {}}
    assert client_home.post("/api/inspect", json=body).status_code in (403, 404)


@pytest.fixture
def client_home(sqlite_store: str) -> TestClient:
    return script()
