"""Where a run's metrics go besides the listener: TensorBoard, Trackio, Weights & Biases.

Each package is imported only when it is asked for; one that is missing is an error before
anything starts. Their accounts and servers are configured by their own environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from speculators_core.errors import Unavailable
from speculators_core.progress import Progress

PROJECT = "speclab"
_PACKAGES = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}


class Sink(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files beside the output, in `OUTPUT.tensorboard`."""

    def __init__(self, output: Path, params: dict[str, Any]) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(output.with_name(f"{output.name}.tensorboard")))
        self._writer.add_text("parameters", "\n".join(f"{k}: {v}  " for k, v in params.items()))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Trackio, or Weights & Biases, whose interface Trackio has: a run of the project."""

    def __init__(self, package: str, output: Path, params: dict[str, Any]) -> None:
        self._module = import_module(package)
        self._module.init(project=PROJECT, name=output.name, config=params)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


class Copied:
    """A `Progress` whose metrics go to sinks as well."""

    def __init__(self, heard: Progress, sinks: Sequence[Sink]) -> None:
        self._heard, self._sinks = heard, sinks

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        self._heard.update(fraction, text, eta_s)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._heard.metrics(step, values)
        for sink in self._sinks:
            sink.log(step, values)

    def note(self, text: str) -> None:
        self._heard.note(text)

    def stopping(self) -> bool:
        return self._heard.stopping()


def check_sinks(names: Sequence[str]) -> None:
    """Raise `Unavailable` for a sink whose package is not installed."""
    for name in names:
        if find_spec(_PACKAGES[name]) is None:
            raise Unavailable(
                f"{name} is asked for, but its package is not installed",
                where="sinks",
                hint=f"pip install {_PACKAGES[name]}, or leave it out of sinks",
            )


@contextmanager
def copied(
    progress: Progress, names: Sequence[str], output: Path, params: dict[str, Any]
) -> Iterator[Progress]:
    """The progress with these sinks, closed at the end."""
    with ExitStack() as stack:
        sinks: list[Sink] = []
        for name in names:
            tensorboard = name == "tensorboard"
            sink: Sink = (
                TensorBoard(output, params) if tensorboard else Tracker(name, output, params)
            )
            stack.callback(sink.close)
            sinks.append(sink)
        yield Copied(progress, sinks) if sinks else progress
