"""The fields of the Train page in groups: what decides first, the rest folded away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from app.ui.forms import Form
from speculators_core.params import TrainParams

TOP = ("verifier", "start_from")
MAIN = ("epochs", "max_minutes", "lr", "tokens_per_batch", "ttt_steps")
DRAFT = (
    "num_layers",
    "layer_type",
    "embedding",
    "lm_head_from_verifier",
    "aux_layers",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "speculative_tokens",
    "verifier_name",
)
_GROUPS: dict[str, tuple[str, ...]] = {
    "Draft: layers, norms, embedding": DRAFT,
    "Hidden states": ("hidden_states", "states_dtype"),
    "Loss and optimisation": (
        "loss",
        "ttt_step_loss_decay",
        "optimizer",
        "weight_decay",
        "schedule",
        "warmup_ratio",
        "grad_clip",
        "accumulate",
        "seed",
    ),
    "Validation, checkpoints, early stop": (
        "validate_every",
        "save_every",
        "evaluate_every",
        "evaluate_prompts",
        "evaluate_tokens",
        "held_out",
        "patience",
    ),
    "Machine, processes, sinks": (
        "dtype",
        "autocast",
        "gradient_checkpointing",
        "compile",
        "processes",
        "sharding",
        "sinks",
    ),
}
_BY_HAND = ("nodes", "node_rank", "rendezvous")
"""Several machines train together from their terminals; a run has one."""
_REST = "Further"
"""For fields that no group names yet: none is ever lost."""


def groups() -> dict[str, list[str]]:
    """Every field that is neither `TOP`, `MAIN` nor the data, and that a run can have, each in one
    group.
    """
    fields = TrainParams.model_fields
    found = {title: [n for n in names if n in fields] for title, names in _GROUPS.items()}
    placed = {"data", *TOP, *MAIN, *_BY_HAND, *(name for names in found.values() for name in names)}
    found[_REST] = [name for name in fields if name not in placed]
    return {title: names for title, names in found.items() if names}


def draw(form: Form, start: Mapping[str, Any]) -> None:
    """Place all of them here, the groups as accordions."""
    with gr.Row():
        form.draw(*MAIN, start=start)
    for title, names in groups().items():
        with gr.Accordion(title, open=False), gr.Row():
            form.draw(*names, start=start)
