"""How fast a run is, how long it will take, and what a time limit leaves of its plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from speculators_core.training.schedule import Schedule

_SPEED_FROM, _SPEED_TO = 3, 10  # steps whose time decides whether a time limit can be kept
_LATE = 1.02  # a plan this much too long is shortened
_WORTH_TELLING = 0.9  # of the plan as it was told last


@dataclass
class Pace:
    """Time since `began` (of time.monotonic), and `earlier` seconds of other attempts; `limit`
    is in minutes."""

    began: float
    limit: float | None = None
    earlier: float = 0.0
    _told: int | None = field(init=False, default=None)  # the plan's steps, as last told
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

    def keep(self, step: int, schedule: Schedule, heard: Callable[[int], int]) -> str | None:
        """Shorten the schedule where the limit would not be kept; what to say about it, if it is
        worth saying. `heard` makes all processes decide alike.
        """
        if self.limit is None:
            return None
        fitting = heard(self._fitting(step, schedule, self.limit))
        if self._told is None:
            self._told = schedule.total
        if fitting < schedule.total:
            schedule.shorten(step, fitting)
        if fitting >= _WORTH_TELLING * self._told:
            return None
        before, self._told = self._told, fitting
        speed = self.seconds_a_step(step) or 0.0
        return (
            f"{before} steps shortened to {fitting} "
            f"({speed:.2f} s a step, limit {self.limit:g} minutes)"
        )

    def _fitting(self, step: int, schedule: Schedule, minutes: float) -> int:
        """The steps that the limit leaves of the plan; the plan's own where it can be kept."""
        speed = self.seconds_a_step(step, _SPEED_TO - _SPEED_FROM)
        if speed is None or schedule.total <= step:
            return schedule.total
        fits = step + int((60 * minutes - self.seconds) / speed)
        return max(fits, step + 1) if fits * _LATE < schedule.total else schedule.total
