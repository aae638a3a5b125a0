"""All commands in one tree, and the exit status that one ends with. Thin, and quick to start:
heavy imports wait for their command.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer

from app.commands import caches, core, generate, hub, inspect, machine, queue, serve, train
from app.commands.output import Misuse, fail
from speculators_core.errors import SpeclabError

_INTERRUPTED = 130  # what Typer returns after Ctrl-C


def build() -> typer.Typer:
    """The command tree."""
    app = typer.Typer(
        name="speclab",
        help="Train, prove, serve and watch speculators (EAGLE-3 drafts for vLLM).",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its tables cut long flags short
    )
    for group in (machine, caches, inspect, core, hub, train, generate, serve, queue):
        group.register(app)
    return app


def status_of(arguments: Sequence[str] | None) -> int:
    """Run one command. Raises `KeyboardInterrupt` where Ctrl-C ended it."""
    # Also for errors that come before the command line is understood.
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(build())
        status = command(arguments, prog_name="speclab", standalone_mode=False)
    except SpeclabError as error:
        return fail(error, as_json)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not _is_usage(error):
            traceback.print_exc()
            return fail(_unexpected(error), as_json)
        if not str(error):  # no arguments: the help was shown
            return 2
        return fail(_misuse(error), as_json)
    if status == _INTERRUPTED:
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _unexpected(error: Exception) -> SpeclabError:
    return SpeclabError(
        f"an unexpected fault: {type(error).__name__}: {error}",
        hint="the lines above say where it happened",
    )


def _is_usage(error: Exception) -> bool:
    """Typer's own complaints about the command line; their base class has no public name."""
    return isinstance(error, typer.BadParameter.__mro__[1])


def _misuse(error: Exception) -> Misuse:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "speclab"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return Misuse(message, where=command, hint=f"see {command} --help")
