"""More data teaches more, and training predicts what the reference engine then measures."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import learning
from tests.conftest import CACHE
from tests.core.proofs import record
from tests.learning import Learning, gsm8k, learn, table

SAMPLES = os.environ.get("SPECLAB_PROVE_SAMPLES", "100,300,1000")
MINUTES = float(os.environ.get("SPECLAB_PROVE_MINUTES", "20"))
WITHIN = 0.1  # tokens a step, of the prediction and what is measured


def test_a_small_sample_of_the_proof_goes_from_questions_to_a_table_and_is_cached(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    def asked(name: str, count: int) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps({"prompt": f"{i}+{i}?"}) + "\n" for i in range(count)))
        return file

    how = Learning(
        cache=tmp_path / "cache",
        verifier=tiny_verifier,
        questions=asked("questions.jsonl", 12),
        held_out=asked("held_out.jsonl", 3),
        samples=(4, 8),
        minutes=0.5,
        validation=3,
        prompts=3,
        max_tokens=12,
        training={
            "draft_vocab_size": 64,
            "epochs": 2,
            "tokens_per_batch": 64,
            "validate_every": 2,
            "aux_layers": (2, 4, 5),
        },
    )
    rows = learn(how)
    assert [row.samples for row in rows] == [4, 8]
    assert all(1 <= row.predicted <= 4 and 1 <= row.measured <= 4 for row in rows)
    assert table(rows).count("\n") == 3
    stamp = (tmp_path / "cache" / "8-0.5" / "row.json").stat().st_mtime_ns
    assert learn(how) == rows
    assert (tmp_path / "cache" / "8-0.5" / "row.json").stat().st_mtime_ns == stamp


@pytest.mark.prove
@pytest.mark.timeout(6 * 3600)
def test_gsm8k_teaches_more_with_more_samples_and_the_prediction_holds() -> None:
    """Stages lie in out/test-cache/learning: an interrupted proof goes on where it stopped."""
    if not learning.DATA.exists():
        pytest.skip(f"GSM8K is not at {learning.DATA}")
    rows = learn(gsm8k(CACHE / "learning", [int(n) for n in SAMPLES.split(",")], MINUTES))
    for row in rows:
        record("learning", asdict(row))
    print(table(rows))
    assert all(row.difference <= WITHIN for row in rows), table(rows)
    assert rows[-1].measured > rows[0].measured > 1
