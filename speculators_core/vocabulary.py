"""The draft vocabulary map, whose two sides say the same. Light: no torch.

`d2t` int64 [dv] holds offsets: draft token i is the verifier's token i + d2t[i]. `t2d` bool [V]
is true for the tokens that the draft can propose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculators_core.errors import CheckpointError

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def t2d_of(d2t: Integers, vocab_size: int, *, where: str) -> Flags:
    """The tokens that `d2t` names. Raises `CheckpointError` where one is outside 0..vocab_size."""
    ids = _ids(d2t, vocab_size, where)
    kept = np.zeros(vocab_size, np.bool_)
    kept[ids] = True
    return kept


def d2t_of(t2d: Flags, draft_vocab_size: int, *, where: str) -> Integers:
    """The offsets of the tokens that `t2d` keeps, ascending. Raises `CheckpointError` where they
    are not `draft_vocab_size`.
    """
    ids = np.flatnonzero(t2d)
    if len(ids) != draft_vocab_size:
        raise CheckpointError(
            f"t2d keeps {len(ids)} tokens, lm_head has {draft_vocab_size} rows",
            where=f"{where}: t2d",
            hint="the map belongs to another draft",
        )
    return (ids - np.arange(len(ids))).astype(np.int64)


def check_vocab_map(d2t: NDArray[Any], t2d: NDArray[Any], *, where: str) -> None:
    """Raise `CheckpointError` unless the offsets point at exactly the true rows of `t2d`."""
    if d2t.dtype != np.int64 or t2d.dtype != np.bool_:
        raise CheckpointError(
            f"d2t is {d2t.dtype} and t2d {t2d.dtype}, expected int64 and bool",
            where=where,
            hint="convert the checkpoint again",
        )
    ids = _ids(d2t, len(t2d), where)
    named, kept = len(np.unique(ids)), int(t2d.sum())
    if kept != len(d2t) or named != len(d2t) or not t2d[ids].all():
        raise CheckpointError(
            f"t2d keeps {kept} tokens, d2t names {named} in {len(d2t)} places; "
            "they must be the same",
            where=f"{where}: t2d",
            hint="one of the two maps belongs to another draft",
        )


def _ids(d2t: Integers, vocab_size: int, where: str) -> Integers:
    ids = np.arange(len(d2t)) + d2t
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise CheckpointError(
            f"d2t points outside the verifier's vocabulary of {vocab_size}: "
            f"ids from {ids.min()} to {ids.max()}",
            where=f"{where}: d2t",
            hint="d2t holds offsets (verifier id = i + d2t[i]); this file may hold absolute ids",
        )
    return ids
