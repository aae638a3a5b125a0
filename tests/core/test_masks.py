"""Loss masks: which tokens the assistant wrote, and which draft steps they allow."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from speculators_core.data.masks import Unmaskable, mask_chat, steps_left
from speculators_core.errors import DataError
from tests import tiny

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|endoftext|>' }}{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n\\n' }}{% endfor %}"
NO_END += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
    "{{ m['role'] + ': ' + m['content'] + '\\n' }}{% else %}{{ '...\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SHOUTING = "{% for m in messages %}{{ m['role'] + ': ' + m['content'].upper() + '\\n' }}"
SHOUTING += "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)

CHAT = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "one two"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "three"},
]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def said(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[str]:
    """The text of each run of masked tokens."""
    masked = mask_chat(tokenizer, messages)
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(masked.ids, masked.mask, strict=True)):
        if on and (i == 0 or not masked.mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, PLAIN], ids=["markers", "prefixes"])
def test_a_turn_is_its_text_and_its_end_of_turn_token(template: str) -> None:
    assert said(tokenizer_with(template), CHAT) == ["one two<|im_end|>", "three<|im_end|>"]


def test_rendering_prefixes_gives_what_the_markers_say() -> None:
    by_markers = mask_chat(tokenizer_with(tiny.CHAT_TEMPLATE), CHAT)
    assert mask_chat(tokenizer_with(PLAIN), CHAT) == by_markers


def test_a_template_without_a_generation_prompt_is_understood() -> None:
    assert said(tokenizer_with(BRACKETS), CHAT) == [
        " one two<|endoftext|>",
        " three<|endoftext|>",
    ]


def test_without_an_end_of_turn_token_the_turn_ends_with_its_text() -> None:
    assert said(tokenizer_with(NO_END), CHAT) == ["one two", "three"]


def test_consecutive_turns_of_one_role_are_masked_apart() -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": "more"}]
    assert said(tokenizer_with(PLAIN), messages) == ["one two<|im_end|>", "more<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (FORGETFUL, "differently once more follows"),
        (SHOUTING, "alters the answer"),
        (STRICT, "roles must alternate"),
    ],
)
def test_a_template_that_hides_the_answer_is_refused(template: str, says: str) -> None:
    messages = CHAT if template != STRICT else [CHAT[0], *CHAT]
    with pytest.raises(Unmaskable, match=says):
        mask_chat(tokenizer_with(template), messages)


def test_markers_around_everything_are_refused() -> None:
    everything = (
        "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(Unmaskable, match="every token"):
        mask_chat(tokenizer_with(everything), CHAT)


def test_no_chat_template_is_an_error_that_says_what_is_needed() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        mask_chat(tokenizer, CHAT)


def test_the_real_template_masks_exactly_what_the_model_would_write(smollm2) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert said(tokenizer, CHAT) == ["one two<|im_end|>", "three<|im_end|>"]
    masked = mask_chat(tokenizer, CHAT[:2])
    prompt = tokenizer.apply_chat_template(
        CHAT[:1], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert masked.ids[: len(prompt)] == list(prompt)
    assert masked.mask.index(True) == len(prompt)


def chains(mask: str) -> list[int]:
    return steps_left(torch.tensor([c == "x" for c in mask], dtype=torch.bool)).tolist()


def test_the_first_chain_starts_at_the_last_token_of_the_prompt() -> None:
    # positions  0 1 2 3 4 5    the turn is 2, 3, 4
    # t = 1: newest token x_2, first of the turn; x_3 and x_4 can be checked
    assert chains("..xxx.") == [0, 2, 1, 0, 0, 0]


def test_the_end_of_turn_token_is_predicted_but_starts_nothing() -> None:
    left = chains("..xxx.")
    assert left[2] == 1  # x_3 is newest, x_4 (end of turn) is predicted
    assert left[3] == 0  # x_4 is newest: the answer is over


def test_chains_never_reach_into_another_turn() -> None:
    assert chains(".xx.xxx") == [1, 0, 0, 2, 1, 0, 0]


def test_an_answer_of_one_token_trains_nothing() -> None:
    assert chains("..x..") == [0, 0, 0, 0, 0]


def test_a_cut_answer_counts_up_to_the_cut() -> None:
    assert chains("..xxx") == [0, 2, 1, 0, 0]


@pytest.mark.parametrize("mask", ["", "x", ".", "xx", ".x"])
def test_short_masks_have_no_chain_or_the_right_one(mask: str) -> None:
    assert sum(chains(mask)) == 0
