"""Train an EAGLE-3 speculator from a prepared data set: the whole journey of one run."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path

from pydantic import BaseModel

from speculators_core import digests
from speculators_core.checkpoint import save_speculator
from speculators_core.conversion.pairing import tokenizer_warnings
from speculators_core.data.prepare import Prepared, load_prepared
from speculators_core.decode.verify import check_cacheable
from speculators_core.errors import DataError, InputError, PairingError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier, load_verifier
from speculators_core.params import TrainParams
from speculators_core.progress import Portion, Progress, Quiet
from speculators_core.training import checkpointing, made, warm_start
from speculators_core.training.draft import aux_layers, build_draft, verifier_name
from speculators_core.training.judging import Measurement, measurement
from speculators_core.training.launch import train_in_processes
from speculators_core.training.loop import Loop
from speculators_core.training.loss import TargetHead
from speculators_core.training.places import (
    check_same_step,
    check_shared,
    checkpoints_of,
    earlier_attempt,
)
from speculators_core.training.precision import find_machine
from speculators_core.training.quarantine import Quarantine
from speculators_core.training.sinks import check_sinks, copied
from speculators_core.training.sources import open_source
from speculators_core.training.world import World, in_parts, whole

_MAY_DIFFER = (
    "data", "verifier", "max_minutes", "accumulate", "processes", "sharding", "nodes", "node_rank",
    "rendezvous", "sinks", "verifier_name",
)  # fmt: skip
"""Parameters that a run may be resumed with another value of."""
_STATES_SHARE = 0.2  # of the whole time, about, when the states are cached first


class TrainResult(BaseModel):
    """What `train` made. `best` holds the numbers of the written weights and their step;
    `trainable` and `frozen` name the draft's tensors; `skipped` counts steps without a trained
    token, `quarantined` chats whose states hold NaN or infinity; `ended_early`: patience was lost.
    """

    output: str
    steps: int
    seconds: float
    best: dict[str, float]
    trainable: list[str] = []
    frozen: list[str] = []
    skipped: int = 0
    quarantined: int = 0
    ended_early: bool = False


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
    progress = progress or Quiet()
    check_sinks(params.sinks)
    earlier_attempt(output, resume)
    if params.world > 1:
        told = train_in_processes(params, output, progress, resume)
        return TrainResult.model_validate(told)
    return train_here(params, output, progress, resume, World())


def train_here(
    params: TrainParams, output: Path, progress: Progress, resume: Path | None, world: World
) -> TrainResult:
    """What `train` does, in this process, which may be one of several."""
    check_shared(world, output.parent)
    names = params.sinks if world.first else ()
    with copied(progress, names, output, params.model_dump(mode="json")) as progress:
        loop = _loop(params, output, progress, world)
        _resume(loop, output, resume, progress)
        _tell_plan(loop, progress)
        loop.run()
        best = _finish(loop, output)
        progress.update(1.0, "done")
    tensors = _tensors(loop.draft)
    return TrainResult(
        output=str(output),
        steps=loop.position.step,
        seconds=loop.position.seconds,
        best=best,
        trainable=tensors[True],
        frozen=tensors[False],
        skipped=loop.position.skipped,
        quarantined=len(loop.quarantine),
        ended_early=loop.contest.over,
    )


def _loop(params: TrainParams, output: Path, progress: Progress, world: World) -> Loop:
    began = time.monotonic()
    prepared = load_prepared(params.data)
    machine = find_machine(params)
    progress.note(machine.told)
    verifier = load_verifier(params.verifier, dtype=machine.dtype, device=machine.device)
    check_pair(prepared, verifier, params)
    layers = aux_layers(params, verifier.facts)
    share = _STATES_SHARE if params.hidden_states != "online" else 0.0
    first = Portion(progress, 0.0, share)
    source, quarantine = world.in_turn(
        lambda: open_source(params, prepared, verifier, layers, first)
    )
    training, validation = _split(prepared, quarantine)
    draft = build_draft(params, verifier, prepared)
    for warning in verifier_name(params, verifier.facts)[1]:
        progress.note(warning)
    if params.start_from:
        progress.note(warm_start.describe(draft, prepared))
        for warning in tokenizer_warnings(Path(params.start_from), verifier.facts):
            progress.note(warning)
    loop = Loop(
        params=params,
        draft=draft,
        head=TargetHead(verifier.final_norm, verifier.lm_head, draft.kept, verifier.logit_rule),
        source=source,
        quarantine=quarantine,
        prepared=prepared,
        training=training,
        validation=validation,
        measurement=_measurement(params, prepared, validation, verifier, progress),
        machine=machine,
        directory=checkpoints_of(output),
        progress=Portion(progress, share, 1.0),
        began=began,
        world=world,
    )
    loop.position.fingerprint = _fingerprint(params, prepared, verifier)
    return loop


def _resume(loop: Loop, output: Path, resume: Path | None, progress: Progress) -> None:
    earlier = earlier_attempt(output, resume)
    found = checkpointing.load_last(earlier, loop.position.fingerprint) if earlier else None
    check_same_step(loop.world, found, str(resume))
    if earlier is None or found is None:
        return
    loop.load(found)
    loop.world.after_first("adopted", lambda: checkpointing.adopt_best(earlier, loop.directory))
    progress.note(f"resumed at step {loop.position.step} of {loop.schedule.total}")


def _measurement(
    params: TrainParams,
    prepared: Prepared,
    validation: list[int],
    verifier: Verifier,
    progress: Progress,
) -> Measurement | None:
    """Acceptance on held-out prompts, where it can be measured; and what picks the best."""
    try:
        check_cacheable(verifier)
        found = measurement(params, prepared, validation, verifier)
    except PairingError as error:
        progress.note(f"acceptance can't be measured: {error.message}")
        found = None
    if found:
        progress.note(
            f"the best weights are those of the highest acceptance that the reference engine "
            f"measures on {len(found.prompts)} held-out prompts, every {params.evaluate_every} "
            f"steps (K = {found.speculative_tokens}, {found.max_tokens} tokens)"
        )
    elif validation:
        progress.note("the best weights are those of the highest predicted acceptance length")
    elif params.patience is not None:
        raise InputError(
            "patience counts judgements, but there is nothing to judge by: no chat is kept for "
            "validation and no prompt is known",
            where="patience",
            hint="prepare with a larger validation_fraction, or name prompts as held_out",
        )
    else:
        progress.note("nothing to judge weights by, no chat is kept for validation: the last count")
    return found


def check_pair(prepared: Prepared, verifier: Verifier, params: TrainParams) -> None:
    """Raise `PairingError` unless this verifier prepared the data and its logits are known."""
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


def _split(prepared: Prepared, quarantined: Quarantine) -> tuple[list[int], list[int]]:
    chosen = prepared.validation.tolist()
    usable = [d for d in range(len(chosen)) if d not in quarantined]
    training = [d for d in usable if not chosen[d]]
    if not training:
        raise DataError("no document is left to train on", hint="prepare more chats")
    return training, [d for d in usable if chosen[d]]


def _fingerprint(params: TrainParams, prepared: Prepared, verifier: Verifier) -> str:
    """Equal where a checkpoint may be continued: parameters, data and verifier are the same, and
    so is the number of rows a step, however many processes share them."""
    own = params.model_dump(mode="json", exclude=set(_MAY_DIFFER))
    # by content: their places may have changed, weights and prompts must not
    if params.start_from:
        own["start_from"] = warm_start.fingerprint(params.start_from)
    if params.held_out:
        own["held_out"] = digests.of_file(Path(params.held_out))
    rows = params.accumulate * params.world
    text = json.dumps([own, rows, prepared.meta.key, verifier.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _tensors(draft: Eagle3Draft) -> dict[bool, list[str]]:
    """Names of the draft's parameters: those that are trained (True), and those that are not."""
    lists: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in draft.named_parameters():
        lists[parameter.requires_grad].append(name)
    return lists


def _tell_plan(loop: Loop, progress: Progress) -> None:
    lists = _tensors(loop.draft)
    count = sum(p.numel() for p in loop.trainable.values())
    progress.note(f"trainable, {count / 1e6:.1f} M parameters: {', '.join(lists[True])}")
    progress.note(f"frozen: {', '.join(lists[False])}")
    params, rows = loop.params, loop.order.rows
    progress.note(
        f"{len(loop.training)} chats to train on, {len(loop.validation)} to validate, "
        f"{len(loop.quarantine)} quarantined, "
        f"{loop.schedule.total} steps of up to {rows} x {params.tokens_per_batch} tokens, "
        f"loss {params.loss}, {params.optimizer}, {params.schedule}"
    )
    longest = max(loop.order.lengths)
    if longest > params.tokens_per_batch:
        progress.note(
            f"the longest chat has {longest} tokens, more than tokens_per_batch: it is a row of "
            "its own, and decides how much memory is needed"
        )
    if loop.world.size > 1:
        progress.note(
            f"{loop.world.size} processes ({params.sharding}), {params.accumulate} rows each a step"
        )


def _finish(loop: Loop, output: Path) -> dict[str, float]:
    """Write the best weights as a speculator; then the checkpoints may go."""
    best: dict[str, float] = {}
    found = checkpointing.load_best(loop.directory)
    if found:
        position, weights = found
        best = position.best
        loop.restore(weights)
    loop.world.meet()  # nobody reads the checkpoints any more

    draft, data = _whole(loop.draft), loop.prepared
    covered = warm_start.covered(draft, data)
    beside = made.texts(output.name, draft.config, data.meta, covered, best)

    def write() -> None:
        save_speculator(draft, output, beside=beside)
        shutil.rmtree(loop.directory, ignore_errors=True)

    loop.world.after_first("written", write)
    return best


def _whole(draft: Eagle3Draft) -> Eagle3Draft:
    """The draft itself, or a copy in one piece where its tensors are sharded."""
    if not in_parts(draft):
        return draft
    copy = Eagle3Draft(draft.config)
    copy.load_state_dict({n: whole(t) for n, t in draft.state_dict().items()}, assign=True)
    copy.shares_embedding = draft.shares_embedding
    return copy
