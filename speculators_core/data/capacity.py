"""What preparing and training will take of the disk, and for how long, before either starts.

Hidden states are by far the largest: tokens x (aux layers + 1) x H x bytes per element. A time is
named only where a speed is known, and says where that comes from. Light: no torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from speculators_core.config import USUAL_AUX
from speculators_core.errors import Unavailable
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import TrainParams

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OF_STATES = "train on fewer tokens, free some space (speclab caches), or keep no states (online)"
TEXT_BYTES_A_TOKEN = 3  # English has about four: a little too much is promised, not too little
_PREPARED_BYTES_A_TOKEN = 5  # an int32 id and a mask byte
_KEPT_CHECKPOINTS = 7  # weights and two moments of two checkpoints, and the best weights


class Speed(BaseModel):
    """Tokens a second, and where the number was measured ("run abc", "a probe of 20 s")."""

    model_config = ConfigDict(frozen=True)

    tokens_per_second: float
    source: str


class Need(BaseModel):
    """One thing that will lie on the disk: bytes, and the product they come from."""

    model_config = ConfigDict(frozen=True)

    what: str
    size: int
    arithmetic: str


class Duration(BaseModel):
    """One stretch of work, in seconds at a known speed."""

    model_config = ConfigDict(frozen=True)

    what: str
    seconds: float
    source: str


class Estimate(BaseModel):
    """What some work needs at a place, against what is free there."""

    model_config = ConfigDict(frozen=True)

    where: str
    free: int
    needs: tuple[Need, ...]
    durations: tuple[Duration, ...] = ()
    remedy: str = "use fewer tokens, or free some space: speclab caches --clean"

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(need.size for need in self.needs)

    @property
    def seconds(self) -> float | None:
        """In all; None where no speed is known."""
        return sum(one.seconds for one in self.durations) if self.durations else None

    @property
    def fits(self) -> bool:
        return self.size <= self.free

    def lines(self) -> list[str]:
        """For a person: each need with its arithmetic, the sum against what is free, the time."""
        total = f"in all {in_words(self.size)}; {in_words(self.free)} are free"
        return [
            *(f"{need.what}: {in_words(need.size)} ({need.arithmetic})" for need in self.needs),
            total if self.fits else f"{total}: too little",
            *(f"{d.what}: about {_time(d.seconds)} ({d.source})" for d in self.durations),
        ]

    def require(self) -> None:
        """Raise `Unavailable` with the numbers where it does not fit."""
        if not self.fits:
            largest = max(self.needs, key=lambda need: need.size)
            raise Unavailable(
                f"the {largest.what} need {in_words(largest.size)} ({largest.arithmetic}), "
                f"{in_words(self.free)} are free",
                where=self.where,
                hint=self.remedy,
            )


def states_bytes(tokens: int, n_aux: int, hidden_size: int, itemsize: int) -> int:
    """tokens x (n_aux + 1) x H x bytes per element."""
    return tokens * (n_aux + 1) * hidden_size * itemsize


def states(tokens: int, n_aux: int, hidden_size: int, itemsize: int) -> Need:
    """The cached hidden states of so many tokens."""
    return Need(
        what="hidden states",
        size=states_bytes(tokens, n_aux, hidden_size, itemsize),
        arithmetic=f"{tokens} tokens x {n_aux + 1} states x {hidden_size} x {itemsize} bytes",
    )


def of_training(
    params: TrainParams,
    tokens: int,
    verifier: VerifierFacts,
    draft_vocab_size: int,
    place: str | Path,
    *,
    computed_in: str = "float32",
    states_speed: Speed | None = None,
    training_speed: Speed | None = None,
) -> Estimate:
    """What training on a prepared set of `tokens` leaves at `place` and how long it takes.

    `computed_in` is what dtype `auto` means on the machine that trains: float32 on a CPU,
    bfloat16 on a GPU. Each speed, where it is known, gives the time of its part.
    """
    n_aux = len(params.aux_layers or ()) or USUAL_AUX
    durations = []
    needs = []
    if params.hidden_states != "online":
        itemsize = ITEM_BYTES[states_dtype(params, computed_in)]
        needs.append(states(tokens, n_aux, verifier.hidden_size, itemsize))
        if states_speed:
            durations.append(_duration("computing hidden states", tokens, states_speed))
    needs.append(_checkpoints(params, verifier, draft_vocab_size, n_aux))
    if training_speed:
        durations.append(_duration("training", tokens * params.epochs, training_speed))
    return Estimate(
        where=str(place),
        free=free_bytes(place),
        needs=tuple(needs),
        durations=tuple(durations),
        remedy=OF_STATES,
    )


def of_preparing(
    files: Sequence[str | Path], place: str | Path, speed: Speed | None = None
) -> Estimate:
    """What preparing files of chats leaves at `place`: their tokens are guessed from their bytes.

    Files that are not there yet (a hub id, a run's output) count nothing.
    """
    found = [Path(file) for file in files if Path(file).is_file()]
    text = sum(file.stat().st_size for file in found)
    tokens = math.ceil(text / TEXT_BYTES_A_TOKEN)
    need = Need(
        what="prepared tokens",
        size=tokens * _PREPARED_BYTES_A_TOKEN,
        arithmetic=f"about {tokens} tokens in {in_words(text)} of text "
        f"x {_PREPARED_BYTES_A_TOKEN} bytes",
    )
    durations = (_duration("preparing", tokens, speed),) if speed else ()
    return Estimate(where=str(place), free=free_bytes(place), needs=(need,), durations=durations)


def states_dtype(params: TrainParams, computed_in: str) -> str:
    """The precision that states are kept in; by itself, the one they are computed in."""
    if params.states_dtype != "auto":
        return params.states_dtype
    return computed_in if params.dtype == "auto" else params.dtype


def free_bytes(place: str | Path) -> int:
    """Free on the disk that `place` lies on, or would."""
    there = Path(place).absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def in_words(size: float) -> str:
    """Bytes as people read them, in powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _checkpoints(
    params: TrainParams, verifier: VerifierFacts, draft_vocab_size: int, n_aux: int
) -> Need:
    width, inner = verifier.hidden_size, verifier.intermediate_size
    queries = verifier.num_attention_heads * verifier.head_dim
    keys = verifier.num_key_value_heads * verifier.head_dim
    layer = 2 * width * (queries + 2 * keys) + width * queries + 3 * width * inner
    layers = (params.num_layers or 1) * layer  # empty: those of the draft it starts from
    table = verifier.vocab_size * width if params.embedding == "trained" else 0
    count = n_aux * width * width + layers + draft_vocab_size * width + table
    return Need(
        what="checkpoints",
        size=count * 4 * _KEPT_CHECKPOINTS,
        arithmetic=f"{count / 1e6:.1f} M trained numbers x 4 bytes x {_KEPT_CHECKPOINTS}, "
        "removed at the end",
    )


def _duration(what: str, tokens: int, speed: Speed) -> Duration:
    said = f"{tokens} tokens at {speed.tokens_per_second:.0f} tokens/s, {speed.source}"
    return Duration(what=what, seconds=tokens / speed.tokens_per_second, source=said)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
