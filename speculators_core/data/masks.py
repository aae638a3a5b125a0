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

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculators_core.data.chats import REASONING
from speculators_core.data.template import ChatTemplate, Tools, Turns, Unmaskable

_EMPTY_BLOCK = re.compile(r"<(\w+)>\s*</\1>")  # what templates put where nothing was thought


@dataclass(frozen=True)
class Masked:
    """Token ids [S] of a chat and the mask [S] of what the assistant wrote.

    `doubt`: what is sound, but may be otherwise than the verifier's server makes it.
    """

    ids: list[int]
    mask: list[bool]
    doubt: str | None = None


class Unstable(Unmaskable):
    """The template renders an earlier turn otherwise once more follows."""


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


def mask_turns(template: ChatTemplate, messages: Turns, tools: Tools = ()) -> list[Masked]:
    """The chat as samples: one where the template renders a history as it rendered its turns.

    Where it does not (templates of reasoning models drop earlier thoughts), each answer is a
    sample of its own behind the history that its server would have seen, which is what it is
    served with. Raises as `mask_chat`.
    """
    try:
        return [mask_chat(template, messages, tools)]
    except Unstable:
        ends = [i for i, m in enumerate(messages, 1) if m["role"] == "assistant"]
        return [_last_answer(template, messages[:end], tools) for end in ends]


def mask_chat(template: ChatTemplate, messages: Turns, tools: Tools = ()) -> Masked:
    """Ids and mask of one chat: by the template's `{% generation %}` blocks where it has them,
    else by rendering the chat turn by turn.

    Raises `Unmaskable` where neither is sound: the template refuses the chat, renders an earlier
    turn differently once more follows (`Unstable`), alters the answer, or a token crosses into it.
    """
    template.check()
    if template.has_markers:
        ids, mask = template.marked(messages, tools)
        return _checked(Masked(ids, _until_stop(template, ids, mask, _is_rich(*messages))))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return _by_prefixes(template, messages, tools, answers)


def _last_answer(template: ChatTemplate, messages: Turns, tools: Tools) -> Masked:
    found = _by_prefixes(template, messages, tools, [len(messages) - 1])
    doubt = found.doubt or "an answer is a sample of its own, as its history is rendered otherwise"
    return Masked(found.ids, found.mask, doubt)


def _by_prefixes(
    template: ChatTemplate, messages: Turns, tools: Tools, answers: list[int]
) -> Masked:
    """The mask of these answers, found by comparing what is rendered up to and with each."""
    text = template.render(messages, tools)
    encoded: Any = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask, doubt = [False] * len(ids), None
    for i in answers:
        span = _answer_span(template, messages[: i + 1], tools, text)
        doubt = doubt or span.doubt
        turn = [False] * len(ids)
        for j, (first, last) in enumerate(offsets):
            if first < span.start < last:
                raise Unmaskable("a token lies across the start of an answer")
            inside = span.start <= first < span.end and last > first
            ends = span.end <= first < span.behind and ids[j] in template.special
            turn[j] = inside or ends
        turn = _until_stop(template, ids, turn, _is_rich(messages[i]))
        mask = [one or other for one, other in zip(mask, turn, strict=True)]
    return _checked(Masked(ids, mask, doubt))


@dataclass(frozen=True)
class _Span:
    """Where an answer begins and ends in the text, and what the template puts behind it ends."""

    start: int
    end: int
    behind: int
    doubt: str | None = None


def _answer_span(template: ChatTemplate, messages: Turns, tools: Tools, text: str) -> _Span:
    """The span of the last of `messages`."""
    before = template.render(messages[:-1], tools, opened=True)
    through = template.render(messages, tools)
    if not text.startswith(through):
        raise Unstable("the template renders a turn differently once more follows")
    if not through.startswith(before):
        raise Unmaskable("the template opens an answer otherwise than it renders one")
    message, added = messages[-1], through[len(before) :]
    answer = message["content"].strip()
    if _is_rich(message) and _is_shown(message, added):
        end = len(before) + len(added.rstrip())
        return _Span(len(before), end, len(through))
    if message.get("tool_calls"):
        raise Unmaskable("the template does not render calls of tools")
    lead = added.find(answer)
    put = added[:lead].strip()
    if lead < 0 or (put and not _EMPTY_BLOCK.fullmatch(put)):
        raise Unmaskable("the template alters the answer")
    end = len(before) + lead + len(answer)
    if not put:
        return _Span(len(before), end, len(through))
    doubt = "the template puts an empty block of thoughts before an answer"
    return _Span(len(before) + lead, end, len(through), doubt)


def _is_rich(*messages: Any) -> bool:
    """Whether the assistant wrote more than a text: all that the template adds is then its own."""
    return any(m.get(name) for m in messages for name in ("tool_calls", *REASONING))


def _is_shown(message: Any, added: str) -> bool:
    """Whether what the assistant wrote beside its text is in what the template made of it."""
    if calls := message.get("tool_calls"):
        return all(str(call["function"]["name"]) in added for call in calls)
    return any(str(message[name]).strip() in added for name in REASONING if message.get(name))


def _until_stop(
    template: ChatTemplate, ids: list[int], mask: list[bool], is_rich: bool
) -> list[bool]:
    """Drop what follows the token of each run by which the model stops.

    A run without any of the verifier's own stops ends with its first special token; where special
    tokens are part of the answer (calls of tools), nothing is dropped.
    """
    result, start = list(mask), 0
    while start < len(mask):
        if not mask[start]:
            start += 1
            continue
        end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
        run = range(start, end)
        stop = next((i for i in run if ids[i] in template.stops), None)
        if stop is None and not is_rich:
            stop = next((i for i in run if ids[i] in template.special), None)
        if stop is not None:
            result[stop + 1 : end] = [False] * (end - stop - 1)
        start = end
    return result


def _checked(masked: Masked) -> Masked:
    """Raises `Unmaskable` for a mask that can't be right."""
    if not any(masked.mask):
        raise Unmaskable("no token of the chat is the assistant's")
    if all(masked.mask):
        raise Unmaskable("every token of the chat counts as the assistant's")
    return masked
