"""What pushes, pulls and exports show of themselves; forms and launch lines of the Models page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.services import launching, speculators
from app.settings import settings
from app.ui import launch, models, results
from app.ui.components.elements import Node, text_of
from speculators_core.errors import NotFound
from speculators_core.params import PARAMS_OF, LaunchParams
from tests.app.test_ui_conversion import HOSTILE, nodes
from tests.app.test_ui_payloads import a_run
from tests.e2e import files


def shown(kind: str, **result: Any) -> Node:
    tree = results.tree(a_run(kind=kind, state="succeeded", params={}, result=result))
    assert tree is not None
    return tree


def hrefs(tree: Node) -> list[str]:
    return [node[1]["href"] for node in nodes(tree, "a") if "href" in node[1]]


def test_a_push_links_the_repository_and_names_revision_and_files():
    tree = shown(
        "push",
        repository="ada/head",
        revision="abc123",
        url="https://hub.example/ada/head",
        private=True,
        files=["config.json", HOSTILE],
    )
    told = text_of(tree)
    assert "abc123" in told and "you and your organisation" in told and HOSTILE in told
    assert "https://hub.example/ada/head" in hrefs(tree)


@pytest.mark.parametrize(
    ("what", "name", "doubts", "href"),
    [
        ("speculator", "head", [], "/deploy?speculator=head"),
        ("speculator", "head", [{"about": "aux layers"}], "/convert?checkpoint=ada%2Fhead%40abc"),
        ("verifier", "model", [], "/train?verifier=model"),
        ("checkpoint", None, [], "/convert?checkpoint=ada%2Fhead%40abc"),
    ],
)
def test_a_pull_says_what_it_brought_and_what_comes_next(what, name, doubts, href):
    values = {"what": what, "name": name, "doubts": doubts, "size": 3 << 20, "output": "/hub"}
    tree = shown("pull", repository="ada/head", revision="abc", **values)
    assert "3.0 MiB" in text_of(tree) and href.replace("%2F", "/") in [
        one.replace("%2F", "/") for one in hrefs(tree)
    ]


def test_an_export_lists_losses_commands_and_files(sqlite_store, rings):
    from app.services import runs

    run = runs.submit("export", {"speculator": "s"}, owner="ada")
    folder = settings().run_dir(run.id) / "artifacts" / "specforge"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    loss = {"field": "norm_output", "value": True, "meaning": "SGLang norms", "serious": True}
    commands = {"vllm": "vllm serve v", "podman": None, "sglang": "python3 -m s", "notes": ["mind"]}
    result = {"format": "specforge", "output": str(folder), "losses": [loss], "commands": commands}
    tree = results.tree(run.model_copy(update={"result": result}))
    told = text_of(tree)
    for words in ("norm_output", "changes the draft", "python3 -m s", "Mind.", "config.json"):
        assert words in told, words
    copies = [node[1].get("data-copy") for node in nodes(tree, "button")]
    assert copies == ["vllm serve v", "python3 -m s"]
    assert f"/api/runs/{run.id}/artifacts/specforge/config.json" in hrefs(tree)


def test_nothing_is_shown_before_there_is_a_result():
    assert results.tree(a_run(kind="push")) is None
    assert results.tree(a_run(kind="verifier", result={"output": "/x"})) is None


def test_launch_lines_are_those_of_a_registered_speculator_alone(sqlite_store, tmp_path):
    place = files.speculator(tmp_path / "head", "org/verifier")
    speculators.register(place, "head")
    asked = LaunchParams(speculator="head", image="example.org/image:1", gpus="0,1", port=9000)
    tree = launch.lines_tree(launching.commands(asked).model_dump())
    told = text_of(tree)
    assert f'"model": "{place}"' in told and "vllm serve org/verifier" in told
    assert "example.org/image:1" in told and "9000:8000" in told
    with pytest.raises(NotFound):
        launching.commands(LaunchParams(speculator=str(place)))


def test_a_speculators_row_leads_out_of_the_lab(sqlite_store, tmp_path):
    speculators.register(files.speculator(tmp_path / "head", "org/v"), "my-head")
    links = hrefs(models.speculators_table(speculators.list_speculators()))
    for form in ("launch", "export", "push"):
        assert f"/models?form={form}&speculator=my-head" in links


@pytest.mark.parametrize("form", [*models.IN_THE_LAB, *models.ELSEWHERE], ids=lambda f: f.key)
def test_forms_name_fields_that_exist(form):
    named = {name for row in form.rows for name in row} | set(form.choices)
    assert named <= set(PARAMS_OF[form.kind].model_fields)


def test_no_form_asks_for_a_token():
    described = json.dumps([PARAMS_OF[f.kind].model_json_schema() for f in models.ELSEWHERE])
    assert '"token"' not in described
    pull = next(form for form in models.IN_THE_LAB if form.key == "pull")
    assert "gated" in pull.about and "HF_TOKEN" in pull.about
