"""The training loop: batches in a fixed order, AdamW, validation, checkpoints, metrics.

Every number that decides the next step (weights, optimiser, order, schedule) is in a checkpoint,
so a run that was stopped continues bit for bit as if it had not been (CPU, same threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculators_core.data.prepare import Prepared
from speculators_core.errors import DataError, SpeclabError, Stopped
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.params import TrainParams
from speculators_core.progress import Progress
from speculators_core.training import checkpointing
from speculators_core.training.checkpointing import Position
from speculators_core.training.loss import TargetHead, Unrolled, unroll
from speculators_core.training.meter import Meter
from speculators_core.training.packing import Document, Packed, batches, epoch_order, pack
from speculators_core.training.schedule import Schedule

LOG_EVERY = 5  # optimiser steps
_SPEED_FROM, _SPEED_TO = 3, 10  # steps whose time decides whether a time limit can be kept
_LATE = 1.02  # a plan this much too long is shortened

Source = Callable[[Sequence[int]], list[Document]]
"""Documents by number, with the verifier's states."""


@dataclass
class Loop:
    """One training run. `run` returns when the schedule is done, or raises `Stopped`."""

    params: TrainParams
    draft: Eagle3Draft
    head: TargetHead
    source: Source
    prepared: Prepared
    training: list[int]  # documents
    validation: list[int]
    directory: Path  # of checkpoints
    progress: Progress
    began: float  # time.monotonic() at the start of this attempt
    position: Position = field(default_factory=Position)

    def __post_init__(self) -> None:
        self.trainable = dict(self.draft.trainable())
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=self.params.lr,
            betas=(0.9, 0.95),
            weight_decay=self.params.weight_decay,
        )
        self.lengths = self.prepared.lengths.tolist()
        self.schedule = Schedule(self._planned_steps(), self.params.warmup_ratio)
        self.meter = Meter(self.params.ttt_steps)
        self.earlier = 0.0  # seconds of earlier attempts
        self.measured: tuple[int, float] | None = None  # (step, clock) that the speed counts from
        self.epoch: tuple[int, list[list[int]]] | None = None  # (number, its batches)
        self.validated_at = -1

    # ---- the run

    def run(self) -> None:
        """Train to the end of the schedule."""
        if self.position.step and self._is_due(self.params.validate_every):
            self._validate()  # an earlier attempt may have ended between saving and validating
        while (documents := self._next()) is not None:
            if self.progress.stopping():
                self.save()
                raise Stopped(
                    f"stopped at step {self.position.step} of {self.schedule.total}; it can resume"
                )
            self._advance()
            self._step(pack(self.source(documents), self.head.rows.device))
        if self.position.step == 0:
            raise DataError("no batch has a token to train on", hint="look at the loss masks")
        self._log({})
        self.save()
        if self.validated_at != self.position.step:
            self._validate()

    def _step(self, batch: Packed) -> None:
        if len(batch.starts) == 0:
            self.position.skipped += 1
            self.progress.note(f"a batch without a trained token is skipped ({self._where()})")
            return
        rate = self.params.lr * self.schedule.factor(self.position.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        result = self._unroll(batch)
        self.optimizer.zero_grad(set_to_none=True)
        result.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.params.grad_clip)
        self._check(result.loss.detach(), norm)
        self.optimizer.step()
        self.position.step += 1
        self.position.tokens += len(batch.ids)
        self.meter.add(result, len(batch.ids), batch.left)
        self._after_step({"lr": rate, "grad_norm": float(norm)})

    def _after_step(self, values: dict[str, float]) -> None:
        step = self.position.step
        if step % LOG_EVERY == 0:
            self._log(values)
        self._keep_time()
        due = self._is_due(self.params.validate_every)
        if due or self._is_due(self.params.save_every):
            self.save()  # before validation: whatever happens in it, this step is kept
        if due:
            self._validate()
        self._tell()

    def _is_due(self, every: int) -> bool:
        return self.position.step % every == 0

    def _log(self, values: dict[str, float]) -> None:
        means = self.meter.read()
        if means:
            self.progress.metrics(self.position.step, means | values)
            self.meter = Meter(self.params.ttt_steps)

    def _unroll(self, batch: Packed) -> Unrolled:
        return unroll(
            self.draft,
            batch,
            self.head.targets(batch),
            steps=self.params.ttt_steps,
            decay=self.params.ttt_step_loss_decay,
        )

    def _check(self, loss: Tensor, norm: Tensor) -> None:
        if not math.isfinite(float(norm)) or not math.isfinite(float(loss)):
            raise SpeclabError(
                f"the loss is {float(loss)} and its gradient norm {float(norm)} at {self._where()}",
                where="training",
                hint="lower lr or grad_clip; the last checkpoint before this is kept",
            )

    # ---- order and time

    def _planned_steps(self) -> int:
        return sum(len(self._epoch(epoch)) for epoch in range(self.params.epochs))

    def _epoch(self, epoch: int) -> list[list[int]]:
        order = epoch_order(self.training, self.params.seed, epoch)
        return batches(self.lengths, self.params.tokens_per_batch, order)

    def _next(self) -> list[int] | None:
        """The batch at the position; None at the end of the schedule or of the last epoch."""
        at = self.position
        if at.step >= self.schedule.total or at.epoch >= self.params.epochs:
            return None
        if self.epoch is None or self.epoch[0] != at.epoch:
            self.epoch = (at.epoch, self._epoch(at.epoch))
        return self.epoch[1][at.batch]

    def _advance(self) -> None:
        """The position moves behind the batch that is about to be trained."""
        assert self.epoch is not None
        self.position.batch += 1
        if self.position.batch == len(self.epoch[1]):
            self.position.epoch, self.position.batch = self.position.epoch + 1, 0

    def _keep_time(self) -> None:
        """Shorten the schedule where the time limit would not be kept."""
        step, seconds = self.position.step, self.earlier + time.monotonic() - self.began
        self.position.seconds = seconds
        if self.measured is None and step >= _SPEED_FROM:
            self.measured = (step, time.monotonic())
        if self.params.max_minutes is None or self.measured is None:
            return
        first, since = self.measured
        if step < first + _SPEED_TO - _SPEED_FROM:
            return
        speed = (time.monotonic() - since) / (step - first)  # seconds a step
        fits = step + int((60 * self.params.max_minutes - seconds) / speed)
        if self.schedule.total > step and fits * _LATE < self.schedule.total:
            before = self.schedule.total
            self.schedule.shorten(step, max(fits, step + 1))
            self.progress.note(
                f"{before} steps shortened to {self.schedule.total} "
                f"({speed:.2f} s a step, limit {self.params.max_minutes:g} minutes)"
            )

    def _tell(self) -> None:
        step, total = self.position.step, self.schedule.total
        left = None
        if self.measured and step > self.measured[0]:
            first, since = self.measured
            left = (time.monotonic() - since) / (step - first) * (total - step)
        self.progress.update(step / total, f"step {step} of {total}", left)

    def _where(self) -> str:
        return f"step {self.position.step}, epoch {self.position.epoch}"

    # ---- validation and checkpoints

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Means over the validation documents."""
        meter = Meter(self.params.ttt_steps)
        for documents in batches(self.lengths, self.params.tokens_per_batch, self.validation):
            batch = pack(self.source(documents), self.head.rows.device)
            if len(batch.starts):
                meter.add(self._unroll(batch), len(batch.ids), batch.left)
        return meter.read()

    def _validate(self) -> None:
        self.validated_at = self.position.step
        if not self.validation:
            return
        values = self.evaluate()
        values.pop("tokens_per_second", None)
        self.progress.metrics(
            self.position.step, {f"val_{name}": value for name, value in values.items()}
        )
        name = "served_acceptance_length"
        if values and values[name] >= self.position.best.get(name, 0.0):
            self.position.best = {**values, "step": float(self.position.step)}
            checkpointing.save_best(self.directory, self.position, self.trainable)
        self.meter.since = time.monotonic()

    def save(self) -> None:
        """A checkpoint of this moment."""
        self.position.schedule = self.schedule.state()
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        checkpointing.save(self.directory, self.position, self.trainable, state)

    def load(self, checkpoint: checkpointing.Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.position = checkpoint.position
        self.schedule = Schedule.of(checkpoint.position.schedule)
        self.earlier = checkpoint.position.seconds
        with torch.no_grad():
            for name, tensor in self.trainable.items():
                tensor.copy_(checkpoint.weights[name])
        self.optimizer.load_state_dict(checkpoint.state["optimizer"])
        torch.set_rng_state(checkpoint.state["random"])
