"""Train an EAGLE-3 speculator from a prepared data set: the whole journey of one run."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel

from speculators_core.checkpoint import save_speculator
from speculators_core.data.hidden_states import (
    StateCache,
    States,
    cache_key,
    cache_states,
    compute_states,
    expected_header,
)
from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.errors import Conflict, DataError, PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, fastest, load_verifier
from speculators_core.params import TrainParams
from speculators_core.progress import Portion, Progress, Quiet
from speculators_core.training import checkpointing, warm_start
from speculators_core.training.draft import aux_layers, build_draft
from speculators_core.training.loop import Loop, Source
from speculators_core.training.loss import TargetHead
from speculators_core.training.packing import Document

_STATES_SHARE = 0.2  # of the whole time, about, when the states are cached first


class TrainResult(BaseModel):
    """What `train` made. `best` holds the validation numbers of the written weights."""

    output: str
    steps: int
    seconds: float
    best: dict[str, float]


def train(
    params: TrainParams,
    output: Path,
    progress: Progress | None = None,
    resume: Path | None = None,
) -> TrainResult:
    """Write a speculator directory at `output`.

    Checkpoints lie beside it in `OUTPUT.checkpoints` until it is complete. `resume` names such a
    directory (or the one it lies in) of an earlier attempt with the same parameters; without a
    checkpoint in it the run starts from the beginning. Raises `Stopped` after a checkpoint when
    asked to stop, `PairingError` where data and verifier don't fit each other.
    """
    began = time.monotonic()
    progress = progress or Quiet()
    checkpoints = output.parent / f"{output.name}.checkpoints"
    earlier = _earlier_attempt(checkpoints, resume, output)
    prepared = load_prepared(params.data)
    device, dtype = _machine(params, progress)
    verifier = load_verifier(params.verifier, dtype=dtype, device=device)
    _check_pair(prepared, verifier, params)
    layers = aux_layers(params, verifier.facts)
    share = _STATES_SHARE if params.hidden_states == "cached" else 0.0
    first = Portion(progress, 0.0, share)
    source, quarantined = _source(params, prepared, verifier, layers, first)
    training, validation = _split(prepared, quarantined)
    draft = build_draft(params, verifier, prepared)
    if params.start_from:
        progress.note(warm_start.describe(draft, prepared))
    loop = Loop(
        params=params,
        draft=draft,
        head=TargetHead(verifier.final_norm, verifier.lm_head, draft.kept),
        source=source,
        prepared=prepared,
        training=training,
        validation=validation,
        directory=checkpoints,
        progress=Portion(progress, share, 1.0),
        began=began,
    )
    loop.position.fingerprint = _fingerprint(params, prepared, verifier)
    del verifier  # a cached run needs none of its layers any more
    checkpoint = checkpointing.load_last(earlier, loop.position.fingerprint) if earlier else None
    if earlier and checkpoint:
        loop.load(checkpoint)
        checkpointing.adopt_best(earlier, checkpoints)
        progress.note(f"resumed at step {loop.position.step} of {loop.schedule.total}")
    _tell_plan(loop, draft, progress)
    loop.run()
    best = _finish(loop, draft, output)
    progress.update(1.0, "done")
    return TrainResult(
        output=str(output), steps=loop.position.step, seconds=loop.position.seconds, best=best
    )


def _earlier_attempt(checkpoints: Path, resume: Path | None, output: Path) -> Path | None:
    """Where to look for a checkpoint; None to start from the beginning."""
    if output.exists():
        raise Conflict("the output exists already", where=str(output), hint="choose another output")
    if resume is None:
        if checkpoints.exists():
            raise Conflict(
                "checkpoints of an earlier attempt are there",
                where=str(checkpoints),
                hint=f"continue with --resume {checkpoints}, or remove them",
            )
        return None
    if any(resume.glob("step-*")):
        return resume
    inside = sorted(p for p in resume.glob("*.checkpoints") if any(p.glob("step-*")))
    return inside[0] if inside else None


def _machine(params: TrainParams, progress: Progress) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the verifier and its states, and why; the draft trains in float32."""
    device, dtype = fastest()
    if params.dtype == "auto":
        why = "auto: " + ("a GPU" if device.type == "cuda" else "a CPU computes float32 fastest")
    else:
        dtype, why = getattr(torch, params.dtype), "as asked"
    name = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    progress.note(
        f"device {device.type} ({name}), verifier in {str(dtype).removeprefix('torch.')} ({why}), "
        f"draft in float32, torch {torch.__version__}"
    )
    return device, dtype


def _check_pair(prepared: Prepared, verifier: Verifier, params: TrainParams) -> None:
    facts, meta = verifier.facts, prepared.meta
    if meta.vocab_size != facts.vocab_size:
        raise PairingError(
            f"the data was prepared for a vocabulary of {meta.vocab_size}, "
            f"the verifier has {facts.vocab_size}",
            where=params.data,
            hint="prepare the chats with this verifier",
        )
    if meta.tokenizer_fingerprint != facts.tokenizer_fingerprint:
        raise PairingError(
            "the data was prepared with another tokenizer than the verifier's",
            where=params.data,
            hint="prepare the chats with this verifier",
        )
    verifier.check_head()


def _source(
    params: TrainParams,
    prepared: Prepared,
    verifier: Verifier,
    layers: list[int],
    progress: Progress,
) -> tuple[Source, set[int]]:
    """Documents with states, from the disk cache or computed as asked; and the unusable ones."""
    if params.hidden_states == "cached":
        key = cache_key(expected_header(prepared, verifier, layers))
        data = Path(params.data)
        place = data.parent / f"{data.name}.states-{key}"
        cache = cache_states(prepared, verifier, layers, place, progress)
        return _from_cache(cache, prepared), cache.quarantined

    def online(numbers: Sequence[int]) -> list[Document]:
        documents = [prepared.document(number) for number in numbers]
        states = compute_states(verifier, layers, documents)
        return _documents(documents, states)

    return online, set()


def _from_cache(cache: StateCache, prepared: Prepared) -> Source:
    def cached(numbers: Sequence[int]) -> list[Document]:
        return _documents(
            [prepared.document(n) for n in numbers], [cache.states(n) for n in numbers]
        )

    return cached


def _documents(
    documents: Sequence[tuple[torch.Tensor, torch.Tensor]], states: Sequence[States]
) -> list[Document]:
    return [
        Document(ids, mask, found) for (ids, mask), found in zip(documents, states, strict=True)
    ]


def _split(prepared: Prepared, quarantined: set[int]) -> tuple[list[int], list[int]]:
    chosen = prepared.validation.tolist()
    usable = [d for d in range(len(chosen)) if d not in quarantined]
    training = [d for d in usable if not chosen[d]]
    if not training:
        raise DataError("no document is left to train on", hint="prepare more chats")
    return training, [d for d in usable if chosen[d]]


def _fingerprint(params: TrainParams, prepared: Prepared, verifier: Verifier) -> str:
    """Equal where a checkpoint may be continued: parameters, data and verifier are the same."""
    own = params.model_dump(mode="json", exclude={"data", "verifier", "start_from", "max_minutes"})
    if params.start_from:
        own["start_from"] = warm_start.fingerprint(params.start_from)
    text = json.dumps([own, prepared.meta.key, verifier.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _tell_plan(loop: Loop, draft: Eagle3Draft, progress: Progress) -> None:
    lists: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in draft.named_parameters():
        lists[parameter.requires_grad].append(name)
    count = sum(p.numel() for p in loop.trainable.values())
    progress.note(f"trainable, {count / 1e6:.1f} M parameters: {', '.join(lists[True])}")
    progress.note(f"frozen: {', '.join(lists[False])}")
    progress.note(
        f"{len(loop.training)} chats to train on, {len(loop.validation)} to validate, "
        f"{loop.schedule.total} steps of up to {loop.params.tokens_per_batch} tokens"
    )


def _finish(loop: Loop, draft: Eagle3Draft, output: Path) -> dict[str, float]:
    """Write the best weights as a speculator; then the checkpoints may go."""
    best: dict[str, float] = {}
    found = checkpointing.load_best(loop.directory)
    if found:
        position, weights = found
        best = position.best
        with torch.no_grad():
            for name, tensor in loop.trainable.items():
                tensor.copy_(weights[name])
    save_speculator(draft, output)
    shutil.rmtree(loop.directory, ignore_errors=True)
    return best
