"""How fast a run is, how long it will take, and what a time limit leaves of its plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from speculators_core.training.schedule import Schedule

_SPEED_FROM, _SPEED_TO = 3, 10  # steps whose time decides whether a time limit can be kept
_LATE = 1.02  # a plan this much too long is shortened


@dataclass
class Pace:
    """Time since `began` (of time.monotonic), and `earlier` seconds of other attempts."""

    began: float
    earlier: float = 0.0
    _since: tuple[int, float] | None = field(init=False, default=None)  # (step, clock)

    @property
    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.began

    def note(self, step: int) -> None:
        """A step has been taken."""
        if self._since is None and step >= _SPEED_FROM:
            self._since = (step, time.monotonic())

    def seconds_a_step(self, step: int, steps: int = 1) -> float | None:
        """None until at least `steps` have been timed."""
        if self._since is None or step - self._since[0] < steps:
            return None
        return (time.monotonic() - self._since[1]) / (step - self._since[0])

    def left(self, step: int, total: int) -> float | None:
        """Seconds to the end of the plan."""
        speed = self.seconds_a_step(step)
        return None if speed is None else speed * (total - step)

    def fitting(self, step: int, schedule: Schedule, minutes: float) -> int:
        """The steps that the limit leaves of the plan; the plan's own where it can be kept."""
        speed = self.seconds_a_step(step, _SPEED_TO - _SPEED_FROM)
        if speed is None or schedule.total <= step:
            return schedule.total
        fits = step + int((60 * minutes - self.seconds) / speed)
        return max(fits, step + 1) if fits * _LATE < schedule.total else schedule.total
