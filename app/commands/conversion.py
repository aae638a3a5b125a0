"""How a conversion's doubts and its end read in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.commands.flags import flag_of
from app.commands.output import table


def doubt_lines(doubt: Mapping[str, Any]) -> Iterable[str]:
    """The doubt, and each choice as the flags of `speclab convert` that make it."""
    chosen, choices = doubt["chosen"], doubt["choices"]
    state = "settled" if chosen is not None else "open: one of these" if choices else "open"
    yield f"doubt: {doubt['about']} ({state})"
    rows = [
        ("*" if number == chosen else " ", _flags(choice["params"]), choice["meaning"])
        for number, choice in enumerate(choices)
    ]
    yield from (f"  {line}" for line in table(("", "choice", "meaning"), rows)[1:])


def converted_lines(found: Mapping[str, Any]) -> Iterable[str]:
    """What was written, how it did on its verifier, and what is left to decide."""
    yield f"output: {found['output']}"
    yield f"report: {found['report']}"
    yield f"validation: {_validation(found['validation'])}"
    for doubt in found["doubts"]:
        yield from doubt_lines(doubt)
    yield from (f"warning: {warning}" for warning in found["warnings"])
    yield f"deployable: {'yes' if found['deployable'] else 'no, until a person decides'}"


def _validation(found: Mapping[str, Any]) -> str:
    accepted = found["first_token_acceptance"]
    measured = [] if accepted is None else [f"first-token acceptance {accepted:.2f}"]
    if found["ok"] is None:
        return f"none: {found['note']}"
    said = ["succeeded"] if found["ok"] else ["failed", *found["failed"]]
    return "; ".join([*said, *measured])


def _flags(params: Mapping[str, Any]) -> str:
    return " ".join(_flag(name, value) for name, value in params.items())


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag_of(name)} {text}"
