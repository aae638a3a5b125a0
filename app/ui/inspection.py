"""What an inspection or a conversion says: doubts with their choices, tensors, config fields."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from app.ui.components import state
from app.ui.components.elements import Node, el
from app.ui.components.panel import notice
from app.ui.fields import label

_QUESTIONS = {
    "aux layers": "Which verifier states does the draft see?",
    "norm_before_residual": "Does the draft's residual carry the normed state?",
    "norm_output": "Is the normed state fed back to the next step?",
    "rope_theta": "Which RoPE base were its positions trained with?",
}
_HOW = {
    "copied": "copied",
    "part": "joined",
    "derived": "derived",
    "shared": "the verifier's own",
    "unused": "left out",
}


def question(doubt: Mapping[str, Any]) -> str:
    """A doubt as a question to a person."""
    about = str(doubt.get("about", ""))
    return next((text for name, text in _QUESTIONS.items() if name in about), f"{about}?")


def doubts_tree(
    doubts: Sequence[Mapping[str, Any]],
    holds: Callable[[Mapping[str, Any]], bool],
    given: Callable[[Iterable[str]], str],
) -> Node:
    """Each doubt as a question with its choices as radio buttons, open ones first.

    `holds` says whether the form holds a choice's parameters, `given` what it holds for these
    names where that is neither a choice nor nothing. A chosen button sends `choose` with the
    parameters as JSON; None stands for a field's default.
    """
    if not doubts:
        return notice("success", "Nothing is in doubt.")
    order = sorted(range(len(doubts)), key=lambda i: doubts[i].get("chosen") is not None)
    return el("div", (_doubt(i, doubts[i], holds, given) for i in order), cls="stack")


def _doubt(
    number: int,
    doubt: Mapping[str, Any],
    holds: Callable[[Mapping[str, Any]], bool],
    given: Callable[[Iterable[str]], str],
) -> Node:
    choices = doubt.get("choices") or ()
    names = list(dict.fromkeys(name for choice in choices for name in choice["params"]))
    at = next((i for i, choice in enumerate(choices) if holds(choice["params"])), None)
    own = given(names) if at is None else ""
    by_rule = doubt.get("chosen")
    if at is None and not own:
        at = by_rule
    rows = [_choice(number, choice, i == at, i == by_rule) for i, choice in enumerate(choices)]
    if own:
        rows.append(_radio(number, True, {}, el("strong", "As entered above: "), el("code", own)))
    if by_rule is None:
        rows.append(_left_open(number, names, at is None and not own, bool(choices)))
    return el(
        "fieldset",
        el("legend", question(doubt)),
        _about(doubt, settled=by_rule is not None or at is not None or bool(own)),
        rows,
        cls="doubt card",
    )


def _about(doubt: Mapping[str, Any], *, settled: bool) -> Node:
    by_rule = doubt.get("chosen") is not None
    word, text = ("open", "unsettled, the result can't be deployed")
    if settled:
        word = "settled"
        text = "you settled this"
        if by_rule:
            text = "a rule settled this; choose otherwise if you know better"
    chip = el("span", word, cls=f"chip {'ok' if settled else 'warning'}")
    told = el("span", f"{doubt.get('about')}: {text}", cls="quiet small")
    return el("div", chip, told, cls="row")


def _choice(number: int, choice: Mapping[str, Any], checked: bool, by_rule: bool) -> Node:
    return _radio(
        number,
        checked,
        choice["params"],
        el("span", str(choice["meaning"])),
        el("code", params_text(choice["params"])),
        el("span", "by rule", cls="quiet small") if by_rule else None,
        measured(choice),
    )


def _left_open(number: int, names: Sequence[str], checked: bool, choices: bool) -> Node:
    text = "Leave it open: the conversion measures each choice on the verifier, then choose"
    if not choices:
        text = "Leave it open: the choices depend on the verifier, name it and inspect again"
    return _radio(number, checked, dict.fromkeys(names), el("span", text, cls="quiet"))


def _radio(number: int, checked: bool, params: Mapping[str, Any], *text: Node | None) -> Node:
    button = el(
        "input",
        type="radio",
        name=f"doubt-{number}",
        checked=checked,
        data_action="choose",
        data_value=json.dumps(params),
    )
    shown = [part for part in text if part is not None]
    return el("label", button, el("span", shown, cls="row"), cls="choice")


def params_text(params: Mapping[str, Any]) -> str:
    """`Aux layers 2,15,27 · Aux convention after`"""
    return " · ".join(f"{label(name)} {_plain(value)}" for name, value in params.items())


def measured(choice: Mapping[str, Any]) -> Node | None:
    """The first-token acceptance of a choice, where it is known."""
    accepted = choice.get("first_token_acceptance")
    if accepted is None:
        return None
    return el("strong", f"{100 * accepted:.1f} % of first tokens accepted", cls="figure small")


def warnings_tree(warnings: Iterable[str]) -> list[Node]:
    return [notice("warning", str(warning)) for warning in warnings]


def tables_tree(found: Mapping[str, Any]) -> Node:
    """The way of every tensor and the origin of every config field."""
    tensors, fields = found.get("tensors") or (), found.get("config") or {}
    counted = Counter(_HOW.get(str(t.get("how")), str(t.get("how"))) for t in tensors)
    told = ", ".join(f"{count} {how}" for how, count in counted.items())
    return el(
        "div",
        el("div", el("h3", f"{len(tensors):,} tensors"), el("span", told, cls="quiet"), cls="row"),
        state.long_table(
            ["In the checkpoint", "Becomes", "#Shape", "Type", "Why"],
            map(_tensor, tensors),
            label="Tensors",
        ),
        el("h3", f"{len(fields)} config fields"),
        state.long_table(
            ["Field", "Value", "Taken from"],
            (_field(name, entry) for name, entry in fields.items()),
            label="Config",
        ),
        cls="stack",
    )


def _tensor(tensor: Mapping[str, Any]) -> Sequence[Node]:
    shape = " × ".join(str(size) for size in tensor.get("shape") or ()) or "scalar"
    source, target = tensor.get("source"), tensor.get("target")
    return (
        el("code", str(source)) if source else el("span", "–", cls="quiet"),
        el("code", str(target)) if target else el("span", "left out", cls="quiet"),
        shape,
        str(tensor.get("dtype")),
        el("span", str(tensor.get("reason")), cls="quiet"),
    )


def _field(name: str, entry: Mapping[str, Any]) -> Sequence[Node]:
    return (
        el("code", name),
        el("code", _plain(entry.get("value"))),
        el("span", str(entry.get("origin")), cls="quiet"),
    )


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)) and not any(isinstance(v, (dict, list)) for v in value):
        return ", ".join(map(str, value))
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
