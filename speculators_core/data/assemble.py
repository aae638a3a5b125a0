"""Parts of tokenised rows to the files of a prepared data set, and what `meta.json` says of them.

Only a number or two a sample is held in memory; ids and masks go from the parts to the file.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculators_core.data.prepared import (
    CODE_VERSION,
    META,
    TEXTS,
    TOKENS,
    PreparedMeta,
    SourceFacts,
)
from speculators_core.data.sources import Source
from speculators_core.data.template import ChatTemplate
from speculators_core.data.tokenise import read_column, read_facts_of
from speculators_core.data.vocab_map import count_tokens, coverage, most_frequent, offsets
from speculators_core.errors import DataError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.output import complete_or_absent
from speculators_core.params import PrepareParams
from speculators_core.weights import Pending, write_safetensors

_LENGTHS = tuple(1 << n for n in range(5, 21))  # upper bounds of the histogram, in tokens


@dataclass(frozen=True)
class Plan:
    """What a preparation is made from, under one key."""

    params: PrepareParams
    facts: VerifierFacts
    template: ChatTemplate
    sources: list[Source]
    key: str


def assemble(plan: Plan, parts: Sequence[Path], output: Path) -> PreparedMeta:
    """Write the directory `output`; its meta. Raises `DataError` where no sample is left."""
    facts = [read_facts_of(part) for part in parts]
    skipped, doubts = _summed(facts, "skipped"), _summed(facts, "doubts")
    columns = {
        name: np.concatenate([read_column(part, name) for part in parts] or [np.zeros(0)])
        for name in ("lengths", "source", "row", "group")
    }
    if not len(columns["lengths"]):
        raise _nothing_left(plan, skipped)
    lengths, validation = columns["lengths"], _split(columns["group"], plan.params)
    counts = _counts(plan, parts, validation)
    kept = most_frequent(counts.learnt, plan.params.draft_vocab_size or plan.facts.vocab_size)
    meta = PreparedMeta(
        code_version=CODE_VERSION,
        key=plan.key,
        verifier=plan.params.verifier,
        tokenizer_fingerprint=plan.facts.tokenizer_fingerprint,
        template_sha256=plan.template.sha256 if any(f["chats"] for f in facts) else None,
        masked_by=_masked_by(plan, facts),
        enable_thinking=plan.params.enable_thinking,
        vocab_size=plan.facts.vocab_size,
        draft_vocab_size=int(kept.sum()),
        seq_length=plan.params.seq_length,
        samples=len(lengths),
        validation_samples=int(validation.sum()),
        tokens=int(lengths.sum()),
        masked_tokens=int(counts.masked.sum()),
        coverage=coverage(counts.masked, kept),
        lengths=_histogram(lengths),
        skipped=skipped,
        doubts=doubts,
        sources=_source_facts(plan, facts, columns["source"]),
    )
    made = {
        "lengths": lengths,
        "validation": validation,
        "kept": kept.numpy(),
        "offsets": offsets(kept).numpy(),
        "source": columns["source"],
        "row": columns["row"],
    }
    with complete_or_absent(output) as partial:
        for _ in write_safetensors(partial / TOKENS, _tensors(made, parts, meta.tokens)):
            pass
        texts = _texts(plan.template, counts.seen)
        (partial / TEXTS).write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
        (partial / META).write_text(meta.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return meta


def _tensors(made: dict[str, Any], parts: Sequence[Path], tokens: int) -> list[Pending]:
    """The small tensors as they are; ids and masks straight from the parts."""

    def whole(array: Any) -> Any:
        return lambda: [np.ascontiguousarray(array).view(np.uint8).reshape(-1)]

    def streamed(name: str) -> Any:
        return lambda: (read_column(part, name).view(np.uint8).reshape(-1) for part in parts)

    return [
        *(Pending(name, a.shape, str(a.dtype), whole(a)) for name, a in made.items()),
        Pending("ids", (tokens,), "int32", streamed("ids")),
        Pending("mask", (tokens,), "bool", streamed("mask")),
    ]


@dataclass(frozen=True)
class _Counts:
    """How often each token [V] occurs: at all, in masks, in masks of chats that are trained on."""

    seen: Tensor
    masked: Tensor
    learnt: Tensor


def _counts(plan: Plan, parts: Sequence[Path], validation: Any) -> _Counts:
    seen, masked, learnt = torch.zeros(3, plan.facts.vocab_size, dtype=torch.int64)
    size, first = plan.facts.vocab_size, 0
    for part in parts:
        lengths = read_column(part, "lengths")
        held_out = np.repeat(validation[first : first + len(lengths)], lengths)
        first += len(lengths)
        ids = torch.from_numpy(read_column(part, "ids"))
        mask = torch.from_numpy(read_column(part, "mask"))
        seen += count_tokens(ids, torch.ones_like(mask), size)
        masked += count_tokens(ids, mask, size)
        learnt += count_tokens(ids, mask & ~torch.from_numpy(held_out), size)
    return _Counts(seen, masked, learnt)


def _split(groups: Any, params: PrepareParams) -> Any:
    """[D] bool: a seeded share of the chats with all copies, never all, at least one if any."""
    _, members = np.unique(groups, return_inverse=True)
    count = int(members.max()) + 1
    share = min(math.ceil(count * params.validation_fraction), count - 1)
    chosen = np.zeros(count, dtype=np.bool_)
    chosen[random.Random(params.seed).sample(range(count), share)] = True
    return chosen[members]


def _histogram(lengths: Any) -> list[tuple[int, int]]:
    """(upper bound, samples) from the first to the last bound that has any."""
    places = np.searchsorted(_LENGTHS, lengths)
    counts = np.bincount(places, minlength=len(_LENGTHS) + 1)
    used = counts.nonzero()[0]
    bounds = (*_LENGTHS, int(lengths.max()))
    return [(bounds[i], int(counts[i])) for i in range(int(used[0]), int(used[-1]) + 1)]


def _source_facts(plan: Plan, facts: Sequence[dict[str, Any]], of_sample: Any) -> list[SourceFacts]:
    rows = _summed(facts, "rows")
    samples = np.bincount(of_sample, minlength=len(plan.sources))
    return [
        SourceFacts(
            path=source.name,
            weight=source.weight,
            rows=rows.get(str(i), 0),
            samples=int(samples[i]),
        )
        for i, source in enumerate(plan.sources)
    ]


def _masked_by(plan: Plan, facts: Sequence[dict[str, Any]]) -> str:
    """In words, for people who look at the masks."""
    chats = any(fact["chats"] for fact in facts)
    how = (
        "generation blocks of the chat template"
        if plan.template.has_markers
        else "rendering the chat turn by turn"
    )
    return how if chats else "plain text: all tokens but the first of each sample"


def _texts(template: ChatTemplate, seen: Tensor) -> dict[str, str]:
    """{id: text}; a token that is part of a character is shown as the tokenizer calls it."""
    texts = {}
    for token in seen.nonzero().flatten().tolist():
        text = template.tokenizer.decode([token])
        if not text or "\ufffd" in text:
            text = str(template.tokenizer.convert_ids_to_tokens(token))
        texts[str(token)] = text
    return texts


def _summed(facts: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for fact in facts:
        total.update(fact[name])
    return dict(total)


def _nothing_left(plan: Plan, skipped: dict[str, int]) -> DataError:
    where = ", ".join(plan.params.data)
    if not skipped:
        return DataError(
            "the data is empty: expected chats or texts, found no row",
            where=where,
            hint="look at the file: it needs one JSON object a line, an array of objects, or "
            "Parquet; or raise the weights, if they leave nothing",
        )
    reasons = ", ".join(f"{count} × {reason}" for reason, count in skipped.items())
    return DataError(
        f"no row could be turned into tokens and a loss mask: {reasons}",
        where=where,
        hint="a chat needs a user turn and an assistant's answer; a chat template with "
        "{% generation %} blocks says what the assistant writes",
    )
