"""A sample of prepared data token by token, with what is trained of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from app.services.looking import Look
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from speculators_core.data.samples import Sample, SampleToken


def sample_tree(found: Look, total: int, *, only_validation: bool) -> Node:
    """A sample token by token, with what is trained of it."""
    sample = found.sample
    trained = sum(token.trained for token in sample.tokens)
    share = trained / len(sample.tokens) if sample.tokens else 0.0
    which = f"Sample {sample.number + 1:,} of {total:,}"
    if only_validation:
        which = f"Validation sample {found.place + 1:,} of {found.count:,} ({which.lower()})"
    told = f"{len(sample.tokens):,} tokens, {trained:,} trained ({100 * share:.0f} %)"
    return el(
        "section",
        el(
            "div",
            el("div", el("h2", which), _kept(sample), cls="row"),
            el("div", _turn("Previous", found.previous), _turn("Next", found.next), cls="row"),
            cls="row between",
        ),
        el("div", el("span", told), el("code", sample.source, cls="quiet"), cls="row small"),
        _flag(share),
        legend(),
        el(
            "div",
            tokens_tree(sample.tokens),
            cls="sample-tokens",
            tabindex=0,
            role="region",
            aria_label="Tokens of the sample",
        ),
        cls="card",
        aria_label="Sample",
    )


def _kept(sample: Sample) -> Node:
    return el("span", "validation" if sample.validation else "training", cls="chip")


def _flag(share: float) -> Node | None:
    if 0 < share < 1:
        return None
    what = "Nothing" if share <= 0 else "Everything"
    return notice("warning", f"{what} in this sample is trained ({100 * share:.0f} %).")


def legend() -> Node:
    entries = (("trained", "trained: the assistant wrote it"), ("context", "only read"))
    return el(
        "ul",
        (el("li", el("span", el("span", text, cls="st"), cls=cls)) for cls, text in entries),
        cls="legend sample-legend",
        aria_label="Legend",
    )


def tokens_tree(tokens: Iterable[SampleToken]) -> Iterator[Node]:
    """Stretches of trained and other tokens, each token with its id; trained ones are underlined,
    tinted, and called so to those who can't see that.
    """
    for trained, stretch in groupby(tokens, lambda token: token.trained):
        yield el(
            "span",
            [_token(token) for token in stretch],
            cls="trained" if trained else "context",
            role="group",
            aria_label="trained" if trained else "not trained",
        )


def _token(token: SampleToken) -> Node:
    text = token.text.replace("\n", "⏎\n").replace("\t", "⇥\t")
    return el("span", text or f"⟨{token.id}⟩", cls="st", title=f"token {token.id}")


def _turn(label: str, number: int | None) -> Node:
    return el(
        "button",
        label,
        cls="button small",
        type="button",
        data_action="sample",
        data_value=None if number is None else number + 1,
        aria_disabled="true" if number is None else None,
    )
