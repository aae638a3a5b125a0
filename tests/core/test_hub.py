"""Push, pull and looking from afar, against a stand-in hub (`stand_in_hub`); never the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_core.conversion.convert import convert
from speculators_core.conversion.inspect import inspect
from speculators_core.errors import (
    CheckpointError,
    Conflict,
    Forbidden,
    InputError,
    NotFound,
    Stopped,
    Unavailable,
)
from speculators_core.hub import download
from speculators_core.hub.download import fetch
from speculators_core.hub.pull import pull
from speculators_core.hub.push import push
from speculators_core.hub.reference import HubId, is_hub_id, parse_hub_id, repository_of
from speculators_core.models.hub import snapshot
from speculators_core.params import ConvertParams, PullParams, PushParams
from tests import tiny
from tests.core.stand_in_hub import TOKEN, StandInHub, stand_in_hub

ORG = "org/draft"


class Watching:
    def __init__(self, stop_at: float = 2.0) -> None:
        self.notes: list[str] = []
        self.fractions: list[float] = []
        self.stop_at = stop_at

    def update(self, fraction, text, eta_s=None):
        if fraction is not None:
            self.fractions.append(fraction)

    def metrics(self, step, values):
        raise AssertionError("a download has no metrics")

    def note(self, text):
        self.notes.append(text)

    def stopping(self):
        return bool(self.fractions) and self.fractions[-1] >= self.stop_at


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with stand_in_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def content_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


@pytest.fixture
def draft(hub: StandInHub, tiny_speculator: Path) -> StandInHub:
    hub.add(ORG, content_of(tiny_speculator))
    return hub


def test_a_hub_id_may_name_a_revision_and_a_path_is_none():
    assert parse_hub_id("org/name@v1.0") == HubId("org/name", "v1.0")
    assert is_hub_id("org/name") and not any(map(is_hub_id, ("/a/b", "name", "a/b/c", "../b")))
    with pytest.raises(InputError, match="two revisions"):
        parse_hub_id("org/name@a", "b")
    assert repository_of(f"/c/models--a--b--c/snapshots/{'0' * 40}") == HubId("a/b--c", "0" * 40)
    assert repository_of("/c/models--a--b") is None


def test_a_pull_pins_the_commit_and_says_what_it_brought(draft, tiny_speculator):
    watching = Watching()
    found = pull(PullParams(repository=ORG), watching)
    assert (found.what, found.revision) == ("speculator", draft.repositories[ORG].commit)
    assert content_of(Path(found.output)) == content_of(tiny_speculator)
    assert repository_of(found.output) == HubId(ORG, found.revision)
    assert watching.fractions == sorted(watching.fractions) and watching.fractions[-1] == 1.0
    assert "MB to download" in watching.notes[0]
    draft.repositories[ORG].files["config.json"] += b" "
    assert pull(PullParams(repository=ORG, revision=None)).revision != found.revision
    with pytest.raises(NotFound, match="no revision 'gone'"):
        pull(PullParams(repository=ORG, revision="gone"))


def test_what_is_here_is_not_downloaded_again(draft):
    pull(PullParams(repository=ORG))
    sent = draft.sent
    pull(PullParams(repository=ORG))
    assert draft.sent - sent < 20_000
    assert len(draft.asked_for("model.safetensors")) == 2  # the bytes, and one question about them


def test_a_verifier_and_a_draft_of_another_layout_are_told_apart(hub, tiny_verifier, tiny_research):
    hub.add("org/model", content_of(tiny_verifier))
    hub.add("org/research", content_of(tiny_research))
    assert pull(PullParams(repository="org/model")).what == "verifier"
    found = pull(PullParams(repository="org/research"))
    assert found.what == "checkpoint"
    assert (Path(found.output) / "pytorch_model.bin").exists()  # there are no safetensors


def test_code_in_a_repository_is_not_downloaded(draft):
    draft.repositories[ORG].files |= {"modeling.py": b"boom", "pytorch_model.bin": b"boom"}
    names = set(content_of(Path(pull(PullParams(repository=ORG)).output)))
    assert names == {"config.json", "model.safetensors"}


def test_a_broken_connection_goes_on_where_it_broke(draft, tiny_speculator, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    draft.cut_after = 1 << 16
    watching = Watching()
    found = pull(PullParams(repository=ORG), watching)
    assert content_of(Path(found.output)) == content_of(tiny_speculator)
    assert any("the connection broke" in note for note in watching.notes)
    assert ("GET", "bytes=65536-") in {(m, r) for m, _, r in draft.asked_for("model.safetensors")}


def test_a_stopped_download_leaves_no_snapshot_and_goes_on(draft, tiny_speculator, monkeypatch):
    monkeypatch.setattr(download, "_EVERY_S", 0.0)
    with pytest.raises(Stopped, match="goes on from there"):
        fetch(HubId(ORG), ("*",), Watching(stop_at=0.5))
    (part,) = Path(os.fspath(tmp_blobs())).glob("*.part")
    kept = part.stat().st_size
    assert kept > 0
    assert content_of(fetch(HubId(ORG)).directory) == content_of(tiny_speculator)
    assert ("GET", f"bytes={kept}-") in {(m, r) for m, _, r in draft.asked_for("model.safetensors")}


def test_a_server_that_ignores_ranges_is_served_with_patience(draft, tiny_speculator, monkeypatch):
    monkeypatch.setattr(download, "_EVERY_S", 0.0)
    with pytest.raises(Stopped):
        fetch(HubId(ORG), ("*",), Watching(stop_at=0.5))
    draft.ignore_ranges = True
    assert content_of(fetch(HubId(ORG)).directory) == content_of(tiny_speculator)


def tmp_blobs() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / "models--org--draft" / "blobs"


def test_a_download_whose_process_is_killed_goes_on(draft, tiny_speculator, tmp_path):
    draft.slowly = 0.05
    command = [sys.executable, "-m", "speculators_core", "pull"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path / "cache")}
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    assert killed.stdin
    killed.stdin.write(json.dumps({"params": {"repository": ORG}}).encode())
    killed.stdin.close()
    until = time.monotonic() + 30
    while not any(p.stat().st_size for p in tmp_blobs().glob("*.part")):
        assert time.monotonic() < until and killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    draft.slowly = 0.0
    kept = max(p.stat().st_size for p in tmp_blobs().glob("*.part"))
    assert content_of(fetch(HubId(ORG)).directory) == content_of(tiny_speculator)
    assert any(r == f"bytes={kept}-" for _, _, r in draft.asked_for("resolve"))


def test_bytes_that_are_not_the_hubs_are_deleted(draft, monkeypatch):
    monkeypatch.setattr(download, "_EVERY_S", 0.0)
    with pytest.raises(Stopped):
        fetch(HubId(ORG), ("*",), Watching(stop_at=0.5))
    (part,) = tmp_blobs().glob("*.part")
    part.write_bytes(b"x" * part.stat().st_size)
    with pytest.raises(CheckpointError, match="otherwise than the hub describes it"):
        fetch(HubId(ORG))
    assert not part.exists() and not list(tmp_blobs().parent.glob("snapshots/*/model.safetensors"))


def test_a_full_disk_is_said_before_the_download(draft, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(Unavailable, match="are free"):
        fetch(HubId(ORG))


def test_gated_private_missing_and_absent_hubs_are_told_apart(hub, tiny_speculator, monkeypatch):
    hub.add("org/gated", content_of(tiny_speculator), gated=True)
    hub.add("org/secret", content_of(tiny_speculator), private=True)
    with pytest.raises(Forbidden, match=r"gated.*HF_TOKEN is not set") as gated:
        pull(PullParams(repository="org/gated"))
    assert f"{hub.url}/org/gated" in str(gated.value.hint)
    for missing in ("org/secret", "org/nothing"):
        with pytest.raises(NotFound, match="no such repository, or it is private"):
            pull(PullParams(repository=missing))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull(PullParams(repository="org/secret")).what == "speculator"
    with pytest.raises(Forbidden, match="has not been let in"):
        pull(PullParams(repository="org/gated"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(Forbidden, match="does not accept the token") as refused:
        pull(PullParams(repository="org/secret"))
    assert "hf_wrong" not in str(refused.value)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="can't be reached"):
        pull(PullParams(repository="org/other"))


def test_the_token_comes_from_the_environment_alone(draft, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hf_left_in_a_file")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    pull(PullParams(repository=ORG))
    assert draft.authorizations == set()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pull(PullParams(repository=ORG))
    assert draft.authorizations == {f"Bearer {TOKEN}"}


def test_without_a_hub_what_is_cached_is_used(draft, monkeypatch):
    here = snapshot(ORG)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert snapshot(ORG) == here
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert snapshot(ORG) == here
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE is set"):
        snapshot("org/other")


def test_inspecting_a_repository_fetches_headers_and_no_weights(hub, tiny_verifier, tmp_path):
    research = tiny.build_research(tmp_path / "research", tiny_verifier, safetensors=True)
    weights = (research / "model.safetensors").read_bytes()
    hub.add("org/research", content_of(research))
    hub.add("org/model", content_of(tiny_verifier))
    found = inspect("org/research", "org/model")
    assert found == inspect(research, tiny_verifier).model_copy(update={"warnings": found.warnings})
    ranges = hub.asked_for("org/research/resolve") + hub.asked_for("org/model/resolve")
    fetched = [(path, r) for _, path, r in ranges if path.endswith(".safetensors")]
    assert [r for _, r in fetched] == ["bytes=0-99999"]
    assert hub.sent < len(weights)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_what_is_wrong_in_a_repository_is_said_of_the_repository(hub, tiny_research, tmp_path):
    hub.add("org/pickled", content_of(tiny_research))
    with pytest.raises(InputError, match="must be here") as pickled:
        inspect("org/pickled")
    assert "speclab pull org/pickled" in str(pickled.value.hint)
    broken = hub.add("org/broken", {"config.json": b"{", "model.safetensors": b"\0" * 20})
    with pytest.raises(CheckpointError, match="header") as header:
        inspect("org/broken")
    assert header.value.where == f"org/broken@{broken.commit}"
    broken.files["model.safetensors"] = (2).to_bytes(8, "little") + b"{}"
    with pytest.raises(CheckpointError) as config:
        inspect("org/broken")
    assert str(config.value.where).startswith(f"org/broken@{broken.commit}/config.json")


def test_converting_a_repository_downloads_it_and_records_the_commit(hub, tiny_verifier, tmp_path):
    research = tiny.build_research(tmp_path / "research", tiny_verifier, safetensors=True)
    card = b"---\nlicense: apache-2.0\n---\n# A draft\n"
    files = {**content_of(research), "README.md": card, "pytorch_model.bin": b"boom"}
    commit = hub.add("org/research", files).commit
    asked = ConvertParams(
        checkpoint="org/research",
        verifier=str(tiny_verifier),
        verifier_name="org/model",
        aux_layers=tiny.AUX_LAYERS,
        validate_on_verifier=False,
    )
    watching = Watching()
    convert(asked, tmp_path / "out", watching)
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["source"]["name"] == "org/research"
    assert report["source"]["revision"] == commit
    sha = report["source"]["files"]["model.safetensors"]["sha256"]
    written = (tmp_path / "out" / "README.md").read_text()
    assert sha in written and f"at commit {commit}" in written
    assert "Licence: apache-2.0, as its source says" in written
    assert "pytorch_model.bin" not in written  # a pickle beside safetensors is not downloaded
    assert "base_model: org/model" in written and "vllm serve org/model" in written
    assert watching.fractions == sorted(watching.fractions)


def push_params(directory: Path, **more: object) -> PushParams:
    values = {"repository": "me/pushed", "verifier_name": "org/model", **more}
    return PushParams.model_validate({"speculator": str(directory), **values})


def test_a_push_is_private_portable_and_comes_back_the_same(hub, tiny_speculator, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    done = push(push_params(tiny_speculator))
    assert done.private and hub.repositories["me/pushed"].private
    assert done.revision == hub.repositories["me/pushed"].commit
    back = Path(pull(PullParams(repository="me/pushed")).output)
    weights = "model.safetensors"
    assert (back / weights).read_bytes() == (tiny_speculator / weights).read_bytes()
    ours, theirs = (json.loads((d / "config.json").read_text()) for d in (tiny_speculator, back))
    assert theirs["speculators_config"]["verifier"].pop("name_or_path") == "org/model"
    ours["speculators_config"]["verifier"].pop("name_or_path")
    assert ours == theirs
    push(push_params(tiny_speculator, private=False, repository="me/open"))
    assert not hub.repositories["me/open"].private
    with pytest.raises(Conflict, match="everybody sees it"):
        push(push_params(tiny_speculator, repository="me/open"))


def test_a_push_needs_a_token_and_a_verifier_that_others_know(hub, tiny_speculator, monkeypatch):
    with pytest.raises(Forbidden, match="HF_TOKEN is not set"):
        push(push_params(tiny_speculator))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(InputError, match="named by a path"):
        push(push_params(tiny_speculator, verifier_name=None))
    assert hub.requests == []


def test_a_pushed_card_names_the_repository_in_its_launch_lines(
    hub, tiny_research, tiny_verifier, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    asked = ConvertParams(
        checkpoint=str(tiny_research),
        verifier=str(tiny_verifier),
        aux_layers=(2, 4, 5),
        validate_on_verifier=False,
    )
    convert(asked, tmp_path / "draft")
    push(push_params(tmp_path / "draft"))
    card = hub.repositories["me/pushed"].files["README.md"].decode()
    assert '"model": "me/pushed"' in card and "vllm serve org/model" in card
    assert str(tmp_path) not in card and "./draft" not in card
