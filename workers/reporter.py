"""How a job process tells the store how far it is: a `Progress` that no outage can stop.

Reports are gathered and written about once a second by a thread. While the store is away they
are kept, the latest progress and every metric, and written when it is back, at the latest at
the end of the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from app.services import claims
from speculators_core.errors import Stopped, Unavailable

log = logging.getLogger("job")

_EVERY_S = 1.0
Answer = TypeVar("Answer")


class Reporter:
    """One run's voice. Use it as a context manager: leaving it writes what is left.

    `attempt`: whose voice it is; once the run is in another attempt, the store hears it no more.
    """

    def __init__(
        self, run_id: str, attempt: int | None = None, *, every_s: float = _EVERY_S
    ) -> None:
        self.run_id = run_id
        self._attempt = attempt
        self._every_s = every_s
        self._lock = threading.Lock()
        self._progress: tuple[float | None, str, float | None] | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        self._away = False
        self._stop_asked = False  # a plain attribute: a signal handler sets it
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="reporter", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()
        with suppress(Stopped):
            self.insist(self._write)

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        with self._lock:
            self._progress = (fraction, text, eta_s)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        with self._lock:
            self._metrics[step] = dict(values)

    def note(self, text: str) -> None:
        log.info("%s", text)

    def stopping(self) -> bool:
        return self._stop_asked

    def stop(self) -> None:
        """Ask the work to save and end; safe within a signal handler."""
        self._stop_asked = True

    def insist(self, action: Callable[[], Answer]) -> Answer:
        """Do something with the store, however long it is away.

        Raises `Stopped` when the job is asked to stop meanwhile.
        """
        while True:
            try:
                answer = action()
            except Unavailable as error:
                self._gone(error)
            else:
                self._back()
                return answer
            if self._stop_asked:
                raise Stopped("asked to stop while the store was away")
            time.sleep(self._every_s)

    def _write_on(self) -> None:
        while not self._closing.wait(self._every_s):
            try:
                self._write()
            except Unavailable as error:
                self._gone(error)
            else:
                self._back()

    def _write(self) -> None:
        with self._lock:
            progress, metrics = self._progress, self._metrics
            self._progress, self._metrics = None, {}
        try:
            if metrics:
                claims.add_metrics(self.run_id, metrics, attempt=self._attempt)
                metrics = {}
            if progress:
                claims.progress(self.run_id, *progress, attempt=self._attempt)
                progress = None
        finally:
            self._keep(progress, metrics)

    def _keep(
        self,
        progress: tuple[float | None, str, float | None] | None,
        metrics: dict[int, dict[str, float]],
    ) -> None:
        """Put back what could not be written, unless something newer has come."""
        with self._lock:
            self._progress = self._progress or progress
            self._metrics = {**metrics, **self._metrics}

    def _gone(self, error: Unavailable) -> None:
        if not self._away:
            log.warning("%s; the work goes on, reports are kept", error)
        self._away = True

    def _back(self) -> None:
        if self._away:
            log.info("the store is back; what was kept has been written")
        self._away = False
