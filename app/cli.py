"""`speclab`: the way into the command line.

Exit status 0: done; 1: what was asked for failed; 2: wrong usage; 130: ended by Ctrl-C. With
`--json` every command prints one JSON document on stdout, an error as `{"error": {kind, message,
where, hint}}`. Imports wait until Ctrl-C is caught: they take the first half second, of which only
Python's own start is left.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # not from typing, whose import is one of those
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status."""
    try:
        from app.commands.tree import status_of

        sys.exit(status_of(arguments))
    except KeyboardInterrupt:
        _say_interrupted(sys.argv[1:] if arguments is None else arguments)
        sys.exit(INTERRUPTED)


def _say_interrupted(arguments: Sequence[str]) -> None:
    """Nothing, unless a program is listening."""
    import json

    from speculators_core.errors import Stopped

    if "--json" in arguments:
        print(json.dumps({"error": Stopped("interrupted").as_dict()}))


if __name__ == "__main__":
    main()
