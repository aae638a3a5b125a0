"""`python -m speculators_core generate`, and the numbers it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speculators_core.decode.answer import answer, numbers
from speculators_core.decode.engine import Step
from speculators_core.errors import NotFound, Stopped, Unavailable
from speculators_core.models import hub
from speculators_core.params import GenerateParams


def step(drafted: int, accepted: int) -> Step:
    return Step(
        index=0,
        drafted=(1,) * drafted,
        p_draft=None,
        p_verifier=(),
        accepted=accepted,
        emitted=(1,) * (accepted + 1),
        context_len=0,
        draft_ms=0.0,
        verify_ms=0.0,
        finish=None,
    )


def test_numbers_count_drafting_steps_and_joint_positions() -> None:
    found = numbers([step(0, 0), step(3, 3), step(3, 1), step(3, 0)], 3, 2.0)
    assert (found["tokens"], found["steps"], found["drafted"], found["accepted"]) == (8, 3, 9, 4)
    assert found["acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert found["per_position"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert found["tokens_per_second"] == 4.0


def test_without_drafting_there_is_no_acceptance() -> None:
    found = numbers([step(0, 0)], 0, 1.0)
    assert found["acceptance_length"] is None and found["per_position"] == []


def test_the_process_tells_each_step_and_the_same_text_as_plain_decoding(
    tiny_verifier: Path, tiny_speculator: Path
) -> None:
    params: dict[str, Any] = {"verifier": str(tiny_verifier), "prompt": "Hello", "max_tokens": 12}
    none: list[dict[str, Any]] = []
    plain = answer(GenerateParams(**params), none.append)
    drafted, events = generate({**params, "speculator": str(tiny_speculator)})
    steps = [event["decoded"] for event in events if "decoded" in event]
    assert plain["text"] == drafted["text"]
    assert steps == drafted["steps"]
    assert any(told["drafted"] for told in steps)
    assert not any(event["decoded"]["drafted"] for event in none if "decoded" in event)
    assert drafted["numbers"]["tokens"] == plain["numbers"]["tokens"] <= 12


def test_an_answer_stops_between_two_steps(tiny_verifier: Path) -> None:
    told: list[dict[str, Any]] = []
    params = GenerateParams(verifier=str(tiny_verifier), prompt="x", max_tokens=8)
    with pytest.raises(Stopped):
        answer(params, told.append, lambda: len(told) > 2)


def test_what_is_neither_directory_nor_in_reach_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises((Unavailable, NotFound), match="the hub can't be reached"):
        hub.bring("nobody/nothing")
    assert hub.bring(str(tmp_path)) == tmp_path
    with pytest.raises(NotFound, match="no such directory"):
        hub.bring("name")


def generate(params: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of the process, and its events."""
    done = subprocess.run(
        [sys.executable, "-m", "speculators_core", "generate"],
        input=json.dumps({"params": params}),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    return json.loads(done.stdout), [json.loads(line) for line in lines]
