"""From chats to token ids and loss masks, and what a mask means: defined here and nowhere else.

A mask m_t is true where the assistant wrote token x_t: its text and the end-of-turn token that
stops it, not the role header before and not what the template puts behind. A run of true entries
is one turn.

A draft chain that starts at t has seen x_{t+1} (the verifier's newest token) and predicts
x_{t+2}, x_{t+3}, … In serving that happens only after the verifier itself produced x_{t+1}. So
step k of the chain at t counts exactly if x_{t+1} and x_{t+2+k} are tokens of the same turn
(FORMATS: serving-faithful rule). The first token of a turn is never predicted by a draft; the
last, its end-of-turn token, is predicted and starts nothing. `steps_left` is that rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.errors import DataError


@dataclass(frozen=True)
class Masked:
    """Token ids [S] of a chat and the mask [S] of what the assistant wrote."""

    ids: list[int]
    mask: list[bool]


class Unmaskable(DataError):
    """The template can't show which tokens of this chat the assistant wrote."""


def steps_left(mask: Tensor) -> Tensor:
    """[S] bool → [S] int64: how many steps the draft chain starting at t can be checked for.

    Step k counts iff `steps_left[t] > k`.
    """
    length = len(mask)
    index = torch.arange(length, device=mask.device)
    stops = torch.where(mask, length, index)  # first masked-out position at or after t
    after = torch.flip(torch.cummin(torch.flip(stops, [0]), 0).values, [0])
    left = torch.zeros(length, dtype=torch.int64, device=mask.device)
    if length > 1:
        left[:-1] = torch.where(mask[1:], after[1:] - index[1:] - 1, 0)
    return left


def has_generation_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template itself says what the assistant writes."""
    template = tokenizer.chat_template
    return isinstance(template, str) and "{% generation" in template.replace("{%-", "{%")


def mask_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> Masked:
    """Ids and mask of one chat: by the template's `{% generation %}` blocks where it has them,
    else by rendering the chat turn by turn.

    Raises `Unmaskable` where neither is sound: the template refuses the chat, renders an earlier
    turn differently once more follows, alters the answer, or a token crosses into it.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the verifier's tokenizer has no chat template",
            hint="use an instruction-tuned verifier, or add chat_template.jinja to its directory",
        )
    if not tokenizer.is_fast:
        raise DataError("the verifier's tokenizer can't tell where its tokens lie in the text")
    if has_generation_markers(tokenizer):
        masked = _by_markers(tokenizer, list(messages))
    else:
        masked = _by_prefixes(tokenizer, list(messages))
    if not any(masked.mask):
        raise Unmaskable("no token of the chat is the assistant's")
    if all(masked.mask):
        raise Unmaskable("every token of the chat counts as the assistant's")
    return masked


def _by_markers(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Masked:
    with _refusals():
        rendered: Any = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    ids = list(rendered["input_ids"])
    mask = [bool(m) for m in rendered["assistant_masks"]]
    return Masked(ids, _cut_after_end_of_turn(ids, mask, set(tokenizer.all_special_ids)))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Masked:
    text = _render(tokenizer, messages)
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = set(tokenizer.all_special_ids)
    mask = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end, behind = _answer_span(tokenizer, messages[: i + 1], text)
        for j, (first, last) in enumerate(offsets):
            if first < start < last:
                raise Unmaskable("a token lies across the start of an answer")
            inside = start <= first < end and last > first
            stops = end <= first < behind and ids[j] in special
            mask[j] = mask[j] or inside or stops
    return Masked(ids, _cut_after_end_of_turn(ids, mask, special))


def _answer_span(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], text: str
) -> tuple[int, int, int]:
    """Where the last of `messages` begins and ends in `text`, and what the template puts behind
    it ends."""
    before = _render(tokenizer, messages[:-1], opened=True)
    through = _render(tokenizer, messages)
    if not text.startswith(through) or not through.startswith(before):
        raise Unmaskable("the template renders a turn differently once more follows")
    answer, added = messages[-1]["content"].strip(), through[len(before) :]
    if not added.lstrip().startswith(answer):
        raise Unmaskable("the template alters the answer")
    end = len(before) + len(added) - len(added.lstrip()) + len(answer)
    return len(before), end, len(through)


def _cut_after_end_of_turn(ids: list[int], mask: list[bool], special: set[int]) -> list[bool]:
    """Drop what follows the first special token of each run: the model stops there."""
    result, ended = list(mask), False
    for i, written in enumerate(mask):
        ended = ended and written
        result[i] = written and not ended
        ended = ended or (written and ids[i] in special)
    return result


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, opened: bool = False
) -> str:
    with _refusals():
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        )


class _refusals:
    """Turns a template's own complaint into `Unmaskable`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TemplateError | ValueError | IndexError) and not isinstance(
            error, DataError
        ):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unmaskable(f"the chat template refuses the chat: {reason}") from error
