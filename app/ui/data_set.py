"""One data set: its facts, and any sample of a prepared one token by token with its mask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import gradio as gr

from app.services import capacity, data_sets, looking
from app.services.views import DataSetView
from app.ui.capacity import estimate_tree
from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import Panel, action, notice
from app.ui.components.sample_view import sample_tree
from app.ui.page import QUIET, attempt
from speculators_core.data.chats import REASONING, Message
from speculators_core.data.layouts import Text, recognise
from speculators_core.data.samples import PreparedFacts
from speculators_core.errors import DataError
from speculators_core.params import TrainParams

# A relative address would resolve against Gradio's base tag and lose the page.
KEEP_ADDRESS = """(number, only) => {
  const query = new URLSearchParams(location.search);
  query.set("sample", number);
  if (only) query.set("only", "validation"); else query.delete("only");
  history.replaceState(null, "", location.pathname + "?" + query.toString());
  return [];
}"""
_LONGEST_TEXT = 600
_LARGEST = 2**53 - 1  # of the whole numbers that a browser holds


def build(blocks: gr.Blocks) -> None:
    """What `/data?set=NAME&sample=1&only=validation` shows; samples count from 1 for people."""
    about = Panel(elem_id="data-set-facts")
    with gr.Row(elem_classes="sl-filters", visible=False, elem_id="sample-filters") as filters:
        number = gr.Number(1, label="Sample", precision=0, minimum=1, elem_id="sample-number")
        only = gr.Checkbox(label="Only validation", elem_id="only-validation")
    shown = Panel(elem_id="sample")
    name = gr.State("")

    def opened(request: gr.Request) -> list[Any]:
        query = request.query_params
        wanted, at = query.get("set", ""), query.get("sample", "1")
        first, chosen = _whole(at), query.get("only") == "validation"
        if not wanted:
            return [wanted, gr.skip(), gr.skip(), gr.skip(), gr.skip(), gr.skip()]
        one = _found(wanted)
        prepared = one is not None and one.kind == "prepared"
        tree = sample_of(wanted, first, chosen) if prepared else el("div")
        told = attempt(lambda: facts_tree(data_sets.get(wanted)))
        return [wanted, told, gr.Row(visible=prepared), first, chosen, tree]

    def turn(event: gr.EventData, named: str, chosen: bool) -> list[Any]:
        at = _whole(action(event)[1])
        return [at, sample_of(named, at, chosen)]

    blocks.load(opened, None, [name, about, filters, number, only, shown], **QUIET)
    turned = shown.click(turn, [name, only], [number, shown], **QUIET)
    asked = gr.on([number.submit, only.input], sample_of, [name, number, only], shown, **QUIET)
    for event in (turned, asked):
        event.then(None, [number, only], None, js=KEEP_ADDRESS, **QUIET)


def sample_of(name: str, number: float | None, only_validation: bool) -> Node:
    """Sample `number`, from 1, of a prepared set."""

    def work() -> Node:
        one = data_sets.get(name)
        found = looking.look(one, int(number or 1) - 1, validation_only=only_validation)
        return sample_tree(found, one.samples, only_validation=only_validation)

    return attempt(work)


def facts_tree(one: DataSetView) -> Node:
    """What is known of a data set; of a prepared one also what training on it would take."""
    parts = [_head(one)]
    if one.kind == "prepared":
        found = looking.facts(one)
        parts += [_warnings(found), _prepared(one, found), _distributions(found)]
        parts.append(attempt(lambda: _training(one)))
    else:
        parts += [_card("Facts", state.facts(_common(one))), _rows(one)]
    return el("div", parts, cls="stack")


def _head(one: DataSetView) -> Node:
    links = _links(one)
    return el(
        "div",
        el("div", el("a", "← All data", href="/data"), cls="small"),
        el("div", el("h1", one.name), el("div", links, cls="row"), cls="row between"),
        cls="stack",
    )


def _links(one: DataSetView) -> list[Node]:
    query = urlencode({"data": one.name}, quote_via=quote)
    if one.kind == "prepared":
        return [el("a", "Train on it", href=f"/train?{query}", cls="button primary")]
    if one.kind == "prompts":
        return [el("a", "Evaluate on it", href=f"/models?form=evaluate&{query}", cls="button")]
    return [
        el("a", "Prepare it", href=f"/data?form=prepare&{query}", cls="button primary"),
        el("a", "Regenerate its answers", href=f"/data?form=regenerate&{query}", cls="button"),
    ]


def _warnings(found: PreparedFacts) -> list[Node]:
    """A mask of nothing or of everything trains on nothing, or on the questions too."""
    told = []
    if found.trained_share <= 0:
        told.append(
            notice("error", "0 % of the tokens are trained: the masks are empty, nothing is learnt")
        )
    if found.trained_share >= 1:
        text = "100 % of the tokens are trained: questions and templates too, not answers alone"
        told.append(notice("warning", f"{text}."))
    return told


def _prepared(one: DataSetView, found: PreparedFacts) -> Node:
    share = f"{100 * found.trained_share:.1f} %"
    thinking = {None: "as the template has it", True: "on", False: "off"}[found.enable_thinking]
    facts: list[tuple[str, Any]] = [
        ("Samples", f"{found.samples:,}"),
        ("For validation", f"{found.validation_samples:,}"),
        ("Tokens", f"{found.tokens:,}"),
        ("Trained tokens", f"{found.trained_tokens:,} ({share})"),
        ("Answers' tokens covered", f"{100 * found.coverage:.2f} %"),
        ("Draft vocabulary", f"{found.draft_vocab_size:,} of {found.vocab_size:,}"),
        ("Cut at", f"{found.seq_length:,} tokens"),
        ("Verifier", found.verifier),
        ("Mask by", found.masked_by),
        ("Thinking", thinking),
        *_common(one),
        ("Key", el("code", found.key[:12], title=found.key)),
    ]
    sources = [
        (el("code", source.path), f"{source.weight:g}", f"{source.rows:,}", f"{source.samples:,}")
        for source in found.sources
    ]
    headings = ["Source", "#Weight", "#Rows", "#Samples"]
    return _card("Facts", state.facts(facts), state.table(headings, sources, label="Sources"))


def _common(one: DataSetView) -> list[tuple[str, Any]]:
    origin = el("a", one.run_id, href=f"/runs?run={one.run_id}") if one.run_id else "a person"
    return [
        ("Kind", one.kind),
        ("On disk", state.size(capacity.size_of(one))),
        ("Brought by", origin),
        ("Added", state.ago(one.created_at)),
    ]


def _distributions(found: PreparedFacts) -> Node:
    lengths = [(f"up to {bound:,}", count) for bound, count in found.length_histogram]
    skipped = [
        *found.skipped.items(),
        *((f"kept, but: {why}", n) for why, n in found.doubts.items()),
    ]
    return el(
        "div",
        _card("Lengths, in tokens", histogram(lengths, "Lengths")),
        _card(
            "Skipped, and why",
            state.table(["Reason", "#Rows"], [(w, f"{n:,}") for w, n in skipped], label="Skipped")
            if skipped
            else el("p", "Nothing was skipped.", cls="quiet"),
        ),
        cls="grid",
    )


def histogram(bars: Sequence[tuple[str, int]], label: str) -> Node:
    """A bar a row: what it counts, how long it is, the number."""
    most = max((count for _, count in bars), default=1)
    rows = (
        el(
            "li",
            el("span", name),
            el("progress", max=most, value=count, aria_label=f"{name}: {count}"),
            el("span", f"{count:,}", cls="figure"),
        )
        for name, count in bars
    )
    return el("ul", rows, cls="histogram", aria_label=label)


def _training(one: DataSetView) -> Node:
    params = TrainParams(data=one.name, verifier=str(one.facts.get("verifier") or "unknown"))
    tokens, size = capacity.of_data_set(one), one.facts.get("draft_vocab_size")
    return estimate_tree(capacity.of_training(params, tokens, size), "Training on it would take")


def _rows(one: DataSetView) -> Node:
    """The beginning of a file of chats or prompts."""
    rows = looking.first_rows(one)
    if not rows:
        return el("div")
    return _card(
        "Its first rows",
        (el("div", _turns(row, f"row {number}"), cls="chat") for number, row in enumerate(rows, 1)),
    )


def _turns(row: Mapping[str, Any], where: str) -> Iterator[Node]:
    """What `prepare` reads in a row, or why it can't."""
    try:
        found = recognise(row, where)
    except DataError as error:
        yield notice("warning", str(error))
        return
    if isinstance(found, Text):
        yield el("p", el("strong", "text: "), _cut(found.text))
        return
    for turn in found.messages:
        yield el("p", el("strong", f"{turn.role}: "), _cut(_said(turn)))


def _said(turn: Message) -> str:
    """Thoughts and calls of tools, too."""
    thoughts = [str(turn.further[name]) for name in REASONING if turn.further.get(name)]
    calls = turn.further.get("tool_calls")
    told = [*thoughts, turn.content, json.dumps(calls, ensure_ascii=False) if calls else ""]
    return "\n".join(part for part in told if part)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"


def _card(title: str, *parts: Any) -> Node:
    return el("section", el("h2", title), *parts, cls="card", aria_label=title)


def _found(name: str) -> DataSetView | None:
    return next((one for one in data_sets.list_data_sets() if one.name == name), None)


def _whole(text: str) -> int:
    return min(int(text), _LARGEST) if text.isdecimal() else 1
