"""Runs `python -m speculators_core KIND`: the core's heavy work, away from the CLI's process.

The parameters go in as JSON; events come back on stderr, one JSON object a line, and the result
on stdout (docs/architecture.md, "Processes"). Ctrl-C or TERM asks the work to stop and save;
asking again kills it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from app.supervisor import die_with
from speculators_core.errors import SpeclabError, Stopped, revive

Event = dict[str, Any]


class Listener(Protocol):
    """Hears the events of a core process."""

    def __call__(self, event: Event) -> None: ...


def run_core(
    kind: str, request: dict[str, Any], listener: Listener, module: str = "speculators_core"
) -> dict[str, Any]:
    """The result of the work; its error is raised here as the class it was there. `module` may be
    another one that speaks like the core."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us, and we pass it on once
        preexec_fn=die_with(os.getpid()),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin and process.stdout and process.stderr
    with _passing_on_signals(process) as asked:
        answer = _Reader(process.stdout.read)
        with suppress(BrokenPipeError), process.stdin as stdin:  # its status will tell
            stdin.write(json.dumps(request).encode())
        for line in process.stderr:
            listener(_event(line))
        status = process.wait()
    if asked and status == -signal.SIGTERM:
        raise Stopped("the work was stopped before it began")
    return _result(answer.wait(), status)


def _result(answer: bytes, status: int) -> dict[str, Any]:
    try:
        document = json.loads(answer)
    except json.JSONDecodeError:
        raise SpeclabError(
            f"the work ended without a result (exit status {status})",
            hint="the lines above may say why; a status of -9 often means too little memory",
        ) from None
    if isinstance(document, dict) and "error" in document:
        raise revive(document["error"])
    return dict(document)


def _event(line: bytes) -> Event:
    """Lines that are no events come from libraries: notes."""
    text = line.decode(errors="replace").rstrip("\n")
    try:
        event = json.loads(text)
    except json.JSONDecodeError:
        return {"note": text}
    return event if isinstance(event, dict) else {"note": text}


class _Reader(threading.Thread):
    """Reads a pipe to its end meanwhile, so that neither side waits for the other."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        super().__init__(daemon=True)
        self._read = read
        self._data = b""
        self.start()

    def run(self) -> None:
        self._data = self._read()

    def wait(self) -> bytes:
        self.join()
        return self._data


@contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """The signals that came meanwhile; the first asks the process to stop, the next kill it."""
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGKILL if asked else signal.SIGTERM)
        asked.append(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


class ProgressBar:
    """Draws events on stderr: a bar on a terminal, a line now and then elsewhere."""

    _LINE_EVERY_S = 5.0

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=None, eta="")
        self._last_line = 0.0
        self._numbers = ""

    def __enter__(self) -> ProgressBar:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        if "note" in event:
            self._console.print(str(event["note"]), markup=False, highlight=False)
        elif "metrics" in event:
            self._numbers = _headline(event["metrics"])
        elif "progress" in event:
            self._show(event.get("progress"), str(event.get("text", "")), event.get("eta_s"))

    def _show(self, fraction: float | None, text: str, eta_s: float | None) -> None:
        line = f"{text}  {self._numbers}".rstrip()
        eta = "" if eta_s is None else f"{_duration(eta_s)} left"
        if self._console.is_terminal:
            total = None if fraction is None else 1.0
            self._bar.update(
                self._task, description=line, total=total, completed=fraction or 0.0, eta=eta
            )
        elif time.monotonic() - self._last_line >= self._LINE_EVERY_S or fraction == 1.0:
            self._last_line = time.monotonic()
            percent = "" if fraction is None else f"{fraction:4.0%} "
            self._console.print(f"{percent}{line} {eta}".rstrip(), markup=False, highlight=False)


def _headline(metrics: dict[str, float]) -> str:
    """The two numbers that say most about a training step."""
    shown = [n for n in ("loss", "acceptance_length") if n in metrics]
    return "  ".join(f"{name.replace('_', ' ')} {metrics[name]:.3f}" for name in shown)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
