"""What is written beside the weights of a speculator that was trained here: a card, and a report
of what the card tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from speculators_core.config import Eagle3Config
from speculators_core.conversion.card import card
from speculators_core.conversion.coverage import Coverage
from speculators_core.conversion.facts import TITLES, facts_of
from speculators_core.conversion.target import TRAINING_REPORT
from speculators_core.data.prepared import PreparedMeta
from speculators_core.launch import Served, knows_aux_layers, portable_name
from speculators_core.training.judging import MEASURED, PREDICTED

_LENGTHS = {
    MEASURED: "Acceptance length, measured on validation prompts",
    PREDICTED: "Acceptance length as served, predicted on validation chats",
}


def texts(
    name: str, config: Eagle3Config, data: PreparedMeta, covered: float, best: Mapping[str, float]
) -> dict[str, str]:
    """The files by name. `covered` is the share of the answers' tokens in the draft's vocabulary,
    `best` the validation numbers of the weights. None of them holds a path of this machine.
    """
    verifier = portable_name(config.speculators_config.verifier.name_or_path)
    coverage = Coverage(share=covered, of="the answers' tokens that it was trained on")
    report = {
        "verifier": {"name": verifier, "tokenizer_fingerprint": data.tokenizer_fingerprint},
        "coverage": coverage.model_dump(),
        "samples": data.samples,
        "answer_tokens": data.masked_tokens,
        "best": dict(best),
    }
    return {
        TRAINING_REPORT: json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        "README.md": _card(name, config, verifier, coverage, report),
    }


def _card(
    name: str,
    config: Eagle3Config,
    verifier: str,
    coverage: Coverage,
    report: Mapping[str, Any],
) -> str:
    measured = {title: report["best"].get(key) for key, title in _LENGTHS.items()}
    facts = {
        "Verifier": verifier,
        "Algorithm": config.algorithm,
        **facts_of(config),
        "Coverage": coverage,
        "Trained on": f"{report['samples']} samples, {report['answer_tokens']} answer tokens",
        **{title: f"{value:.3f}" for title, value in measured.items() if value is not None},
        "Licence": "not stated: that of the verifier and of the training data bind it",
    }
    served = Served(
        algorithm=config.algorithm,
        model=name,
        verifier=verifier,
        speculative_tokens=config.speculative_tokens,
        aux_layers_known=knows_aux_layers(config),
    )
    about = f"{TITLES[config.algorithm]} for {verifier}, trained by Speclab."
    tags = (config.algorithm, "speculative-decoding", "speculators")
    return card(name, about, facts, served, tags=tags)
