"""Messages to prompt tokens, as a server would make them."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from speculators_core.errors import InputError


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    where: str | None = None,
    *,
    opened: bool = True,
) -> str:
    """The chat template applied, `opened` for the answer.

    Raises `InputError` where the tokenizer has no template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the verifier has no chat template",
            where=where,
            hint="give it plain prompts (/v1/completions), or add chat_template.jinja",
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opened
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(
            f"the verifier's chat template refuses these messages: {error}", where=where
        ) from error
    return str(text)


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], where: str | None = None
) -> list[int]:
    """`chat_text` as tokens; no second BOS is added. Raises as it does."""
    return rendered_ids(tokenizer, chat_text(tokenizer, messages, where))


def question_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """One user turn; the plain text where there is no chat template."""
    if not tokenizer.chat_template:
        return text_ids(tokenizer, question)
    return chat_ids(tokenizer, [{"role": "user", "content": question}])


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text that a template has made, special tokens and all."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Plain text, with what the tokenizer itself puts around it."""
    return list(tokenizer(text)["input_ids"])
