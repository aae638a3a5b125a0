"""The verifier's states of a prepared data set, cached on disk.

    DIR/{first}-{last}.safetensors   documents first..last of the data set, one after the other:
        aux    [T, n_aux*H]   states after the aux layers, ascending, concatenated
        final  [T, H]         state after the last layer, before the final norm
        best   [T] int32      the verifier's first choice for the next token, where that token is
                              trained on; -1 elsewhere
        ids    [T] int32      the tokens they belong to
        lengths [D] int64,  sound [D] bool (false: quarantined, its states were not finite)

Each file's header names layers, convention ("after k layers"), that `final` is not normed, the
verifier, the dtype and the data, and is checked at every opening: states of another verifier are
refused. Files are written beside their place and renamed, so a run that was stopped continues
where it was; a damaged file is made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from speculators_core.data.prepare import Prepared
from speculators_core.errors import DataError, PairingError, Stopped, Unavailable
from speculators_core.models.verifier import Verifier
from speculators_core.progress import Progress, Quiet

FORMAT = "speclab hidden states 1"
DOCUMENTS_A_FILE = 64
TOKENS_A_FORWARD = 2048
QUARANTINE_LIMIT = 0.05


@dataclass(frozen=True)
class States:
    """The verifier's states of one document: aux [S, n_aux*H], final [S, H] (pre-norm), and its
    first choice for the next token `best` [S], -1 where none is trained on."""

    aux: Tensor
    final: Tensor
    best: Tensor


@dataclass
class StateCache:
    """Reads states of single documents from the files of a directory; memory-mapped."""

    directory: Path
    prepared: Prepared
    header: dict[str, str]
    quarantined: set[int] = field(default_factory=set)
    _open: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)

    def states(self, document: int) -> States:
        first = document - document % DOCUMENTS_A_FILE
        if first not in self._open:
            self._open[first] = self._file(first)
        file, starts = self._open[first]
        start = int(starts[document - first])
        rows = slice(start, start + int(self.prepared.lengths[document]))
        return States(*(file.get_slice(name)[rows] for name in ("aux", "final", "best")))

    def _file(self, first: int) -> tuple[Any, Tensor]:
        path = _path(self.directory, first, len(self.prepared.lengths))
        file = safe_open(path, framework="pt")
        lengths: Tensor = file.get_tensor("lengths")  # type: ignore[no-untyped-call]
        return file, lengths.cumsum(0) - lengths


def cache_states(
    prepared: Prepared,
    verifier: Verifier,
    layers: Sequence[int],
    directory: Path,
    progress: Progress | None = None,
) -> StateCache:
    """Compute what the cache at `directory` lacks, and open it.

    Raises `PairingError` where it holds another verifier's states, `Unavailable` where the disk
    has no room, `DataError` where more than 5 % of the documents give non-finite states.
    """
    progress = progress or Quiet()
    header = expected_header(prepared, verifier, layers)
    directory.mkdir(parents=True, exist_ok=True)
    count = len(prepared.lengths)
    missing = [
        first
        for first in range(0, count, DOCUMENTS_A_FILE)
        if not _usable(_path(directory, first, count), first, prepared, header, progress)
    ]
    _check_room(prepared, verifier, len(layers), missing, directory, progress)
    clock = _Clock(prepared, missing)
    for first in missing:
        _make(first, prepared, verifier, layers, directory, header, clock, progress)
    cache = StateCache(directory, prepared, header)
    cache.quarantined = _quarantined(directory, count)
    _judge(cache.quarantined, count, directory, progress)
    return cache


def compute_states(
    verifier: Verifier, layers: Sequence[int], documents: Sequence[tuple[Tensor, Tensor]]
) -> list[States]:
    """States of whole documents (ids [S], mask [S]), in their order; forward passes of equal-ish
    lengths, padded behind, where causal attention never looks."""
    wanted = sorted(layers)
    lengths = [len(ids) for ids, _ in documents]
    order = sorted(range(len(documents)), key=lambda i: lengths[i])
    found: dict[int, States] = {}
    for group in _groups(order, lengths):
        ids = nn.utils.rnn.pad_sequence([documents[i][0] for i in group], batch_first=True)
        seen = verifier.states(ids.to(verifier.device), [*wanted, len(verifier.layers)])
        for row, i in enumerate(group):
            aux = torch.cat([seen[k][row, : lengths[i]] for k in wanted], dim=-1)
            final = seen[len(verifier.layers)][row, : lengths[i]].clone()
            found[i] = States(aux, final, _first_choices(verifier, final, documents[i][1]))
    return [found[i] for i in range(len(documents))]


@torch.no_grad()
def _first_choices(verifier: Verifier, final: Tensor, mask: Tensor) -> Tensor:
    """[S] int32: what the verifier would say next, at tokens of a turn that is not over there."""
    asked = (mask[:-1] & mask[1:]).nonzero().flatten().to(final.device)
    best = torch.full((len(mask),), -1, dtype=torch.int32, device=final.device)
    logits = verifier.final_norm(final[asked]) @ verifier.lm_head.T
    best[asked] = logits.argmax(-1).to(torch.int32)
    return best


def expected_header(
    prepared: Prepared, verifier: Verifier, layers: Sequence[int]
) -> dict[str, str]:
    """The header that files of this data, verifier and these layers carry."""
    return {
        "format": FORMAT,
        "layers": json.dumps(sorted(layers)),
        "convention": "after",
        "final_normed": "false",
        "verifier": verifier.fingerprint,
        "dtype": str(verifier.model.dtype).removeprefix("torch."),
        "data": prepared.meta.key,
    }


def cache_key(header: dict[str, str]) -> str:
    """A short name for a cache directory: equal exactly where the header is."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def bytes_needed(tokens: int, num_aux: int, hidden_size: int, bytes_per_element: int) -> int:
    """tokens x (n_aux + 1) x H x bytes per element."""
    return tokens * (num_aux + 1) * hidden_size * bytes_per_element


def _groups(order: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Neighbours of the length order whose padded size stays within the token budget."""
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * lengths[i] <= TOKENS_A_FORWARD:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _path(directory: Path, first: int, count: int) -> Path:
    return directory / f"{first:07d}-{min(first + DOCUMENTS_A_FILE, count) - 1:07d}.safetensors"


def _usable(
    path: Path, first: int, prepared: Prepared, header: dict[str, str], progress: Progress
) -> bool:
    """Whether a file is whole and of this data; a damaged one is reported and made again."""
    if not path.exists():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
            ids, lengths = file.get_tensor("ids"), file.get_tensor("lengths")
            rows = [file.get_slice(name).get_shape()[0] for name in ("aux", "final", "best")]
    except (SafetensorError, OSError) as error:
        progress.note(f"{path.name} is damaged and is made again: {error}")
        return False
    _check_header(found, header, path)
    expected = prepared.lengths[first : first + DOCUMENTS_A_FILE]
    start = int(prepared.starts[first])
    tokens = prepared.ids[start : start + int(expected.sum())]
    if (
        not torch.equal(lengths, expected)
        or not torch.equal(ids, tokens)
        or set(rows) != {len(ids)}
    ):
        progress.note(f"{path.name} has {rows[0]} states for {len(tokens)} tokens: made again")
        return False
    return True


def _check_header(found: dict[str, str], expected: dict[str, str], path: Path) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise PairingError(
                f"these states were made with another {name}: "
                f"found {found.get(name)!r}, expected {value!r}",
                where=str(path),
                hint="choose another cache directory, or remove this one",
            )


def _check_room(
    prepared: Prepared,
    verifier: Verifier,
    num_aux: int,
    missing: list[int],
    directory: Path,
    progress: Progress,
) -> None:
    tokens = sum(int(prepared.lengths[f : f + DOCUMENTS_A_FILE].sum()) for f in missing)
    width = verifier.facts.hidden_size
    needed = bytes_needed(tokens, num_aux, width, verifier.model.dtype.itemsize)
    free = shutil.disk_usage(directory).free
    if needed:
        progress.note(
            f"hidden states: {needed / 1e6:.0f} MB ({tokens} tokens x {num_aux + 1} states x "
            f"{width} x {verifier.model.dtype.itemsize} bytes), {free / 1e9:.1f} GB free"
        )
    if needed > free:
        raise Unavailable(
            f"the hidden states need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            where=str(directory),
            hint="train on fewer tokens, free some space, or set hidden_states to online",
        )


class _Clock:
    """Fraction, speed and seconds left over the files to make."""

    def __init__(self, prepared: Prepared, missing: list[int]) -> None:
        self.tokens_of = {f: int(prepared.lengths[f : f + DOCUMENTS_A_FILE].sum()) for f in missing}
        self.total = sum(self.tokens_of.values())
        self.done = 0
        self.began = time.monotonic()

    def tell(self, first: int, progress: Progress) -> None:
        self.done += self.tokens_of[first]
        speed = self.done / max(time.monotonic() - self.began, 1e-9)
        progress.update(
            self.done / self.total,
            f"hidden states: {self.done} of {self.total} tokens, {speed:.0f} tokens/s",
            (self.total - self.done) / speed,
        )


def _make(
    first: int,
    prepared: Prepared,
    verifier: Verifier,
    layers: Sequence[int],
    directory: Path,
    header: dict[str, str],
    clock: _Clock,
    progress: Progress,
) -> None:
    if progress.stopping():
        raise Stopped("stopped while hidden states were made; those made so far are kept")
    count = len(prepared.lengths)
    documents = [prepared.document(i) for i in range(first, min(first + DOCUMENTS_A_FILE, count))]
    states = compute_states(verifier, layers, documents)
    ids = [document for document, _ in documents]
    sound = [
        _sound(s, d, i, progress) for i, (s, d) in enumerate(zip(states, ids, strict=True), first)
    ]
    tensors = {
        "aux": torch.cat([s.aux for s in states]).cpu(),
        "final": torch.cat([s.final for s in states]).cpu(),
        "best": torch.cat([s.best for s in states]).cpu(),
        "ids": torch.cat(ids).to(torch.int32),
        "lengths": torch.tensor([len(d) for d in ids]),
        "sound": torch.tensor(sound),
    }
    path = _path(directory, first, count)
    partial = path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")  # two runs may share the cache
    try:
        save_file(tensors, partial, metadata=header)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    clock.tell(first, progress)


def _sound(states: States, document: Tensor, index: int, progress: Progress) -> bool:
    if len(states.final) != len(document) or len(states.aux) != len(document):
        raise DataError(
            f"document {index} has {len(document)} tokens, "
            f"the verifier gave {len(states.final)} states"
        )
    finite = bool(torch.isfinite(states.aux).all() and torch.isfinite(states.final).all())
    if not finite:
        progress.note(f"document {index} is quarantined: its states hold NaN or infinity")
    return finite


def _quarantined(directory: Path, count: int) -> set[int]:
    result: set[int] = set()
    for first in range(0, count, DOCUMENTS_A_FILE):
        with safe_open(_path(directory, first, count), framework="pt") as file:
            unsound = (~file.get_tensor("sound")).nonzero().flatten()
        result |= {first + int(i) for i in unsound}
    return result


def _judge(quarantined: set[int], count: int, directory: Path, progress: Progress) -> None:
    if len(quarantined) > QUARANTINE_LIMIT * count:
        raise DataError(
            f"{len(quarantined)} of {count} documents give NaN or infinite states "
            f"(at most {QUARANTINE_LIMIT:.0%} may)",
            where=str(directory),
            hint="the verifier may overflow in this dtype: try float32 or bfloat16",
        )
    if quarantined:
        progress.note(f"{len(quarantined)} of {count} documents are quarantined and not used")
