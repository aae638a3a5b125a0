"""How much data teaches how much: samples against acceptance length, on GSM8K.

    python -m tests.learning --cache DIR [--samples 100,300,1000] [--minutes 20] [--json]

Questions of GSM8K's training set are answered by the verifier itself (SmolLM2, greedy); for each
number of samples a speculator is prepared for, trained, and measured by the reference engine on
held-out questions of the test set, K = 3, greedy. Beside what is measured stands what training
predicted (`served_acceptance_length` of its validation chats). Every stage lies in the cache once
it is done, training resumes from its checkpoint, so the proof goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from speculators_core.data.prepare import load_prepared, prepare
from speculators_core.data.regenerate import regenerate
from speculators_core.evaluate.evaluate import evaluate
from speculators_core.models.demo import unpack_demo_verifier
from speculators_core.params import (
    EvaluateParams,
    PrepareParams,
    RegenerateParams,
    TrainParams,
)
from speculators_core.progress import Quiet
from speculators_core.training.train import train

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
K = 3


@dataclass(frozen=True)
class Learning:
    """What is asked, and of whom. `validation`: chats beside the samples, not trained on."""

    cache: Path
    verifier: Path
    questions: Path
    held_out: Path
    samples: tuple[int, ...]
    minutes: float = 20.0
    validation: int = 60
    prompts: int = 60
    max_tokens: int = 128
    training: dict[str, Any] = field(default_factory=lambda: {"lr": 2e-3, "draft_vocab_size": 2048})


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    samples: int
    trained_tokens: int
    steps: int
    minutes: float
    coverage: float
    predicted: float
    measured: float
    interval: tuple[float, float]

    @property
    def difference(self) -> float:
        return abs(self.predicted - self.measured)


class Said(Quiet):
    """Lines on stderr, a few a stage."""

    def __init__(self, stage: str) -> None:
        self._stage, self._told = stage, -1

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        if fraction is not None and int(10 * fraction) > self._told:
            self._told = int(10 * fraction)
            self.note(f"{fraction:.0%} {text}")

    def note(self, text: str) -> None:
        sys.stderr.write(f"{self._stage}: {text}\n")


def learn(how: Learning) -> list[Row]:
    """The table, from the cache where it is there."""
    how.cache.mkdir(parents=True, exist_ok=True)
    answers = _answers(how)
    return [_row(how, answers, count) for count in how.samples]


def _answers(how: Learning) -> Path:
    """The verifier's own chats: as many as the largest row needs."""
    wanted = RegenerateParams(
        data=str(how.questions),
        verifier=str(how.verifier),
        samples=max(how.samples) + how.validation,
        max_tokens=how.max_tokens,
        concurrency=64,
    )
    name = f"answers-{wanted.samples}-{how.max_tokens}"
    return Path(regenerate(wanted, how.cache / name, Said(name)).output)


def _row(how: Learning, answers: Path, count: int) -> Row:
    place = how.cache / f"{count}-{how.minutes:g}"
    record = place / "row.json"
    if record.exists():
        values = json.loads(record.read_text())
        return Row(**{**values, "interval": tuple(values["interval"])})
    place.mkdir(exist_ok=True)
    row = _made(how, _first(answers, count + how.validation, place / "chats.jsonl"), count, place)
    record.write_text(json.dumps(asdict(row)) + "\n")
    return row


def _made(how: Learning, chats: Path, count: int, place: Path) -> Row:
    """Prepare, train and measure for `count` samples."""
    lines = sum(1 for _ in chats.open())
    training = dict(how.training)
    prepared = prepare(
        PrepareParams(
            data=(str(chats),),
            verifier=str(how.verifier),
            draft_vocab_size=training.pop("draft_vocab_size"),
            validation_fraction=how.validation / lines,
        ),
        place / "prepared",
        Said(f"{count} prepare"),
    )
    data = load_prepared(prepared.output)
    trained = TrainParams(
        data=prepared.output,
        verifier=str(how.verifier),
        ttt_steps=K,
        max_minutes=how.minutes,
        evaluate_every=0,  # what picks the best is the prediction that is looked at here
        validate_every=training.pop("validate_every", 25),
        **training,
    )
    output = place / "speculator"
    result, figures = None, place / "trained.json"
    if not figures.exists():
        earlier = place / "speculator.checkpoints"
        resume = earlier if earlier.exists() else None
        result = train(trained, output, Said(f"{count} train"), resume)
        figures.write_text(result.model_dump_json())
    made = json.loads(figures.read_text())
    asked = EvaluateParams(
        speculator=str(output),
        verifier=str(how.verifier),
        data=str(how.held_out),
        speculative_tokens=K,
        max_tokens=how.max_tokens,
        samples=how.prompts,
        plain_samples=0,
    )
    measured = evaluate(asked, Said(f"{count} measure"))
    return Row(
        samples=int((~data.validation).sum()),
        trained_tokens=int(data.mask[~data.validation.repeat_interleave(data.lengths)].sum()),
        steps=made["steps"],
        minutes=made["seconds"] / 60,
        coverage=prepared.coverage,
        predicted=made["best"]["served_acceptance_length"],
        measured=measured.acceptance_length,
        interval=measured.interval,
    )


def _first(chats: Path, count: int, file: Path) -> Path:
    with chats.open() as lines:
        file.write_text("".join(islice(lines, count)))
    return file


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| samples | tokens trained | steps | minutes | coverage | predicted | measured (95 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.samples:,} | {r.trained_tokens:,} | {r.steps:,} | {r.minutes:.1f} | "
        f"{r.coverage:.1%} | {r.predicted:.2f} | {r.measured:.2f} ({r.interval[0]:.2f} to "
        f"{r.interval[1]:.2f}) |"
        for r in rows
    ]
    return "\n".join(lines)


def gsm8k(cache: Path, samples: Sequence[int], minutes: float) -> Learning:
    """The real thing: SmolLM2 on GSM8K."""
    return Learning(
        cache=cache,
        verifier=unpack_demo_verifier(cache / "verifier"),
        questions=DATA / "gsm8k_train_2000.jsonl",
        held_out=DATA / "gsm8k_test_100.jsonl",
        samples=tuple(samples),
        minutes=minutes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.learning")
    parser.add_argument("--cache", type=Path, required=True, help="where stages are kept")
    parser.add_argument("--samples", default="100,300,1000", help="of each row, up to 1940")
    parser.add_argument("--minutes", type=float, default=20.0, help="longest training of a row")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    chosen = parser.parse_args()
    samples = [int(part) for part in chosen.samples.split(",")]
    rows = learn(gsm8k(chosen.cache, samples, chosen.minutes))
    print(table(rows))
    if chosen.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
