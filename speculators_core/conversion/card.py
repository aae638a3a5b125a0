"""The README.md that goes with a speculator: a model card of what is known, and how to serve it.

It holds no path of the machine that wrote it. Light: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators_core.hub.reference import is_hub_id
from speculators_core.launch import Served, lines
from speculators_core.untrusted import read_bounded

_SERVING = "## Serve it"
_BARRED = "## Before it is served"
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
_CARD_BYTES = 4_000_000


def card(
    title: str,
    about: str,
    facts: Mapping[str, Any],
    served: Served,
    *,
    tags: Sequence[str],
    obstacles: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """The text of a card. `facts` are shown in their order; `served` names draft and verifier as
    other people would. With `obstacles` it says what has to be settled in place of launch lines.
    """
    head = ["---", "library_name: speculators", f"tags: [{', '.join(tags)}]"]
    if is_hub_id(served.verifier):
        head.append(f"base_model: {served.verifier}")
    body = [*head, "---", f"# {title}", "", about, ""]
    body += [f"- {what}: {value}" for what, value in facts.items()]
    body += ["", *(f"Note: {note.rstrip('.')}.\n" for note in notes)]
    last = _barred(obstacles) if obstacles else _section(served)
    return "\n".join(body).rstrip("\n") + "\n\n" + last


def licence_in(file: Path) -> str | None:
    """The `license` of a model card's front matter; None where it says none."""
    text = read_bounded(file, _CARD_BYTES).decode("utf-8", errors="replace")
    head = text.split("---", 2)
    found = _LICENCE.search(head[1]) if text.startswith("---") and len(head) == 3 else None
    return found[1] if found else None


def with_serving(text: str, served: Served) -> str:
    """The card with the launch lines of the place that it moves to; one that has none, because
    something has to be settled first, is unchanged.
    """
    before, found, _ = text.partition(f"{_SERVING}\n")
    return before + _section(served) if found else text


def _barred(obstacles: Sequence[str]) -> str:
    reasons = [f"- {why.rstrip('.')}" for why in obstacles]
    advice = (
        "Settle it (convert again with what is known), or let a person who knows better decide: "
        "`speclab allow`. Servers would load these files without a word."
    )
    return "\n".join([_BARRED, "", *reasons, "", advice]) + "\n"


def _section(served: Served) -> str:
    found = lines(_placed(served))
    blocks = [
        ("vLLM", found.vllm),
        ("vLLM in the container of Red Hat AI Inference", found.podman),
        ("SGLang", found.sglang),
    ]
    text = [_SERVING, ""]
    for engine, line in blocks:
        if line is not None:
            text += [f"With {engine}:", "", "```sh", line, "```", ""]
    text += [] if any(line for _, line in blocks) else found.notes[-1:]
    return "\n".join(text).rstrip("\n") + "\n"


def _placed(served: Served) -> Served:
    """Names that are no hub ids become folders in the reader's working directory."""
    named = {"model": served.model, "verifier": served.verifier}
    places = {
        what: name if is_hub_id(name) else f"./{re.sub(r'^[./]+', '', name)}"
        for what, name in named.items()
    }
    return served.model_copy(update=places)
