"""Recipes: parameter values by job kind, and what may be expected of them. Light: no torch.

The demo's figures were measured on two cores (docs/benchmarks.md has its curve); those of the
others are what people published for drafts of this kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculators_core.params import JobKind

DEMO_DOMAIN = "short everyday maths problems"
DEMO_LIMITS = (
    "This speculator has seen a few hundred chats of one narrow domain, written by the verifier "
    "itself. One for all of chat needs tens of thousands of varied chats, answered by the "
    "verifier, and hours on a GPU."
)
DEMO_SELF_WRITE: dict[str, Any] = {
    "domain": "maths",
    "samples": 480,
    "held_out": 40,
    "max_prompt_tokens": 32,
    "max_answer_tokens": 96,
    "temperature": 0.8,
    "batch_size": 128,
}
DEMO_PREPARE: dict[str, Any] = {
    "seq_length": 512,
    "draft_vocab_size": 1024,  # 480 such answers use about 750 different tokens
    "validation_fraction": 0.05,
}
DEMO_TRAIN: dict[str, Any] = {
    "epochs": 10,
    "max_minutes": 18.0,
    "lr": 2e-3,
    "tokens_per_batch": 2048,
    "validate_every": 50,
    "save_every": 50,
}


@dataclass(frozen=True)
class Band:
    """Share of first draft tokens accepted: what drafts of a kind reach."""

    low: float
    high: float
    about: str


@dataclass(frozen=True)
class Preset:
    """What differs from the defaults, for each kind of a training's chain."""

    name: str
    expectation: str
    params: Mapping[JobKind, Mapping[str, Any]] = field(default_factory=dict)


REFERENCE = Band(0.35, 0.45, "5,000 varied chats")
"""What most people compare with first."""
BANDS = (
    Band(0.55, 0.70, "a few hundred chats of one narrow domain, asked about that domain"),
    REFERENCE,
    Band(0.65, 0.80, "hundreds of thousands of varied chats"),
)

DEMO = Preset(
    "Demo",
    "Minutes on a laptop: 480 chats of one narrow domain, written by the verifier. About 0.64 of "
    "first tokens accepted there and an acceptance length of 2.3 (K = 3); next to nothing "
    "elsewhere.",
    {
        JobKind.SELF_WRITE: DEMO_SELF_WRITE,
        JobKind.PREPARE: DEMO_PREPARE,
        JobKind.TRAIN: DEMO_TRAIN,
    },
)
QUICK_LOOK = Preset(
    "Quick look",
    "5,000 varied chats, to see whether the way works before days are spent on it: about 0.40 of "
    "first tokens accepted, an acceptance length of 1.5 to 1.9. More is not to be expected of so "
    "little; far less is a sign that something is wrong. An hour or two on a GPU.",
    {
        JobKind.SELF_WRITE: {
            "domain": "chat",
            "samples": 5_000,
            "held_out": 100,
            "max_prompt_tokens": 128,
            "max_answer_tokens": 512,
        },
        JobKind.PREPARE: {"seq_length": 2_048, "draft_vocab_size": 8_192},
        JobKind.TRAIN: {
            "epochs": 5,
            "lr": 3e-4,
            "tokens_per_batch": 8_192,
            "ttt_steps": 3,
            "validate_every": 200,
            "save_every": 200,
        },
    },
)
FULL_RECIPE = Preset(
    "Full recipe",
    "For a draft that is served to people: as many varied chats as can be had, answered by the "
    "verifier itself (Regenerate on the Data page), a draft vocabulary of 32,000, seven draft "
    "steps. About 0.65 to 0.80 of first tokens accepted, an acceptance length of 2.5 to 3 at "
    "K = 3. Days on a node of GPUs.",
    {
        JobKind.SELF_WRITE: {
            "domain": "chat",
            "samples": 100_000,
            "held_out": 500,
            "max_prompt_tokens": 256,
            "max_answer_tokens": 1_024,
        },
        JobKind.PREPARE: {
            "seq_length": 4_096,
            "draft_vocab_size": 32_000,
            "validation_fraction": 0.01,
        },
        JobKind.TRAIN: {
            "epochs": 10,
            "lr": 1e-4,
            "tokens_per_batch": 16_384,
            "ttt_steps": 7,
            "ttt_step_loss_decay": 0.8,
            "hidden_states": "online",
            "validate_every": 1_000,
            "save_every": 1_000,
        },
    },
)
PRESETS = (DEMO, QUICK_LOOK, FULL_RECIPE)
