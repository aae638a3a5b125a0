"""The demo's recipe: parameter values by job kind, and what to say about it. Light: no torch.

Measured on two cores; the curve of minutes against acceptance length is in docs/benchmarks.md.
"""

from __future__ import annotations

from typing import Any

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
