"""`speclab generate`: one answer in the terminal, its tokens coloured by who proposed them.

Colour is never alone: accepted draft tokens are underlined, the verifier's own are bold, rejected
ones (`--trace`) struck through. Where stdout is no terminal the answer is plain text, and `--trace`
marks tokens with `+`, `=` and `-`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.core import Flags, resolved
from app.commands.core_process import Event, ProgressBar, run_core
from app.commands.flags import parse, with_flags
from app.commands.output import Json, emit, say
from speculators_core.params import GenerateParams

if TYPE_CHECKING:
    from rich.text import Text

ACCEPTED, OWN, REJECTED = "underline green", "bold blue", "strike dark_orange"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("generate")(with_flags(_generate, GenerateParams))


def _generate(
    flags: Flags,
    trace: Annotated[
        bool, typer.Option("--trace", help="A line a step, rejected draft tokens included.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Plain decoding, to compare.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt with the reference engine."""
    if no_speculation:
        flags = {**flags, "speculator": None}
    params = parse(GenerateParams, flags)
    request = {"params": resolved(params)}
    if as_json:
        with ProgressBar("generate") as bar:
            emit(run_core("generate", request, bar), True)
        return
    result = run_core("generate", request, _Printer(trace))
    say("")
    say(_summary(result["numbers"]))


class _Printer:
    """Prints decoded steps as they come."""

    def __init__(self, trace: bool) -> None:
        from rich.console import Console

        self._console = Console(soft_wrap=True, highlight=False)
        self._trace = trace

    def __call__(self, event: Event) -> None:
        if "decoded" in event:
            self._print(event["decoded"])
        elif "note" in event:
            say(str(event["note"]))

    def _print(self, step: dict[str, Any]) -> None:
        if not self._trace:
            self._console.print(coloured(step, rejected=False), end="")
        elif self._console.is_terminal:
            self._console.print(f"{step['step']:4d}  ", coloured(step, rejected=True), sep="")
        else:
            typer.echo(f"{step['step']:4d}  {marked(step)}")


def coloured(step: dict[str, Any], *, rejected: bool) -> Text:
    """A step's tokens, styled; control characters shown when each step has its own line."""
    from rich.text import Text

    text = Text()
    for token, style in _tokens(step):
        if style != REJECTED or rejected:
            text.append(_visible(token) if rejected else token, style)
    return text


def marked(step: dict[str, Any]) -> str:
    """A step's tokens without any styling: `+accepted`, `-rejected`, `=verifier's own`."""
    marks = {ACCEPTED: "+", OWN: "=", REJECTED: "-"}
    return " ".join(f"{marks[style]}{_visible(token)}" for token, style in _tokens(step))


def _tokens(step: dict[str, Any]) -> list[tuple[str, str]]:
    accepted = min(step["accepted"], len(step["emitted"]))
    return [
        *((token, ACCEPTED) for token in step["emitted"][:accepted]),
        *((token, REJECTED) for token in step["drafted"][step["accepted"] :]),
        *((token, OWN) for token in step["emitted"][accepted:]),
    ]


def _visible(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥")


def _summary(numbers: dict[str, Any]) -> str:
    speed = f"{numbers['tokens']} tokens, {numbers['tokens_per_second']:.1f} tokens/s"
    if numbers["acceptance_length"] is None:
        return f"{speed}, without speculation"
    return (
        f"{speed}, acceptance length {numbers['acceptance_length']:.2f}, "
        f"{numbers['acceptance_rate']:.0%} of drafted tokens accepted"
    )
