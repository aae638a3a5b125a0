"""`export`, `launch`, `pull` and `push` from the command line, against a stand-in hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import tiny
from tests.app.test_cli import in_process, speclab
from tests.core.stand_in_hub import TOKEN, stand_in_hub


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    verifier = tiny.build_verifier(folder / "verifier")
    plain = {"norm_before_residual": False, "norm_output": False}
    config = tiny.draft_config(verifier, **plain)
    return tiny.build_speculator(folder / "draft", verifier, config=config)


def test_export_prints_losses_and_launch_lines(draft: Path, tmp_path: Path) -> None:
    done = speclab("export", str(draft), "--output", str(tmp_path / "out"), home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert "not held: speculative_tokens 3" in done.stdout
    for part in ("vllm serve", "podman run", "sglang.launch_server"):
        assert part in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_launch_says_the_lines_as_json(
    draft: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--verifier-name", "org/model", "--gpus", "1", "--json"]
    status, said = in_process(capsys, "launch", str(draft), *arguments)
    found = json.loads(said)
    assert status == 0 and found["vllm"].startswith("vllm serve org/model")
    assert "nvidia.com/gpu=1" in found["podman"] and found["sglang"] is None
    status, _ = in_process(capsys, "launch", str(draft), "--image", "x; rm -rf /")
    assert status == 2  # a shell reads these lines


def test_push_and_pull_there_and_back(draft: Path, tmp_path: Path) -> None:
    with stand_in_hub() as hub:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": TOKEN,
        }
        words = ("push", str(draft), "me/draft", "--verifier-name", "org/model", "--json")
        pushed = speclab(*words, home=tmp_path / "home", **environment)
        assert pushed.returncode == 0, pushed.stderr
        revision = json.loads(pushed.stdout)["revision"]
        words = ("pull", "me/draft", "--revision", revision, "--json")
        pulled = speclab(*words, home=tmp_path / "home", **environment)
        found = json.loads(pulled.stdout)
        assert (found["what"], found["revision"]) == ("speculator", revision)
        missing = speclab("pull", "me/nothing", home=tmp_path / "home", **environment)
    assert missing.returncode == 1 and "no such repository" in missing.stderr
    assert "Traceback" not in missing.stderr
    for said in (pushed, pulled, missing):
        assert TOKEN not in said.stdout + said.stderr
