"""Chats to a prepared data set: token ids, loss masks, the vocabulary map, a validation split.

    DIR/tokens.safetensors   ids [N] int32, mask [N] bool, lengths [D] int64,
                             validation [D] bool, kept [V] bool (t2d), offsets [dv] int64 (d2t)
    DIR/meta.json            `PreparedMeta`: what it was made from, under one key

The key is a hash of the data's bytes, the chat template, the tokenizer and every parameter, so a
directory is reused only for exactly what it was made from.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.data.chats import Chat, read_chats
from speculators_core.data.masks import Masked, Unmaskable, mask_chat
from speculators_core.data.vocab_map import count_tokens, coverage, most_frequent, offsets
from speculators_core.errors import CheckpointError, Conflict, DataError, Stopped
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.output import complete_or_absent
from speculators_core.params import PrepareParams
from speculators_core.progress import Progress, Quiet

FORMAT = 1


class PrepareResult(BaseModel):
    """What `prepare` made."""

    output: str
    samples: int
    tokens: int
    masked_tokens: int
    skipped: dict[str, int]
    coverage: float
    draft_vocab_size: int


class PreparedMeta(BaseModel):
    """`meta.json` of a prepared data set."""

    model_config = ConfigDict(extra="forbid")

    format: int
    key: str
    tokenizer_fingerprint: str | None
    template_sha256: str
    vocab_size: int
    seq_length: int
    result: PrepareResult


@dataclass(frozen=True)
class Prepared:
    """A prepared data set in memory. Document d is rows `starts[d] : starts[d] + lengths[d]`."""

    meta: PreparedMeta
    ids: Tensor  # [N] int32
    mask: Tensor  # [N] bool
    lengths: Tensor  # [D] int64
    validation: Tensor  # [D] bool
    kept: Tensor  # [V] bool

    @property
    def starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    def document(self, index: int) -> tuple[Tensor, Tensor]:
        """(ids [S] int64, mask [S] bool) of one chat."""
        start = int(self.starts[index])
        rows = slice(start, start + int(self.lengths[index]))
        return self.ids[rows].long(), self.mask[rows]


def prepare(params: PrepareParams, output: Path, progress: Progress | None = None) -> PrepareResult:
    """Write a prepared data set at `output`, or reuse the one there if its key is the same.

    Raises `DataError` where no chat can be masked, `Conflict` where `output` is something else.
    """
    progress = progress or Quiet()
    facts = read_verifier(params.verifier)
    tokenizer = load_tokenizer(facts)
    key = _key(params, tokenizer, facts)
    known = _meta_at(output)
    if known and known.key == key:
        progress.note(f"{output} was made from the same data already")
        return known.result
    documents, skipped = _mask_all(params, tokenizer, progress)
    tensors = _tensors(params, facts, documents)
    result = _result(params, facts, output, tensors, skipped)
    meta = PreparedMeta(
        format=FORMAT,
        key=key,
        tokenizer_fingerprint=facts.tokenizer_fingerprint,
        template_sha256=_sha256(str(tokenizer.chat_template)),
        vocab_size=facts.vocab_size,
        seq_length=params.seq_length,
        result=result,
    )
    with complete_or_absent(output, overwrite=known is not None) as partial:
        save_file(tensors, partial / "tokens.safetensors")
        (partial / "meta.json").write_text(meta.model_dump_json(indent=2) + "\n")
    _tell(result, progress)
    return result


def load_prepared(directory: str | Path) -> Prepared:
    """Read a prepared data set. Raises `DataError` where it is none, or is damaged."""
    directory = Path(directory)
    try:
        meta = _meta_at(directory)
    except Conflict:
        meta = None
    if meta is None:
        raise DataError(
            "this is not a prepared data set",
            where=str(directory),
            hint="make one: speclab prepare DATA --verifier V --output DIR",
        )
    file = directory / "tokens.safetensors"
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


def load_tokenizer(facts: VerifierFacts) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer alone."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            facts.path, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the verifier's tokenizer can't be loaded: {str(error).splitlines()[0]}",
            where=facts.path,
        ) from error
    return tokenizer


def _mask_all(
    params: PrepareParams, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> tuple[list[Masked], Counter[str]]:
    read = read_chats(params.data)
    documents, skipped = [], Counter(read.skipped)
    for number, chat in enumerate(read.chats):
        if number % 64 == 0:
            if progress.stopping():
                raise Stopped("preparing was stopped; nothing was written")
            progress.update(number / len(read.chats), f"{number} of {len(read.chats)} chats")
        document, reason = _mask_one(tokenizer, chat, params.seq_length)
        if document:
            documents.append(document)
        else:
            skipped[reason] += 1
    if not documents:
        raise DataError(
            "no chat could be turned into tokens and a loss mask: "
            + ", ".join(f"{n} × {reason}" for reason, n in skipped.most_common()),
            where=", ".join(params.data),
            hint="a chat template with {% generation %} blocks says what the assistant writes",
        )
    return documents, skipped


def _mask_one(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, seq_length: int
) -> tuple[Masked | None, str]:
    try:
        masked = mask_chat(tokenizer, chat.as_dicts())
    except Unmaskable as error:
        return None, error.message
    cut = Masked(masked.ids[:seq_length], masked.mask[:seq_length])
    return (cut, "") if any(cut.mask) else (None, f"no answer within {seq_length} tokens")


def _tensors(
    params: PrepareParams, facts: VerifierFacts, documents: list[Masked]
) -> dict[str, Tensor]:
    ids = torch.tensor([i for d in documents for i in d.ids], dtype=torch.int32)
    mask = torch.tensor([m for d in documents for m in d.mask], dtype=torch.bool)
    lengths = torch.tensor([len(d.ids) for d in documents], dtype=torch.int64)
    validation = _split(len(documents), params)
    learnt = mask & ~validation.repeat_interleave(lengths)
    counts = count_tokens(ids, learnt, facts.vocab_size)
    kept = most_frequent(counts, params.draft_vocab_size or facts.vocab_size)
    return {
        "ids": ids,
        "mask": mask,
        "lengths": lengths,
        "validation": validation,
        "kept": kept,
        "offsets": offsets(kept),
    }


def _split(count: int, params: PrepareParams) -> Tensor:
    """[D] bool: a seeded share of the chats, never all of them, at least one if any."""
    chosen = torch.zeros(count, dtype=torch.bool)
    share = min(math.ceil(count * params.validation_fraction), count - 1)
    chosen[random.Random(params.seed).sample(range(count), share)] = True
    return chosen


def _result(
    params: PrepareParams,
    facts: VerifierFacts,
    output: Path,
    tensors: dict[str, Tensor],
    skipped: Counter[str],
) -> PrepareResult:
    counts = count_tokens(tensors["ids"], tensors["mask"], facts.vocab_size)
    return PrepareResult(
        output=str(output),
        samples=len(tensors["lengths"]),
        tokens=len(tensors["ids"]),
        masked_tokens=int(tensors["mask"].sum()),
        skipped=dict(skipped),
        coverage=coverage(counts, tensors["kept"]),
        draft_vocab_size=int(tensors["kept"].sum()),
    )


def _tell(result: PrepareResult, progress: Progress) -> None:
    share = result.masked_tokens / result.tokens
    progress.note(
        f"{result.samples} chats, {result.tokens} tokens, {result.masked_tokens} of them the "
        f"assistant's ({share:.0%}); a draft vocabulary of {result.draft_vocab_size} covers "
        f"{result.coverage:.2%} of those"
    )
    for reason, count in result.skipped.items():
        progress.note(f"skipped {count}: {reason}")
    progress.update(1.0, "done")


def _meta_at(directory: Path) -> PreparedMeta | None:
    """The meta of a prepared data set there; None where nothing is. Raises `Conflict` where the
    directory is something else."""
    if not directory.exists():
        return None
    try:
        values = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
        return PreparedMeta.model_validate(values)
    except (OSError, ValueError, ValidationError):
        raise Conflict(
            "the place is taken by something that is not a prepared data set",
            where=str(directory),
            hint="choose another directory, or remove this one",
        ) from None


def _key(params: PrepareParams, tokenizer: PreTrainedTokenizerBase, facts: VerifierFacts) -> str:
    digest = hashlib.sha256()
    for file in params.data:
        path = Path(file)
        digest.update(path.read_bytes() if path.is_file() else b"")
    settings = params.model_dump(mode="json", exclude={"data", "verifier"})
    digest.update(
        json.dumps(
            [FORMAT, settings, str(tokenizer.chat_template), facts.tokenizer_fingerprint],
            sort_keys=True,
        ).encode()
    )
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
