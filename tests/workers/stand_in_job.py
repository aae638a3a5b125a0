"""The job process with stand-in jobs: what a run does is spelled in its parameters.

The first field (`source` of a verifier run, `verifier` of a deployment) is a word and arguments:

    sleep:S           for S seconds, then succeed; stop on request (exit 3)
    deaf:S            the same, but ignores SIGTERM
    fail:TEXT         raise a DataError
    crash:TEXT        raise an unexpected error
    exit:N            leave with a status of N, having said nothing
    kill              SIGKILL itself at each attempt
    family:S          start a child that sleeps, then sleep
    say               print environment and secrets
Each start appends `start ATTEMPT PID` to SPECLAB_HOME/starts/RUN_ID, each end `end ATTEMPT PID`,
and one that finds the run at work in another process `overlap ATTEMPT PID`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from app.services.views import RunView
from app.settings import settings
from speculators_core.errors import DataError, Stopped
from workers import job
from workers.reporter import Reporter


def act(run: RunView, params: Any, reporter: Reporter) -> dict[str, Any]:
    does = params.source if hasattr(params, "source") else params.verifier
    word, _, argument = does.partition(":")
    with _alone(run):
        _record(run, "start")
        _ACTS[word.rpartition("/")[2]](run, argument, reporter)
        _record(run, "end")
    return {"output": str(settings().home), "name": does}


@contextmanager
def _alone(run: RunView) -> Iterator[None]:
    """A lock that dies with the process: a second execution at the same time is recorded."""
    with (settings().run_dir(run.id) / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _record(run, "overlap")
        yield


def _sleep(run: RunView, argument: str, reporter: Reporter) -> None:
    seconds = float(argument.split("#")[0])
    until = time.monotonic() + seconds
    step = 0
    while (left := until - time.monotonic()) > 0:
        if reporter.stopping():
            reporter.note("saving")
            raise Stopped("saved")
        reporter.update(1 - left / seconds, f"{left:.1f} s left", left)
        reporter.metrics(step, {"loss": left})
        step += 1
        time.sleep(0.05)


def _deaf(run: RunView, argument: str, reporter: Reporter) -> None:
    time.sleep(float(argument))


def _fail(run: RunView, argument: str, reporter: Reporter) -> None:
    raise DataError(argument, where="line 3", hint="mend it")


def _crash(run: RunView, argument: str, reporter: Reporter) -> None:
    raise ZeroDivisionError(argument)


def _exit(run: RunView, argument: str, reporter: Reporter) -> None:
    print("RuntimeError: the GPU fell off the bus", flush=True)
    os._exit(int(argument))


def _kill(run: RunView, argument: str, reporter: Reporter) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _family(run: RunView, argument: str, reporter: Reporter) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _sleep(run, argument, reporter)


def _say(run: RunView, argument: str, reporter: Reporter) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        print(f"{name}=[{os.environ.get(name)}]")
    print("token hf_" + "a" * 30)
    print("to stderr", file=sys.stderr)


_ACTS = {
    "sleep": _sleep,
    "deaf": _deaf,
    "fail": _fail,
    "crash": _crash,
    "exit": _exit,
    "kill": _kill,
    "family": _family,
    "say": _say,
}


def _record(run: RunView, what: str) -> None:
    folder = settings().home / "starts"
    folder.mkdir(exist_ok=True)
    with (folder / run.id).open("a") as file:
        file.write(f"{what} {run.attempt} {os.getpid()}\n")


if __name__ == "__main__":
    sys.exit(job.main(sys.argv[1:], lambda kind: act))
