"""Chats or text to a prepared data set: token ids, loss masks, the vocabulary map, a split.

Files and facts are described in `data.prepared`. The key is a hash of the data's bytes, the chat
template, the tokenizer, the vocabulary's size and every parameter, so a directory is reused only
for exactly what it was made from. Rows are tokenised a part at a time into a hidden directory
beside the output; an interrupted preparation goes on behind the last complete part.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from speculators_core.data import occupancy
from speculators_core.data.assemble import Plan, assemble
from speculators_core.data.capacity import of_preparing
from speculators_core.data.prepared import CODE_VERSION, TOKENS, PreparedMeta, meta_at, read_meta
from speculators_core.data.sources import Source, Taken, open_sources, take
from speculators_core.data.template import ChatTemplate, load_template
from speculators_core.data.tokenise import Here, Making, Processes, Rules, Tokeniser
from speculators_core.data.vocab_map import check_size
from speculators_core.errors import Conflict, DataError, Stopped
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.output import make_place, room_for
from speculators_core.params import PrepareParams
from speculators_core.progress import Progress, Quiet

ROWS_A_PART = 1024
_LOOK_S = 0.2  # between looks at whether another process has ended
_WORTH_PROCESSES = 32 << 20  # bytes of data: starting a process takes as long as 10 MB of chats


class PrepareResult(BaseModel):
    """What `prepare` made."""

    output: str
    samples: int
    tokens: int
    masked_tokens: int
    skipped: dict[str, int]
    doubts: dict[str, int]
    coverage: float
    draft_vocab_size: int


@dataclass(frozen=True)
class Prepared:
    """A prepared data set in memory. Document d is rows `starts[d] : starts[d] + lengths[d]`."""

    meta: PreparedMeta
    ids: Tensor  # [N] int32
    mask: Tensor  # [N] bool
    lengths: Tensor  # [D] int64
    validation: Tensor  # [D] bool
    kept: Tensor  # [V] bool

    @cached_property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def document(self, index: int) -> tuple[Tensor, Tensor]:
        """(ids [S] int64, mask [S] bool) of one chat."""
        start = int(self.starts[index])
        rows = slice(start, start + int(self.lengths[index]))
        return self.ids[rows].long(), self.mask[rows]


def prepare(params: PrepareParams, output: Path, progress: Progress | None = None) -> PrepareResult:
    """Write a prepared data set at `output`, or reuse the one there if its key is the same.

    Raises `DataError` where no chat can be masked or a row has no known layout, `Conflict` where
    `output` is something else, `Unavailable` where the disk has no room, `Stopped` on request: the
    same call goes on from there.
    """
    progress = progress or Quiet()
    plan = _plan(params, progress)
    if known := _already(plan, output, progress):
        return _result(known, output)
    of_preparing([file for source in plan.sources for file in source.files], output).require()
    with _working_directory(output, plan.key, progress) as work:
        # whoever was waited for has made it, where it ended well
        if known := _already(plan, output, progress):
            return _result(known, output)
        meta = assemble(plan, _tokenise(plan, work, progress), output)
    result = _result(meta, output)
    _tell(result, progress)
    return result


def prepared_key(params: PrepareParams, progress: Progress | None = None) -> str:
    """What `prepare` would make, as a hash: equal for equal data, tokenizer, template and
    parameters, whatever the paths are.
    """
    return _plan(params, progress or Quiet()).key


def load_prepared(directory: str | Path) -> Prepared:
    """Read a prepared data set. Raises `DataError` where it is none, or is damaged."""
    directory = Path(directory)
    meta = read_meta(directory)
    file = directory / TOKENS
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"the prepared tokens can't be read: {error}", where=str(file), hint="prepare again"
        ) from error
    prepared = Prepared(
        meta, *(tensors[n] for n in ("ids", "mask", "lengths", "validation", "kept"))
    )
    if int(prepared.lengths.sum()) != len(prepared.ids) or len(prepared.ids) != len(prepared.mask):
        raise DataError(
            f"the documents add up to {int(prepared.lengths.sum())} tokens, "
            f"the file holds {len(prepared.ids)}",
            where=str(file),
            hint="prepare again",
        )
    return prepared


def _already(plan: Plan, output: Path, progress: Progress) -> PreparedMeta | None:
    """What lies at `output`, made from the same. Raises `Conflict` where something else does."""
    known = meta_at(output)
    if known and known.key != plan.key:
        raise Conflict(
            "the place is taken by data that were prepared from something else: other chats, "
            "another template, tokenizer or parameter",
            where=str(output),
            hint="choose another directory, or remove this one",
        )
    if known:
        progress.note(f"{output} was made from the same data already")
    return known


def _plan(params: PrepareParams, progress: Progress) -> Plan:
    facts = read_verifier(params.verifier)
    check_size(params.draft_vocab_size or facts.vocab_size, facts.vocab_size)
    template = load_template(facts, params.enable_thinking)
    sources = open_sources(params, progress)
    return Plan(params, facts, template, sources, _key(params, facts, template, sources))


def _key(
    params: PrepareParams, facts: VerifierFacts, template: ChatTemplate, sources: Sequence[Source]
) -> str:
    settings = params.model_dump(mode="json", exclude={"data", "verifier", "weights", "split"})
    made_from = [
        CODE_VERSION,
        settings,
        [[source.digest, source.weight] for source in sources],
        template.text,
        facts.tokenizer_fingerprint,
        sorted(template.special),
        sorted(template.stops),
        facts.vocab_size,
    ]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


@contextmanager
def _working_directory(output: Path, key: str, progress: Progress) -> Iterator[Path]:
    """Where parts lie until all are there; kept when the work is stopped or killed, else removed.

    What is left of preparations with another key goes; what nobody comes back to is a cache, which
    grows old. Another process at the same work is waited for.
    """
    work = output.parent / f".{output.name}.{key[:16]}.parts"
    for stale in output.parent.glob(f".{glob.escape(output.name)}.*.parts"):
        if stale != work and (free := _lock(stale, make=False)) is not None:
            shutil.rmtree(stale, ignore_errors=True)
            os.close(free)
    lock = _waited_for(work, output, progress)
    try:
        with (
            occupancy.occupy(work, {"output": output.name}),
            room_for(output, hint="nothing was left behind"),
        ):
            yield work
    except Stopped:
        raise
    except Exception:
        shutil.rmtree(work, ignore_errors=True)
        raise
    else:
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _waited_for(work: Path, output: Path, progress: Progress) -> int:
    """The working directory, made and locked as soon as no other process has it."""
    told = False
    while True:
        make_place(work, output, exist_ok=True)
        if (lock := _lock(work, make=True)) is not None:
            if _lies_at(lock, work / "lock"):
                return lock
            os.close(lock)  # whoever had it has removed the directory
            continue
        if not told:
            progress.note("another process is preparing the same data here: waiting for it")
            told = True
        if progress.stopping():
            raise Stopped("stopped while another process was preparing the same data")
        time.sleep(_LOOK_S)


def _lies_at(descriptor: int, file: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == file.stat().st_ino
    except FileNotFoundError:
        return False


def _lock(directory: Path, *, make: bool) -> int | None:
    """A descriptor that holds the directory's lock; None where another process has it."""
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _tokenise(plan: Plan, work: Path, progress: Progress) -> list[Path]:
    """The files of all parts; those that are there already are not made again."""
    rules = Rules(plan.facts, plan.params.seq_length, plan.params.enable_thinking)
    files: list[Path] = []
    with _making(plan, rules) as making:
        for number, rows in enumerate(_chunks(take(plan.sources, plan.params.seed))):
            if progress.stopping():
                making.finish()
                raise Stopped(
                    f"preparing was stopped after {number * ROWS_A_PART} rows; the same command "
                    "goes on from there"
                )
            progress.update(0.95 * rows[-1].done, f"{number * ROWS_A_PART + len(rows)} rows")
            files.append(work / f"{number:06d}.part")
            if not files[-1].exists():
                making.submit(rows, files[-1])
        making.finish()
    _check_unchanged(plan)
    return files


def _chunks(rows: Iterator[Taken]) -> Iterator[list[Taken]]:
    chunk: list[Taken] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_A_PART:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@contextmanager
def _making(plan: Plan, rules: Rules) -> Iterator[Making]:
    """Processes where there is enough to do, else this one."""
    cores = len(os.sched_getaffinity(0))
    if cores < 2 or sum(source.size for source in plan.sources) < _WORTH_PROCESSES:
        yield Here(Tokeniser(rules, plan.template))
        return
    several = Processes(rules, cores)
    try:
        yield several
    finally:
        several.close()


def _check_unchanged(plan: Plan) -> None:
    """The key speaks of the bytes that were hashed; what was read since must be those."""
    if changed := [source.name for source in plan.sources if source.changed]:
        raise DataError(
            "the data changed while they were read", where=", ".join(changed), hint="prepare again"
        )


def _result(meta: PreparedMeta, output: Path) -> PrepareResult:
    return PrepareResult(
        output=str(output),
        samples=meta.samples,
        tokens=meta.tokens,
        masked_tokens=meta.masked_tokens,
        skipped=meta.skipped,
        doubts=meta.doubts,
        coverage=meta.coverage,
        draft_vocab_size=meta.draft_vocab_size,
    )


def _tell(result: PrepareResult, progress: Progress) -> None:
    share = result.masked_tokens / result.tokens
    progress.note(
        f"{result.samples} samples, {result.tokens} tokens, {result.masked_tokens} of them the "
        f"assistant's ({share:.0%}); a draft vocabulary of {result.draft_vocab_size} covers "
        f"{result.coverage:.2%} of those"
    )
    for reason, count in result.skipped.items():
        progress.note(f"skipped {count}: {reason}")
    for doubt, count in result.doubts.items():
        progress.note(f"look at {count}: {doubt}")
    progress.update(1.0, "done")
