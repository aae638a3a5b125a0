"""The questions of given chats, answered anew by the verifier: what a draft is to learn is what
the verifier says, not what somebody else said.

    OUTPUT/chats.jsonl        {"id", "messages", "tools"?}, in the order of the data
    OUTPUT/regenerated.json   the settings it was made with, and what came of it
    OUTPUT.answers/           while it is made: answers as they come, one JSON line each

An attempt that was stopped or killed goes on from `OUTPUT.answers`: a chat whose id is there is
not asked again, and a torn last line is dropped. An id is the row's number and a hash of the chat,
so a row that was edited meanwhile is asked anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel

from speculators_core.data.answering import Answering, Outcome, Task, answering, identity
from speculators_core.data.chats import Chat
from speculators_core.data.layouts import Text, recognise
from speculators_core.data.sources import Source, open_source, take
from speculators_core.errors import Conflict, DataError, Stopped, Unavailable
from speculators_core.output import complete_or_absent, make_place, room_for
from speculators_core.params import RegenerateParams
from speculators_core.progress import Progress, Quiet

CHATS, RECORD = "chats.jsonl", "regenerated.json"
_ANY_ORDER = {"endpoint", "concurrency", "max_failed", "data", "verifier"}
"""What may change between two attempts: a server may have moved, a path be written otherwise."""
_TOO_FEW = 20  # chats, below which a share of failures says nothing yet


class RegenerateResult(BaseModel):
    """What `regenerate` wrote. `cut`: answers that ended at `max_tokens`, not by themselves."""

    output: str
    samples: int
    failed: int
    cut: int
    tokens: int
    prompt_tokens: int
    skipped: dict[str, int]
    reasons: dict[str, int]  # of failures
    model: str


@dataclass
class _Work:
    """One attempt's parts: what the functions below share."""

    params: RegenerateParams
    source: Source
    progress: Progress
    answers: BinaryIO
    known: dict[str, int]  # id → where its line begins
    wanted: list[str] = field(default_factory=list)  # ids of this data, in order
    skipped: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    done: float = 0.0
    began: float = field(default_factory=time.monotonic)


def regenerate(
    params: RegenerateParams, output: Path, progress: Progress | None = None
) -> RegenerateResult:
    """Write the chats of `params.data` with the verifier's own answers into the directory `output`.

    Greedy answers are the same in every attempt; sampled ones in-process depend on which chats
    share a batch, so those after a resumption may differ. Raises `Conflict` where `output` or kept
    answers were made otherwise, `DataError` where no chat is left,
    `Unavailable` where more than `max_failed` of them fail, `Stopped` on
    request: the same call goes on from there.
    """
    progress = progress or Quiet()
    source = open_source(params.data, params.split, progress=progress)
    if (output / RECORD).exists():
        return _finished(params, source, output, progress)
    place = output.with_name(f"{output.name}.answers")
    with (
        answering(params, progress) as who,
        _answers_at(place, {**_settings(params), "answered_by": who.identity}) as (answers, known),
    ):
        if known:
            progress.note(f"{len(known)} answered chats of an earlier attempt are kept")
        work = _Work(params, source, progress, answers, known)
        _ask(work, who)
        result = _write(work, who, output)
    shutil.rmtree(place, ignore_errors=True)
    _tell(result, progress)
    return result


def _finished(
    params: RegenerateParams, source: Source, output: Path, progress: Progress
) -> RegenerateResult:
    """What an earlier attempt ended with, if it was of the same data by the same model."""
    values = json.loads((output / RECORD).read_text(encoding="utf-8"))
    wanted = _made_from(params, source, identity(params, progress))
    different = [name for name, value in wanted.items() if values.get(name) != value]
    if different:
        raise Conflict(
            f"the output holds answers that were made from other {', '.join(different)}",
            where=str(output),
            hint="choose another output, or remove this one",
        )
    progress.note(f"{output} was regenerated already")
    return RegenerateResult(**{**values["result"], "output": str(output / CHATS)})


@contextmanager
def _answers_at(place: Path, made_by: dict[str, Any]) -> Iterator[tuple[BinaryIO, dict[str, int]]]:
    """The append-only file of answers, and the ids in it; held by one process at a time."""
    make_place(place, place, exist_ok=True)
    with (
        room_for(place, hint="what was answered is kept"),
        (place / "answers.jsonl").open("a+b") as file,
    ):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict("another process is writing these answers", where=str(place)) from None
        known = _known(file)
        settings = place / "settings.json"
        if known and json.loads(settings.read_text(encoding="utf-8")) != made_by:
            raise Conflict(
                "answers of an earlier attempt with other settings or by another model are there",
                where=str(place),
                hint="choose another output, or remove this directory",
            )
        if not known:
            settings.write_text(json.dumps(made_by) + "\n", encoding="utf-8")
        try:
            yield file, known
        finally:
            if not file.seek(0, 2):  # nothing was answered: nothing is left behind
                shutil.rmtree(place, ignore_errors=True)


def _known(file: BinaryIO) -> dict[str, int]:
    """Where each id's line begins; a line that was torn by a kill is cut off."""
    file.seek(0)
    known: dict[str, int] = {}
    place = 0
    for line in file:
        if not line.endswith(b"\n"):
            file.truncate(place)
            break
        known[str(json.loads(line)["id"])] = place
        place += len(line)
    file.seek(0, 2)
    return known


def _settings(params: RegenerateParams) -> dict[str, Any]:
    return params.model_dump(mode="json", exclude=_ANY_ORDER)


def _made_from(params: RegenerateParams, source: Source, answered_by: str) -> dict[str, Any]:
    """What a finished output is known by. The bytes of data and model count, not their paths."""
    return {
        "settings": _settings(params),
        "data": source.digest,
        "answered_by": answered_by,
    }


def _ask(work: _Work, who: Answering) -> None:
    try:
        with closing(who.outcomes(_tasks(work))) as outcomes:
            for outcome in outcomes:
                _take(work, outcome)
    except Stopped as stopped:
        raise Stopped(
            f"stopped with {len(work.known)} chats answered; the same command goes on from there"
        ) from stopped
    _judge(work, work.asked)


def _tasks(work: _Work) -> Iterator[Task]:
    """The chats that have no answer yet."""
    for task in _chats(work):
        work.wanted.append(task.id)
        if task.id not in work.known:
            yield task
        if work.params.samples is not None and len(work.wanted) >= work.params.samples:
            return


def _chats(work: _Work) -> Iterator[Task]:
    for row in take([work.source], work.params.seed):
        found = recognise(row.values, row.where)
        reason = _unanswerable(found)
        if reason or isinstance(found, Text):
            work.skipped[reason or ""] += 1
        else:
            yield Task(_id(row.number, found), row.number, found, row.done)


def _unanswerable(found: Chat | Text) -> str | None:
    """Why a row is skipped, or None."""
    if isinstance(found, Text):
        return "plain text: nothing is asked"
    if not any(m.role == "user" and m.content.strip() for m in found.messages):
        return "no user turn"
    if any(m.role == "tool" or m.further.get("tool_calls") for m in found.messages):
        return "turns of tools, which can't be called again"
    return None


def _id(number: int, chat: Chat) -> str:
    text = json.dumps([chat.as_dicts(), list(chat.tools)], sort_keys=True, default=str)
    return f"{number}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _take(work: _Work, outcome: Outcome) -> None:
    """Keep an answered chat; count one that failed."""
    task = outcome.task
    work.asked += 1
    if outcome.messages is None:
        work.reasons[outcome.reason] += 1
        _judge(work, max(work.asked, _TOO_FEW))
    else:
        line = {
            "id": task.id,
            "messages": outcome.messages,
            **({"tools": list(task.chat.tools)} if task.chat.tools else {}),
            "tokens": outcome.tokens,
            "prompt_tokens": outcome.prompt_tokens,
            "cut": outcome.cut,
        }
        work.known[task.id] = work.answers.tell()
        work.answers.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        work.answers.flush()
    work.done = max(work.done, task.done)
    spent = time.monotonic() - work.began
    work.progress.update(
        work.done,
        f"{len(work.known)} chats answered, {work.reasons.total()} failed",
        spent / work.done - spent if work.done else None,
    )


def _judge(work: _Work, asked: int) -> None:
    failed = work.reasons.total()
    if failed > work.params.max_failed * asked:
        reasons = "; ".join(f"{n} × {reason}" for reason, n in work.reasons.most_common(3))
        raise Unavailable(
            f"{failed} of {work.asked} chats failed, at most {work.params.max_failed:.0%} may: "
            f"{reasons}",
            where=work.params.endpoint or work.params.verifier,
            hint="what was answered is kept: mend it and give the same command again",
        )


def _write(work: _Work, who: Answering, output: Path) -> RegenerateResult:
    """All answered chats, in the order of the data."""
    found = [work.known[id_] for id_ in work.wanted if id_ in work.known]
    if not found:
        reasons = ", ".join(f"{n} × {reason}" for reason, n in work.skipped.items())
        raise DataError(
            f"no chat could be answered: {reasons or 'the data is empty'}", where=work.params.data
        )
    totals: Counter[str] = Counter()
    with complete_or_absent(output) as partial:
        with (partial / CHATS).open("w", encoding="utf-8") as lines:
            for place in found:
                work.answers.seek(place)
                values = json.loads(work.answers.readline())
                totals.update({n: values.pop(n) for n in ("tokens", "prompt_tokens", "cut")})
                lines.write(json.dumps(values, ensure_ascii=False) + "\n")
        result = RegenerateResult(
            output=str(output / CHATS),
            samples=len(found),
            failed=work.reasons.total(),
            cut=totals["cut"],
            tokens=totals["tokens"],
            prompt_tokens=totals["prompt_tokens"],
            skipped=dict(work.skipped),
            reasons=dict(work.reasons),
            model=who.model,
        )
        made_from = _made_from(work.params, work.source, who.identity)
        record = {**made_from, "result": result.model_dump()}
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return result


def _tell(result: RegenerateResult, progress: Progress) -> None:
    progress.note(
        f"{result.samples} chats answered by {result.model}, {result.tokens} tokens written; "
        f"{result.cut} answers ended at the longest length, {result.failed} chats failed"
    )
    for reason, count in (*result.skipped.items(), *result.reasons.items()):
        progress.note(f"{count} left out: {reason}")
    progress.update(1.0, "done")
