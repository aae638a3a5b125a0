"""How good the draft is now: predicted on validation chats, measured by the reference engine.

The prediction is cheap: the training loss's own steps over chats that are not trained on. The
measurement is the thing itself: answers to held-out prompts, decoded with the draft as it is. Where
there are prompts, it is what the best weights are picked by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from speculators_core.data.prepare import Prepared
from speculators_core.decode.eagle import EagleDrafter
from speculators_core.decode.engine import SpeculativeDecoder
from speculators_core.decode.prompt import chat_ids
from speculators_core.errors import Stopped
from speculators_core.evaluate.acceptance import Counts, acceptance, counted
from speculators_core.evaluate.prompts import read_prompts
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier
from speculators_core.params import SamplingParams, TrainParams
from speculators_core.training.checkpointing import Position
from speculators_core.training.world import World

PREDICTED = "served_acceptance_length"
MEASURED = "measured_acceptance_length"


@dataclass(frozen=True)
class Measurement:
    """Held-out prompts, and who answers them."""

    verifier: Verifier
    prompts: list[list[int]]
    speculative_tokens: int
    max_tokens: int

    @torch.no_grad()
    def of(
        self, draft: Eagle3Draft, world: World, stopping: Callable[[], bool]
    ) -> dict[str, float]:
        """Acceptance length and share of each position, greedily; every process answers its part.

        They wait for each other after every prompt, so that none waits longer than an answer
        takes. Raises `Stopped` between two prompts.
        """
        k = self.speculative_tokens
        decoder = SpeculativeDecoder(self.verifier, EagleDrafter(draft, self.verifier), k)
        sampling = SamplingParams(max_tokens=self.max_tokens)
        histogram = torch.zeros(k + 1, dtype=torch.int64)
        for first in range(0, len(self.prompts), world.size):
            if world.heard(stopping()):
                raise Stopped("stopped while acceptance was measured; it can resume")
            at, mine = first + world.rank, torch.zeros_like(histogram)
            for prompt in self.prompts[at : at + 1]:  # none is left for some in the last round
                mine = torch.tensor(counted(list(decoder.generate(prompt, sampling)), k).histogram)
            histogram += world.sum(mine).cpu()
        told = acceptance([Counts(tuple(histogram.tolist()))], k)
        shares = {f"measured_acceptance_{i}": share for i, share in enumerate(told.per_position)}
        return {MEASURED: told.acceptance_length, **shares}


@dataclass
class Contest:
    """Which weights are the best so far, by the number `name`; `over` once `patience` judgements
    in a row were all below them.
    """

    name: str
    patience: int | None
    over: bool = False

    def won(self, found: Mapping[str, float], position: Position) -> bool:
        """Whether the weights of this position are the best, which it then remembers."""
        if found[self.name] >= position.best.get(self.name, 0.0):
            position.best = {**found, "step": float(position.step)}
            position.stale = 0
            return True
        position.stale += 1
        self.over = self.patience is not None and position.stale >= self.patience
        return False

    def told(self, position: Position) -> str:
        """Why it is over."""
        best = position.best
        return (
            f"ended early at step {position.step}: {position.stale} times in a row {self.name} "
            f"was below {best[self.name]:.3f}, of step {best['step']:.0f}"
        )


def measurement(
    params: TrainParams, prepared: Prepared, validation: Sequence[int], verifier: Verifier
) -> Measurement | None:
    """What the parameters ask for; None where it is nothing, or where no prompt is known."""
    if not params.evaluate_every:
        return None
    if params.held_out:
        asked = read_prompts(Path(params.held_out), params.evaluate_prompts)
        prompts = [chat_ids(verifier.tokenizer, p.messages, p.where) for p in asked]
    else:
        prompts = openings(prepared, validation)
    longest = verifier.facts.max_position_embeddings - params.evaluate_tokens
    fitting = [prompt for prompt in prompts if len(prompt) < longest][: params.evaluate_prompts]
    if not fitting:
        return None
    return Measurement(
        verifier, fitting, params.speculative_tokens or params.ttt_steps, params.evaluate_tokens
    )


def openings(prepared: Prepared, documents: Sequence[int]) -> list[list[int]]:
    """Of each chat, what comes before the assistant's first token, as the template wrote it."""
    found = []
    for number in documents:
        ids, mask = prepared.document(number)
        first = int(mask.int().argmax())
        if first:
            found.append(ids[:first].tolist())
    return found
