"""How long work tells whoever started it how far it is, and hears that it should stop.

The core calls these four methods and knows nothing of who listens: the CLI draws a bar, a
job writes rows to the store, a test records a list.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener to one piece of work."""

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        """`fraction` of the whole work in 0..1 (None: unknown), one short line, seconds left."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """One logged step of scalars; a step that is logged again replaces the earlier one."""

    def note(self, text: str) -> None:
        """One line for the log."""

    def stopping(self) -> bool:
        """True once the work has been asked to stop; it then saves and raises `Stopped`."""


class Quiet:
    """A `Progress` that nobody watches."""

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def stopping(self) -> bool:
        return False


class Portion:
    """The stretch `low`..`high` of a larger piece of work, told to whoever watches the whole."""

    def __init__(self, whole: Progress, low: float, high: float) -> None:
        self._whole, self._low, self._high = whole, low, high

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        if fraction is not None:
            fraction = self._low + (self._high - self._low) * fraction
        self._whole.update(fraction, text, eta_s)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._whole.metrics(step, values)

    def note(self, text: str) -> None:
        self._whole.note(text)

    def stopping(self) -> bool:
        return self._whole.stopping()
