"""Which of the verifier's tokens a draft may propose: the most frequent ones of the answers."""

from __future__ import annotations

import torch
from torch import Tensor

from speculators_core.errors import DataError


def count_tokens(ids: Tensor, mask: Tensor, vocab_size: int) -> Tensor:
    """How often each token was written by the assistant: ids [N], mask [N] → [V] int64."""
    return torch.bincount(ids[mask].long(), minlength=vocab_size)


def check_size(draft_vocab_size: int, vocab_size: int) -> None:
    """Raise `DataError` for a draft vocabulary larger than the verifier's."""
    if draft_vocab_size > vocab_size:
        raise DataError(
            f"a draft vocabulary of {draft_vocab_size} is larger than the verifier's {vocab_size}",
            where="draft_vocab_size",
            hint=f"at most {vocab_size}, or leave it empty for the whole vocabulary",
        )


def most_frequent(counts: Tensor, draft_vocab_size: int) -> Tensor:
    """[V] counts → [V] bool with exactly dv true entries, ties to the lower id.

    Fewer used tokens than dv: the lowest unused ids fill the rest. Raises `DataError` if dv > V.
    """
    vocab_size = len(counts)
    check_size(draft_vocab_size, vocab_size)
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[torch.argsort(counts, descending=True, stable=True)[:draft_vocab_size]] = True
    return kept


def offsets(kept: Tensor) -> Tensor:
    """[V] bool → d2t [dv] int64, verifier id = i + d2t[i], ascending."""
    ids = kept.nonzero().flatten()
    return ids - torch.arange(len(ids))


def coverage(counts: Tensor, kept: Tensor) -> float:
    """Share of the counted tokens that the draft can propose: the ceiling of its acceptance."""
    total = int(counts.sum())
    return float(counts[kept].sum()) / total if total else 0.0
