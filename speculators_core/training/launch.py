"""Training in several processes: torchrun, started, listened to and ended.

The work itself is `training.rank`, once a process. What its first process tells comes back as JSON
lines; a file asks it to stop, so no signal has to find its way through torchrun. torchrun stays in
the group of whoever called, and ends with it; its processes, to each of which it gives a session
of its own, end with torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from speculators_core.errors import SpeclabError, Stopped, revive
from speculators_core.lifeline import die_with_parent
from speculators_core.params import TrainParams
from speculators_core.progress import Progress

REQUEST, ANSWER, STOP, ERRORS = "request.json", "answer.json", "stop", "errors"
AGENT = "SPECLAB_TORCHRUN"
"""Environment variable with the pid of torchrun, with which its processes end."""
_LOOK_S = 0.2
_LAST_LINES = 20


def train_in_processes(
    params: TrainParams, output: Path, progress: Progress, resume: Path | None
) -> dict[str, Any]:
    """What the first process of this machine answers. Raises what any of them raised first."""
    with tempfile.TemporaryDirectory(prefix="speclab-train-") as folder:
        place = Path(folder)
        (place / ERRORS).mkdir()
        request = {
            "params": params.model_dump(mode="json"),
            "output": str(output),
            "resume": str(resume) if resume else None,
        }
        (place / REQUEST).write_text(json.dumps(request))
        with _started(params, place) as agent, _stopping(progress, place / STOP):
            assert agent.stderr
            last = _relayed(agent.stderr, progress)
            status = agent.wait()
        return _answer(place, status, last)


@contextmanager
def _started(params: TrainParams, place: Path) -> Iterator[subprocess.Popen[str]]:
    threads = max(1, (os.cpu_count() or 1) // params.processes)
    agent = subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid()), *_torchrun(params, place)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno() if _has_file(sys.stderr) else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
    )
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.kill()  # its processes end with it
            agent.wait()


def _torchrun(params: TrainParams, place: Path) -> list[str]:
    """The command line of `torch.distributed.run`."""
    where = ["--standalone", "--local-addr=127.0.0.1"]
    if params.rendezvous:
        host, _, port = params.rendezvous.rpartition(":")
        where = [
            f"--node-rank={params.node_rank}",
            f"--master-addr={host}",
            f"--master-port={port}",
        ]
    return [
        f"--nnodes={params.nodes}",
        f"--nproc-per-node={params.processes}",
        "--max-restarts=0",
        "--monitor-interval=0.5",
        *where,
        "-m",
        "speculators_core.training.rank",
        str(place),
    ]


@contextmanager
def _stopping(progress: Progress, file: Path) -> Iterator[None]:
    """While open, a wish to stop becomes a file."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_S):
            if progress.stopping():
                file.touch()
                return

    thread = threading.Thread(target=watch, name="stop file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _relayed(lines: IO[str], progress: Progress) -> list[str]:
    """Pass on what the first process tells, until the end; the last lines that are nothing of it,
    which are the libraries' own words."""
    last: list[str] = []
    for line in lines:
        event = _event(line)
        if "note" in event:
            progress.note(event["note"])
        elif "metrics" in event:
            progress.metrics(event["step"], event["metrics"])
        elif "progress" in event:
            progress.update(event["progress"], event["text"], event["eta_s"])
        elif line.strip():
            progress.note(line.rstrip())
            last = [*last, line.rstrip()][-_LAST_LINES:]
    return last


def _event(line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {}
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def _answer(place: Path, status: int, last: list[str]) -> dict[str, Any]:
    told = sorted((place / ERRORS).iterdir(), key=lambda file: file.stat().st_mtime_ns)
    if told:
        raise revive(json.loads(told[0].read_text()))
    answer = place / ANSWER
    if not answer.exists():
        raise SpeclabError(
            f"a training process died (torchrun ended with {status})",
            where=last[-1] if last else None,
            hint="the log has its last words; the last checkpoint is kept",
        )
    found: dict[str, Any] = json.loads(answer.read_text())
    if "stopped" in found:
        raise Stopped(found["stopped"])
    return found


def _has_file(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _be_torchrun(arguments: list[str]) -> None:
    """Be the agent: it ends with its parent, and leaves TERM, which the whole group gets, to those
    who can save what they have."""
    die_with_parent(int(arguments[0]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.run import main

    main(arguments[1:])


if __name__ == "__main__":
    _be_torchrun(sys.argv[1:])
