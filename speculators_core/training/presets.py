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
DEMO_SELF_WRITE: dict[str, Any] = {"domain": "maths"}
DEMO_PREPARE: dict[str, Any] = {"seq_length": 512, "draft_vocab_size": 1024}
DEMO_TRAIN: dict[str, Any] = {"max_minutes": 15.0}
