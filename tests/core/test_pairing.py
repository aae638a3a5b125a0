"""That a draft and a verifier which may not belong together are told so wherever they meet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from speculators_core.conversion.pairing import tokenizer_warnings
from speculators_core.conversion.target import REPORT, TRAINING_REPORT
from speculators_core.decode.answer import answer
from speculators_core.errors import PairingError
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import DeployParams, EvaluateParams, GenerateParams, TrainParams
from speculators_core.training.train import train
from tests import tiny
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats
from workers.preflight import examine

ELSEWHERE = "the draft was made for another tokenizer than the verifier's"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Name a colour."}) + "\n")
    return file


@pytest.fixture
def foreign(tmp_path: Path, tiny_speculator: Path) -> Path:
    """A draft whose report tells another tokenizer than the verifier's."""
    return recorded(tiny_speculator, tmp_path / "foreign", REPORT, "0" * 64)


def recorded(speculator: Path, copy: Path, report: str, tokenizer: str | None) -> Path:
    shutil.copytree(speculator, copy)
    (copy / report).write_text(json.dumps({"verifier": {"tokenizer_fingerprint": tokenizer}}))
    return copy


@pytest.mark.parametrize("report", [REPORT, TRAINING_REPORT])
def test_the_tokenizer_that_a_report_names_is_compared(
    tmp_path: Path, tiny_speculator: Path, tiny_verifier: Path, report: str
) -> None:
    """A20"""
    facts = read_verifier(tiny_verifier)
    same = recorded(tiny_speculator, tmp_path / "same", report, facts.tokenizer_fingerprint)
    other = recorded(tiny_speculator, tmp_path / "other", report, "0" * 64)
    assert tokenizer_warnings(same, facts) == tokenizer_warnings(tiny_speculator, facts) == []
    [warning] = tokenizer_warnings(other, facts)
    assert warning.startswith(ELSEWHERE)


def test_another_tokenizer_is_told_where_an_answer_is_generated(
    foreign: Path, tiny_verifier: Path
) -> None:
    """A20"""
    told: list[dict[str, Any]] = []
    asked = GenerateParams(
        verifier=str(tiny_verifier), speculator=str(foreign), prompt="hi", max_tokens=2
    )
    answer(asked, told.append)
    assert any(event.get("note", "").startswith(ELSEWHERE) for event in told)


def test_another_tokenizer_is_told_where_a_draft_is_evaluated(
    foreign: Path, tiny_verifier: Path, prompts: Path
) -> None:
    """A20"""
    listener = Listener()
    evaluate(evaluation(foreign, tiny_verifier, prompts), listener)
    assert listener.notes[0].startswith(ELSEWHERE)


def test_another_tokenizer_is_told_where_a_draft_is_trained_further(
    foreign: Path, tiny_verifier: Path, tmp_path: Path
) -> None:
    """A20"""
    data = prepare_chats(tmp_path, tiny_verifier, count=12)
    listener = Listener()
    asked = TrainParams(
        data=str(data), verifier=str(tiny_verifier), start_from=str(foreign), epochs=1
    )
    train(asked, tmp_path / "out", listener)
    assert any(note.startswith(ELSEWHERE) for note in listener.notes)
    made = tmp_path / "out"
    assert tokenizer_warnings(made, read_verifier(tiny_verifier)) == []
    report = json.loads((made / TRAINING_REPORT).read_text())
    assert report["verifier"]["tokenizer_fingerprint"]


def test_another_tokenizer_is_told_where_a_draft_is_deployed(
    foreign: Path, tiny_verifier: Path
) -> None:
    """A20"""
    asked = DeployParams(
        verifier=str(tiny_verifier), speculator=str(foreign), engine="reference", max_model_len=512
    )
    assert any(note.startswith(ELSEWHERE) for note in examine(asked).notes)


def test_no_command_takes_default_layers_in_silence(
    tmp_path: Path, tiny_verifier: Path, prompts: Path
) -> None:
    """A6"""
    config = tiny.draft_config(tiny_verifier, aux_layers=None)
    draft = tiny.build_speculator(tmp_path / "draft", tiny_verifier, config=config)
    asked = GenerateParams(verifier=str(tiny_verifier), speculator=str(draft), prompt="hi")
    with pytest.raises(PairingError, match="which verifier states it was trained on"):
        answer(asked, lambda event: None)
    with pytest.raises(PairingError, match="which verifier states it was trained on"):
        evaluate(evaluation(draft, tiny_verifier, prompts))


def evaluation(draft: Path, verifier: Path, prompts: Path) -> EvaluateParams:
    return EvaluateParams(
        speculator=str(draft), verifier=str(verifier), data=str(prompts), max_tokens=2
    )
