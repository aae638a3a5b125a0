"""What work would take of the disk and of time, beside the form, before anything starts."""

from __future__ import annotations

from app.services import capacity, references
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from app.ui.training_data import DataChoice
from speculators_core.data.capacity import Estimate, in_words
from speculators_core.errors import NotFound
from speculators_core.params import JobKind, Params, TrainParams


def of_chain(choice: DataChoice, params: Params) -> Node:
    """What a training on this data would take. Raises `NotFound` for a verifier not yet here."""
    estimate = _estimate(choice, params)
    if estimate is None:
        return state.empty("What it will take is told once the data is chosen.")
    return estimate_tree(estimate, guessed=choice.prepared is None)


def require_room(choice: DataChoice, params: Params) -> None:
    """Raise `Unavailable` where it would need more than is free."""
    try:
        estimate = _estimate(choice, params)
    except NotFound:  # the run itself asks again, with the verifier at hand
        return
    if estimate:
        estimate.require()


def _estimate(choice: DataChoice, params: Params) -> Estimate | None:
    if choice.tokens is None or not isinstance(params, TrainParams):
        return None
    references.check_params(JobKind.TRAIN, {"verifier": params.verifier})
    return capacity.of_training(params, choice.tokens, choice.draft_vocab_size)


def estimate_tree(
    estimate: Estimate, title: str = "What it will take", *, guessed: bool = False
) -> Node:
    """Bytes with the product they come from, what is free, and time where a speed is known."""
    needs = [
        (need.what.capitalize(), _with(in_words(need.size), need.arithmetic))
        for need in estimate.needs
    ]
    total = ("In all", f"{in_words(estimate.size)} of {in_words(estimate.free)} free")
    times = [
        (one.what.capitalize(), _with(state.duration(one.seconds), one.source))
        for one in estimate.durations
    ]
    facts = state.facts([*needs, total, *times])
    if not estimate.fits:
        text = f"It needs {in_words(estimate.size)}, and {in_words(estimate.free)} are free."
        remedy = el("span", state.sentence(estimate.remedy), cls="hint")
        told: Node | None = notice("error", text, remedy)
    else:
        told = None
    notes = ["The number of tokens is a guess until the data is prepared."] if guessed else []
    if not times:
        notes.append("How long it takes is told once such work has been done here.")
    return el(
        "section",
        el("h3", title),
        told,
        facts,
        [el("p", note, cls="quiet small") for note in notes],
        cls="card",
        aria_label=title,
    )


def _with(value: str, source: str) -> list[Node]:
    return [value, el("div", source, cls="quiet small")]
