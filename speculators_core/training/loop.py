"""The training loop: rows in a fixed order, steps, judgements, checkpoints, metrics.

Every number that decides the next step (weights, optimiser, order, schedule) is in a checkpoint,
so a run that was stopped continues bit for bit as if it had not been (CPU, same threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators_core.data.prepare import Prepared
from speculators_core.errors import DataError, SpeclabError, Stopped
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.params import TrainParams, loss_weights
from speculators_core.progress import Progress
from speculators_core.training import checkpointing
from speculators_core.training.checkpointing import Position
from speculators_core.training.divergence import mixture
from speculators_core.training.judging import MEASURED, PREDICTED, Contest, Measurement
from speculators_core.training.loss import TargetHead, Unrolled, Unroller
from speculators_core.training.meter import Meter
from speculators_core.training.optimization import Optimization
from speculators_core.training.order import Order, Rows
from speculators_core.training.pace import Pace
from speculators_core.training.packing import Packed, batches, pack
from speculators_core.training.precision import Machine
from speculators_core.training.quarantine import Quarantine
from speculators_core.training.schedule import Schedule, planned
from speculators_core.training.sources import Source
from speculators_core.training.world import (
    World,
    assembled,
    gathering,
    placed_like,
    shared,
    whole,
)

LOG_EVERY = 5  # optimiser steps


@dataclass
class Loop:
    """One training run. `run` returns when the schedule is done, or raises `Stopped`."""

    params: TrainParams
    draft: Eagle3Draft
    head: TargetHead
    source: Source
    quarantine: Quarantine
    prepared: Prepared
    training: list[int]  # documents
    validation: list[int]
    measurement: Measurement | None
    machine: Machine
    directory: Path  # of checkpoints
    progress: Progress
    began: float  # time.monotonic() at the start of this attempt
    world: World = field(default_factory=World)
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        params = self.params
        divergence = mixture(loss_weights(params.loss))
        if params.compile:
            for layer in range(len(self.draft.layers)):
                self.draft.get_submodule(f"layers.{layer}.mlp").compile(dynamic=True)
            divergence = torch.compile(divergence, dynamic=True)
        self.unroller = Unroller(
            self.draft,
            params.ttt_steps,
            params.ttt_step_loss_decay,
            divergence,
            again=params.gradient_checkpointing,
        )
        self.model = shared(self.unroller, self.world, params.sharding)
        self.trainable = dict(self.draft.trainable())
        self.optimization = Optimization(params, self.trainable)
        self.order = Order(
            self.prepared,
            self.training,
            params.seed,
            params.epochs,
            params.tokens_per_batch,
            params.accumulate * self.world.size,
        )
        self.schedule = planned(params, self.order.total())
        self.pace = Pace(self.began, params.max_minutes)
        self.meter = self._meter()
        self.contest = Contest(MEASURED if self.measurement else PREDICTED, params.patience)
        self.judged: tuple[int, bool] | None = None  # (step, measured) of the last judgement

    # ---- the run

    def run(self) -> None:
        """Train to the end of the schedule, or of patience."""
        if self.position.step and (due := self._due_judgement()):
            self._judge(**due)  # an earlier attempt may have ended between saving and judging
        while (rows := self._next()) is not None:
            if self.world.heard(self.progress.stopping()):
                self.save()
                raise Stopped(
                    f"stopped at step {self.position.step} of {self.schedule.total}; it can resume"
                )
            self.position.advance(len(self.order.steps(self.position.epoch)))
            self._step(rows)
        if self.position.step == 0:
            raise DataError("no batch has a token to train on", hint="look at the loss masks")
        self._log({})
        self.save()
        last = self.measurement is not None
        if self.judged != (self.position.step, last):
            self._judge(measure=last)

    def _step(self, rows: Rows) -> None:
        trained = self._gradients(rows)
        if trained is None:
            self.position.skipped += 1
            self.progress.note(f"a step without a trained token is skipped ({self.position.told})")
            return
        loss, tokens = trained
        rate = self.params.lr * self.schedule.factor(self.position.step)
        norm = self.optimization.clip()
        self._check(loss, norm)
        self.optimization.step(rate)
        self.position.step += 1
        self.position.tokens += tokens
        self._after_step({"lr": rate, "grad_norm": norm})

    def _gradients(self, rows: Rows) -> tuple[float, int] | None:
        """The loss of a whole step and its tokens, the gradients being there; None where no chain
        is trained. Where a document turns out to be unusable, all again without it."""
        while True:
            sound = [[d for d in row if d not in self.quarantine] for row in rows]
            live = self.order.live(sound, self.params.ttt_steps)
            if not live[0]:
                return None
            self.optimization.clear()
            loss, seen = self._backward(sound, live)
            if not self.quarantine.settle(self.world):
                for result, batch in seen:
                    self.meter.add(result, len(batch.ids), batch.left)
                return loss, sum(self.order.lengths[d] for row in sound for d in row)

    def _backward(self, rows: Rows, live: Tensor) -> tuple[float, list[tuple[Unrolled, Packed]]]:
        """Gradients of this process's rows, gathered from all; the loss of the whole step, and
        what this process saw."""
        total, seen = torch.zeros((), dtype=torch.float64), []
        mine = self.world.mine(rows, self.params.accumulate)
        for at, row in enumerate(mine, 1):
            batch = self._packed(row) if row else None
            targets = self.head.targets(batch) if batch else None
            with gathering(self.model, now=at == len(mine)):
                with self.machine.autocast():
                    loss, result = self.model(batch, targets, live)
                (loss * self.world.size).backward()  # which is divided by it when gathered
            if batch and result:
                seen.append((result, batch))
            total += loss.detach().double().cpu()
        return float(self.world.sum(total)), seen

    def _packed(self, documents: Sequence[int]) -> Packed | None:
        """A row with its states; None where no chain starts in it."""
        found = self.source(documents)
        batch = pack(found, self.head.rows.device) if found else None
        return batch if batch and len(batch.starts) else None

    def _after_step(self, values: dict[str, float]) -> None:
        step = self.position.step
        self.pace.note(step)
        self.position.seconds = self.pace.seconds
        if told := self.pace.keep(step, self.schedule, self.world.heard):
            self.progress.note(told)
        if step % LOG_EVERY == 0:
            self._log(values)
        due = self._due_judgement()
        if due or step % self.params.save_every == 0:
            self.save()  # before judging: whatever happens in it, this step is kept
        if due:
            self._judge(**due)
        left = self.pace.left(step, self.schedule.total)
        self.progress.update(
            step / self.schedule.total, f"step {step} of {self.schedule.total}", left
        )

    def _log(self, values: dict[str, float]) -> None:
        means = self.meter.read()
        if not means:
            return
        further = {
            "memory_mb": self.machine.memory_mb(),
            "skipped": float(self.position.skipped),
            "quarantined": float(len(self.quarantine)),
        }
        left = self.pace.left(self.position.step, self.schedule.total)
        if left is not None:
            further["seconds_left"] = left
        self.progress.metrics(self.position.step, means | values | further)
        self.meter = self._meter()

    def _check(self, loss: float, norm: float) -> None:
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise SpeclabError(
                f"the loss is {loss} and its gradient norm {norm} at {self.position.told}",
                where="training",
                hint="lower lr or grad_clip; the last checkpoint before this is kept",
            )

    # ---- place and time

    def _next(self) -> Rows | None:
        """The rows at the position; None at the end of the schedule, the data or patience."""
        at = self.position
        if self.contest.over or at.step >= self.schedule.total or at.epoch >= self.params.epochs:
            return None
        return self.order.steps(at.epoch)[at.batch]

    def _meter(self) -> Meter:
        return Meter(self.params.ttt_steps, self.world)

    # ---- judgement

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over the validation documents."""
        meter = self._meter()
        sound = [d for d in self.validation if d not in self.quarantine]
        packed = batches(self.order.lengths, self.params.tokens_per_batch, sound)
        with assembled(self.model), self.machine.autocast():
            for documents in packed[self.world.rank :: self.world.size]:
                if batch := self._packed(documents):
                    result = self.unroller.unroll(batch, self.head.targets(batch))
                    meter.add(result, len(batch.ids), batch.left)
        self.quarantine.settle(self.world)
        return meter.read()

    def measure(self) -> dict[str, float]:
        """What the reference engine accepts of this draft; nothing where no prompts are known."""
        if self.measurement is None:
            return {}
        with assembled(self.model):
            return self.measurement.of(self.draft, self.world, self.progress.stopping)

    def _due_judgement(self) -> dict[str, bool] | None:
        """How to judge after this step; None where it is not time."""
        step, every = self.position.step, self.params.evaluate_every
        measure = self.measurement is not None and step % every == 0
        return {"measure": measure} if measure or step % self.params.validate_every == 0 else None

    def _judge(self, measure: bool) -> None:
        """Validate, measure where asked, keep the best weights, and lose patience."""
        self.judged = (self.position.step, measure)
        values = self.evaluate() if self.validation else {}
        values.pop("tokens_per_second", None)
        told = {f"val_{name}": value for name, value in values.items()}
        measured = self.measure() if measure else {}
        if told or measured:
            self.progress.metrics(self.position.step, told | measured)
        if self.contest.name in (found := values | measured):
            if self.contest.won(found, self.position):
                self._keep_best()
            elif self.contest.over:
                self.progress.note(self.contest.told(self.position))
        self.meter.since = time.monotonic()

    # ---- checkpoints

    def _keep_best(self) -> None:
        weights = self._weights()
        self.world.after_first(
            f"best {self.position.step}",
            lambda: checkpointing.save_best(self.directory, self.position, weights),
        )

    def save(self) -> None:
        """A checkpoint of this moment."""
        self.position.schedule = self.schedule.state()
        self.position.quarantined = sorted(self.quarantine.documents)
        weights = self._weights()
        state: dict[str, Any] = {
            "optimizer": self.optimization.state(),
            "random": torch.get_rng_state(),
        }
        self.world.after_first(
            f"step {self.position.step}",
            lambda: checkpointing.save(self.directory, self.position, weights, state),
        )

    def load(self, checkpoint: checkpointing.Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.position = checkpoint.position
        self.schedule = Schedule.of(checkpoint.position.schedule)
        self.pace.earlier = checkpoint.position.seconds
        self.quarantine.documents.update(checkpoint.position.quarantined)
        self.restore(checkpoint.weights)
        self.optimization.load(checkpoint.state["optimizer"])
        torch.set_rng_state(checkpoint.state["random"])

    @torch.no_grad()
    def restore(self, weights: dict[str, Tensor]) -> None:
        """Make these the draft's."""
        for name, tensor in self.trainable.items():
            tensor.copy_(placed_like(weights[name], tensor))

    @torch.no_grad()
    def _weights(self) -> dict[str, Tensor]:
        """Whole, to be written; every process must ask."""
        return {name: whole(tensor.detach()) for name, tensor in self.trainable.items()}
