"""A `Progress` that writes down what it hears."""

from __future__ import annotations

from collections.abc import Callable

from speculators_core.progress import Quiet


class Listener(Quiet):
    """Remembers fractions, metrics and notes; `stop_when` decides when it asks to stop."""

    def __init__(self, stop_when: Callable[[Listener], bool] = lambda self: False) -> None:
        self.fractions: list[float] = []
        self.steps: dict[int, dict[str, float]] = {}
        self.notes: list[str] = []
        self.asked = 0
        self.stop_when = stop_when

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        if fraction is not None:
            self.fractions.append(fraction)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.steps.setdefault(step, {}).update(values)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stopping(self) -> bool:
        self.asked += 1
        return self.stop_when(self)
