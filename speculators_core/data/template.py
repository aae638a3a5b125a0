"""A verifier's chat template, as its server applies it: text and tokens of chats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.errors import CheckpointError, DataError, InputError
from speculators_core.models.stops import generation_of, stops_of
from speculators_core.models.verifier_config import VerifierFacts

Turns = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class Unmaskable(DataError):
    """The template can't show which tokens of this chat the assistant wrote."""


@dataclass(frozen=True)
class ChatTemplate:
    """`stops`: tokens by which the model ends an answer. `enable_thinking`: the switch that
    templates of reasoning models have; None leaves it where the template has it.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int] = frozenset()
    enable_thinking: bool | None = None

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def text(self) -> str:
        """The template itself; empty where there is none."""
        named = self.tokenizer.chat_template
        return named if isinstance(named, str) else json.dumps(named or "", sort_keys=True)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def has_markers(self) -> bool:
        """Whether the template itself says what the assistant writes."""
        return "{% generation" in self.text.replace("{%-", "{%")

    def check(self) -> None:
        """Raise unless chats can be rendered: `DataError`, `InputError` for the switch."""
        if not self.tokenizer.chat_template:
            raise DataError(
                "the verifier's tokenizer has no chat template",
                hint="use an instruction-tuned verifier, or add chat_template.jinja to its "
                "directory; plain text (`text`) needs none",
            )
        if not self.tokenizer.is_fast:
            raise DataError("the verifier's tokenizer can't tell where its tokens lie in the text")
        if self.enable_thinking is not None and "enable_thinking" not in self.text:
            raise InputError(
                "the verifier's chat template has no switch enable_thinking",
                where="enable_thinking",
                hint="leave it empty for this verifier",
            )

    def render(self, messages: Turns, tools: Tools = (), *, opened: bool = False) -> str:
        """The chat as text, `opened` for the next answer. Raises `Unmaskable` where the template
        refuses it.
        """
        with _refusals():
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=opened, **self._how(tools)
                )
            )

    def marked(self, messages: Turns, tools: Tools = ()) -> tuple[list[int], list[bool]]:
        """Ids, and what the template's `{% generation %}` blocks cover."""
        with _refusals():
            rendered: Any = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self._how(tools),
            )
        return list(rendered["input_ids"]), [bool(m) for m in rendered["assistant_masks"]]

    def _how(self, tools: Tools) -> dict[str, Any]:
        thinking = self.enable_thinking
        return {
            **({} if thinking is None else {"enable_thinking": thinking}),
            **({"tools": list(tools)} if tools else {}),
        }


def load_template(facts: VerifierFacts, enable_thinking: bool | None = None) -> ChatTemplate:
    """The template of a verifier with its tokenizer. Raises `CheckpointError`."""
    tokenizer = load_tokenizer(facts)
    stops = frozenset(stops_of(generation_of(facts.path), tokenizer))
    return ChatTemplate(tokenizer, stops, enable_thinking)


def load_tokenizer(facts: VerifierFacts) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer alone."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            facts.path, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the verifier's tokenizer can't be loaded: {str(error).splitlines()[0]}",
            where=facts.path,
        ) from error
    return tokenizer


class _refusals(AbstractContextManager[None]):
    """Turns a template's own complaint into `Unmaskable`."""

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TemplateError | ValueError | IndexError | TypeError) and not (
            isinstance(error, DataError)
        ):
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unmaskable(f"the chat template refuses the chat: {reason}") from error
