"""Does the converted draft predict its verifier? First-token acceptance on a few prompts.

The verifier answers the built-in prompts greedily; then the draft sees the true tokens and states
(teacher forcing) and proposes the token after the next one. The share that the verifier itself
chose is what a greedy server accepts at the first drafted position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from speculators_core.decode.prompt import question_ids
from speculators_core.errors import CheckpointError
from speculators_core.models.eagle3 import Eagle3Draft
from speculators_core.models.verifier import Verifier

PROMPTS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "A book costs $8 and a pen costs $2. How much do 3 books and 4 pens cost together?",
    "A train travels 60 miles in one hour. How far does it travel in 4 hours?",
    "Why is the sky blue? Answer in two sentences.",
    "Write a Python function that returns the larger of two numbers.",
    "Name three things to pack for a day at the beach, and why.",
)
_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Answered:
    """Prompt and greedy answer as one row of ids [1, S]; the answer starts at `start`."""

    ids: Tensor
    start: int


@torch.no_grad()
def answer_prompts(verifier: Verifier, prompts: Sequence[str] = PROMPTS) -> list[Answered]:
    """The verifier's own greedy answers, all prompts in one batch."""
    rows = [question_ids(verifier.tokenizer, prompt) for prompt in prompts]
    pad, longest = verifier.tokenizer.pad_token_id or 0, max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    out = verifier.model.generate(
        ids.to(verifier.device),
        attention_mask=mask.to(verifier.device),
        max_new_tokens=_ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=pad,
    )
    answers = []
    for row, prompt in zip(out[:, longest:].tolist(), rows, strict=True):
        ends = [i for i, token in enumerate(row) if token in verifier.stop_ids]
        answer = row[: ends[0] + 1] if ends else row
        answers.append(
            Answered(torch.tensor([prompt + answer], device=verifier.device), len(prompt))
        )
    return answers


@torch.no_grad()
def first_token_acceptance(
    draft: Eagle3Draft, verifier: Verifier, answered: Sequence[Answered], aux_layers: Sequence[int]
) -> float:
    """The share, in 0..1, of answer tokens that the draft's first step foresaw.

    Raises `CheckpointError` where the draft's logits are not finite.
    """
    right = total = 0
    for one in answered:
        with verifier.watching(aux_layers) as seen:
            verifier.stack(one.ids)
        aux = torch.cat([seen[k] for k in aux_layers], dim=-1)  # (1, S, n_aux*H)
        logits = _first_step(draft, one.ids, aux)  # (1, S-1, dv); row t foresees token t+2
        if not torch.isfinite(logits).all():
            raise CheckpointError(
                "the draft's logits are not finite",
                where="lm_head.weight",
                hint="the checkpoint is damaged, or its precision overflowed",
            )
        # a chain starts once the verifier has produced its own token: t + 1 >= start
        chosen = draft.to_verifier_ids(logits.argmax(dim=-1))[0, one.start - 1 : -1]
        truth = one.ids[0, one.start + 1 :]
        right += int((chosen == truth).sum())
        total += len(truth)
    return right / total if total else 0.0


def _first_step(draft: Eagle3Draft, ids: Tensor, aux: Tensor) -> Tensor:
    hidden = draft.combine(aux[:, :-1].to(draft.fc.weight.dtype))
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
    normed, _ = draft.step(ids[:, 1:], hidden, positions, _causal)
    return draft.logits(normed)


def _causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
