"""Tokens to text as they come, a token at a time. Light: needs a tokenizer, no torch.

A token's text is decode(all before and it) minus decode(all before), found by decoding a short
window instead of everything. Bytes that don't make a whole character yet are held back: the token
that completes it carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_BROKEN = "�"  # what decoders put for bytes that are no character (yet)
PROMPT_WINDOW = 6  # prompt tokens that the first text continues from
_HELD_LIMIT = 12  # tokens after which broken bytes are shown as such: they won't be completed


class Decodes(Protocol):
    """The one thing that is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """The text of one answer's tokens, drafted ones included.

    Special tokens have no text unless `show_special`.
    """

    def __init__(
        self, tokenizer: Decodes, prompt_ids: Sequence[int] = (), *, show_special: bool = False
    ) -> None:
        self._tail = _Tail(tokenizer, list(prompt_ids[-PROMPT_WINDOW:]), show_special)

    def step(
        self, drafted_ids: Sequence[int], accepted: int, emitted_ids: Sequence[int]
    ) -> tuple[list[str], list[str]]:
        """Texts of a step's drafted and emitted tokens, one each; then the emitted ones count.

        Drafted texts continue from the text before the step. Held-back bytes of a token are "".
        """
        agreed = min(accepted, len(emitted_ids))
        emitted = [self._tail.push(token) for token in emitted_ids[:agreed]]
        if len(drafted_ids) > agreed:
            fork = self._tail.fork()
            drafted = [*emitted, *(fork.push(token) for token in drafted_ids[agreed:])]
        else:
            drafted = list(emitted)
        emitted += [self._tail.push(token) for token in emitted_ids[agreed:]]
        return drafted, emitted

    def finish(self) -> str:
        """What is still held back when the answer ends, broken bytes shown as such."""
        return self._tail.flush()


class _Tail:
    """The last tokens: `ids[:read]` are shown already, the rest is held back."""

    def __init__(self, tokenizer: Decodes, ids: list[int], show_special: bool) -> None:
        self.tokenizer = tokenizer
        self.show_special = show_special
        self.ids = ids
        self.read = len(ids)
        self.shown = self._text(ids).rstrip(_BROKEN)

    def fork(self) -> _Tail:
        other = object.__new__(_Tail)
        other.__dict__.update(self.__dict__, ids=list(self.ids))
        return other

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self._text(self.ids)
        if text.endswith(_BROKEN) and len(self.ids) - self.read <= _HELD_LIMIT:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._text(self.ids))

    def _show(self, text: str) -> str:
        """The part of `text` that is new; the window then starts at the tokens that made it."""
        new = text[len(self.shown) :]
        if new:
            self.ids = self.ids[self.read :]
            self.shown = self._text(self.ids)
        self.read = len(self.ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=not self.show_special)
