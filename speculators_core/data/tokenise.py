"""Rows to samples of token ids and masks, a part of many rows at a time, in several processes.

A part is a file of its own, complete or absent, so preparation that was interrupted goes on behind
the last complete one, and parts can be made in any order.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from speculators_core.data.chats import Chat, teaches_nothing
from speculators_core.data.layouts import Text, recognise
from speculators_core.data.masks import Masked, mask_turns
from speculators_core.data.sources import Taken
from speculators_core.data.template import ChatTemplate, Unmaskable, load_template
from speculators_core.errors import DataError, SpeclabError, revive
from speculators_core.models.verifier_config import VerifierFacts

_START = "spawn"  # a fork would take locks along that other threads hold
_NO_UNICODE = "text that is no Unicode"


@dataclass(frozen=True)
class Rules:
    """What turns a row into samples; small enough to be handed to another process."""

    facts: VerifierFacts
    seq_length: int
    enable_thinking: bool | None


@dataclass
class Part:
    """Samples of some rows, and what was left out of them."""

    samples: list[tuple[Masked, Taken, int]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    doubts: Counter[str] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)  # read of each source
    chats: int = 0


class Tokeniser:
    """Makes parts. One a process: loading the tokenizer is the slow part of a small one."""

    def __init__(self, rules: Rules, template: ChatTemplate | None = None) -> None:
        self.rules = rules
        self.template = template or load_template(rules.facts, rules.enable_thinking)

    def write(self, rows: Iterable[Taken], file: Path) -> None:
        """The part of these rows at `file`. Raises `DataError` naming a row that can't be right."""
        part = Part()
        for row in rows:
            part.rows[row.source] += 1
            if row.copies:
                self._add(part, row)
        _save(part, file)

    def _add(self, part: Part, row: Taken) -> None:
        found = recognise(row.values, row.where)
        try:
            group = _group(found)
            if isinstance(found, Text):
                samples = self._text(found.text)
            elif reason := teaches_nothing(found):
                part.skipped[reason] += row.copies
                return
            else:
                part.chats += 1
                samples = mask_turns(self.template, found.as_dicts(), found.tools)
        except Unmaskable as error:
            part.skipped[error.message] += row.copies
            return
        except UnicodeEncodeError:
            part.skipped[_NO_UNICODE] += row.copies
            return
        for sample in samples:
            self._check(sample, row)
            cut = sample.ids[: self.rules.seq_length], sample.mask[: self.rules.seq_length]
            if not any(cut[1]):
                part.skipped[f"no answer within {self.rules.seq_length} tokens"] += row.copies
                continue
            part.samples += [(Masked(*cut), row, group)] * row.copies
            if sample.doubt:
                part.doubts[sample.doubt] += row.copies

    def _text(self, text: str) -> list[Masked]:
        """Plain text in stretches of `seq_length`; all but the first token of each is trained."""
        ids = list(self.template.tokenizer(text)["input_ids"])
        length = self.rules.seq_length
        pieces = [ids[i : i + length] for i in range(0, len(ids), length)]
        made = [Masked(p, [False] + [True] * (len(p) - 1)) for p in pieces if len(p) > 1]
        if not made:
            raise Unmaskable("text without two tokens")
        return made

    def _check(self, sample: Masked, row: Taken) -> None:
        top = max(sample.ids)
        if top >= self.rules.facts.vocab_size:
            raise DataError(
                f"the tokenizer makes token {top}, the verifier's vocabulary ends at "
                f"{self.rules.facts.vocab_size - 1}",
                where=row.where,
                hint="is this the verifier's own tokenizer?",
            )


class Making(Protocol):
    """What writes parts: this process, or several."""

    def submit(self, rows: list[Taken], file: Path) -> None: ...

    def finish(self) -> None: ...


class Here:
    """Parts written by this process."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser

    def submit(self, rows: list[Taken], file: Path) -> None:
        self._tokeniser.write(rows, file)

    def finish(self) -> None:
        pass


class Processes:
    """Parts written by `count` processes; as many are under way at once, so memory is bounded.

    A process that loses its parent reads the end of its pipe and goes.
    """

    def __init__(self, rules: Rules, count: int) -> None:
        context = multiprocessing.get_context(_START)
        self._workers: dict[Connection, BaseProcess] = {}
        self._idle: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, rules), daemon=True
            )
            process.start()
            theirs.close()
            self._workers[ours] = process
            self._idle.append(ours)

    def submit(self, rows: list[Taken], file: Path) -> None:
        if not self._idle:
            self._collect()
        self._idle.pop().send((rows, file))

    def finish(self) -> None:
        while len(self._idle) < len(self._workers):
            self._collect()

    def close(self) -> None:
        for connection, process in self._workers.items():
            connection.close()
            process.terminate()
            process.join()

    def _collect(self) -> None:
        """Wait for a part; raises what its process raised."""
        for connection in wait([c for c in self._workers if c not in self._idle]):
            assert isinstance(connection, Connection)
            try:
                error = connection.recv()
            except EOFError:
                raise DataError(
                    "a process that tokenises has died", hint="is there enough memory?"
                ) from None
            if error:
                raise error if isinstance(error, OSError) else revive(error)
            self._idle.append(connection)


def _serve(connection: Connection, rules: Rules) -> None:
    """The loop of a process: parts in, nothing or an error out, whatever the error."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokeniser = Tokeniser(rules)
    while True:
        try:
            rows, file = connection.recv()
        except (EOFError, OSError):
            return
        try:
            tokeniser.write(rows, file)
            connection.send(None)
        except SpeclabError as error:
            connection.send(error.as_dict())
        except OSError as error:  # what a full disk is called is said in one place, by the parent
            connection.send(OSError(error.errno, error.strerror))
        except Exception as error:
            why = f"a chat can't be tokenised: {type(error).__name__}: {error}"
            connection.send(SpeclabError(why).as_dict())


def read_facts_of(file: Path) -> dict[str, Any]:
    """What a part says of itself: `skipped`, `doubts`, `rows` of each source, `chats`."""
    with safe_open(file, framework="numpy") as content:
        facts: dict[str, Any] = json.loads(content.metadata()["facts"])
        return facts


def read_column(file: Path, name: str) -> Any:
    """One column of a part."""
    with safe_open(file, framework="numpy") as content:
        return content.get_tensor(name)


def _save(part: Part, file: Path) -> None:
    samples = part.samples
    columns = {
        "ids": _flat((s.ids for s, _, _ in samples), np.int32),
        "mask": _flat((s.mask for s, _, _ in samples), np.bool_),
        "lengths": np.array([len(s.ids) for s, _, _ in samples], dtype=np.int64),
        "source": np.array([row.source for _, row, _ in samples], dtype=np.int32),
        "row": np.array([row.number for _, row, _ in samples], dtype=np.int64),
        "group": np.array([group for _, _, group in samples], dtype=np.int64),
    }
    facts = {
        "skipped": part.skipped,
        "doubts": part.doubts,
        "rows": {str(source): count for source, count in part.rows.items()},
        "chats": part.chats,
    }
    partial = file.with_name(f"{file.name}.{os.getpid()}.new")
    save_file(columns, partial, metadata={"facts": json.dumps(facts)})
    partial.replace(file)


def _flat(lists: Iterable[Sequence[Any]], dtype: Any) -> Any:
    return np.fromiter((value for values in lists for value in values), dtype=dtype)


def _group(found: Chat | Text) -> int:
    """Equal for equal contents, so that copies and duplicates stay on one side of the split.
    Raises `UnicodeEncodeError` for half a surrogate pair, which JSON can write.
    """
    content = found.text if isinstance(found, Text) else [found.as_dicts(), list(found.tools)]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
