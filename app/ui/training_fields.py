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
    "Validation, checkpoints, early stop": ("validate_every", "save_every"),
    "Machine and sinks": (
        "processes",
        "dtype",
        "autocast",
        "gradient_checkpointing",
        "compile",
        "tensorboard",
        "trackio",
    ),
}
_REST = "Further"
_OF_A_GROUP = {
    "evaluate": "Validation, checkpoints, early stop",
    "early_stop": "Validation, checkpoints, early stop",
    "keep": "Validation, checkpoints, early stop",
    "vllm": "Hidden states",
    "states": "Hidden states",
}
"""Where a field goes that no group names, by how its name begins."""


def groups() -> dict[str, list[str]]:
    """Every field that is neither `TOP`, `MAIN` nor the data, each in one group."""
    known = {name: title for title, names in _GROUPS.items() for name in names}
    found: dict[str, list[str]] = {title: [] for title in (*_GROUPS, _REST)}
    for names in _GROUPS.values():
        for name in names:
            if name in TrainParams.model_fields:
                found[known[name]].append(name)
    for name in TrainParams.model_fields:
        if name not in known and name not in {"data", *TOP, *MAIN}:
            begin = next((b for b in _OF_A_GROUP if name.startswith(b)), "")
            found[_OF_A_GROUP.get(begin, _REST)].append(name)
    return {title: names for title, names in found.items() if names}


def draw(form: Form, start: Mapping[str, Any]) -> None:
    """Place all of them here, the groups as accordions."""
    with gr.Row():
        form.draw(*MAIN, start=start)
    for title, names in groups().items():
        with gr.Accordion(title, open=False), gr.Row():
            form.draw(*names, start=start)
