"""Loss masks: which tokens the assistant wrote, and which draft steps they allow."""

from __future__ import annotations

import pytest
import torch

from speculators_core.data.masks import Masked, mask_chat, mask_turns, steps_left
from speculators_core.data.template import ChatTemplate, Unmaskable, load_template
from speculators_core.errors import DataError, InputError
from speculators_core.models.verifier_config import read_verifier
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


def template_of(text: str | None, thinking: bool | None = None) -> ChatTemplate:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, frozenset({tokenizer.eos_token_id}), thinking)


def said(template: ChatTemplate, messages: list[dict], tools: tuple[dict, ...] = ()) -> list[str]:
    """The text of each run of masked tokens."""
    return runs_of(template, mask_chat(template, messages, tools))


def runs_of(template: ChatTemplate, masked: Masked) -> list[str]:
    runs: list[list[int]] = []
    for i, (token, on) in enumerate(zip(masked.ids, masked.mask, strict=True)):
        if on and (i == 0 or not masked.mask[i - 1]):
            runs.append([])
        if on:
            runs[-1].append(token)
    return [template.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, PLAIN], ids=["markers", "prefixes"])
def test_a_turn_is_its_text_and_its_end_of_turn_token(template: str) -> None:
    assert said(template_of(template), CHAT) == ["one two<|im_end|>", "three<|im_end|>"]


TURN_TAGS = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else "
    "m['role'] %}{{ '<|im_start|>' + role + '\\n' }}{% if role == 'model' %}{% generation %}"
    "{{ m['content'] | trim + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ m['content'] | trim + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m['content'] + '<|endoftext|>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("marked", [tiny.CHAT_TEMPLATE, TURN_TAGS, INSTRUCT])
def test_b2_rendering_prefixes_gives_what_the_generation_blocks_say(marked: str) -> None:
    plain = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_markers = template_of(marked)
    assert by_markers.has_markers and not template_of(plain).has_markers
    expected = mask_chat(by_markers, CHAT)
    assert mask_chat(template_of(plain), CHAT) == expected
    assert len(runs_of(by_markers, expected)) == 2


def test_a_template_without_a_generation_prompt_is_understood() -> None:
    assert said(template_of(BRACKETS), CHAT) == [
        " one two<|endoftext|>",
        " three<|endoftext|>",
    ]


def test_without_an_end_of_turn_token_the_turn_ends_with_its_text() -> None:
    assert said(template_of(NO_END), CHAT) == ["one two", "three"]


def test_consecutive_turns_of_one_role_are_masked_apart() -> None:
    messages = [*CHAT[:2], {"role": "assistant", "content": "more"}]
    assert said(template_of(PLAIN), messages) == ["one two<|im_end|>", "more<|im_end|>"]


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
        mask_chat(template_of(template), messages)


def test_b3_markers_around_everything_are_refused() -> None:
    everything = (
        "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(Unmaskable, match="every token"):
        mask_chat(template_of(everything), CHAT)


def test_b3_markers_around_nothing_are_refused() -> None:
    with pytest.raises(Unmaskable, match="no token of the chat"):
        mask_chat(template_of(PLAIN + "{% generation %}{% endgeneration %}"), CHAT)


THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n' + (m.get('reasoning_content') or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
"""As Qwen3 has it: thoughts of the last answer only, an empty block where thinking is off."""
THOUGHT = [CHAT[0], {"role": "assistant", "content": "two", "reasoning_content": "1+1"}]


def test_b4_thinking_on_and_off_are_each_masked_as_their_server_writes_them() -> None:
    on, off = template_of(THINKING, True), template_of(THINKING, False)
    one, other = mask_chat(on, THOUGHT), mask_chat(off, CHAT[:2])
    assert runs_of(on, one) == ["<think>\n1+1\n</think>\n\ntwo<|im_end|>"]
    assert runs_of(off, other) == ["one two<|im_end|>"]
    assert "<think>\n\n</think>" in off.tokenizer.decode(other.ids)
    assert other.doubt is None


def test_b4_an_empty_block_that_the_server_would_never_write_is_no_answer_and_a_doubt() -> None:
    on = template_of(THINKING, True)
    masked = mask_chat(on, CHAT[:2])
    assert runs_of(on, masked) == ["one two<|im_end|>"]
    assert masked.doubt is not None and "empty block" in masked.doubt


def test_b4_thoughts_in_the_data_are_refused_where_thinking_is_off() -> None:
    with pytest.raises(Unmaskable, match="opens an answer otherwise"):
        mask_chat(template_of(THINKING, False), THOUGHT)


def test_b4_a_switch_that_the_template_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="no switch enable_thinking"):
        mask_chat(template_of(PLAIN, False), CHAT)


def test_a_history_that_is_rendered_otherwise_gives_a_sample_an_answer() -> None:
    off = template_of(THINKING, False)
    first, second = mask_turns(off, CHAT)
    assert runs_of(off, first) == ["one two<|im_end|>"]
    assert runs_of(off, second) == ["three<|im_end|>"]
    opened = off.render(CHAT[:3], opened=True)
    assert off.tokenizer.decode(second.ids).startswith(opened), "what its server would have seen"
    assert second.doubt is not None and "sample of its own" in second.doubt


CALLING = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ '<tool_call>' + c['function'] | tojson + "
    "'</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]


def test_b5_calls_of_tools_are_the_assistants_and_what_tools_say_is_not() -> None:
    template = template_of(CALLING)
    call, answer = said(template, CALLED, (CALL,))
    assert call.startswith("<tool_call>{") and call.endswith("</tool_call><|im_end|>")
    assert answer == "It is 42.<|im_end|>"
    with pytest.raises(Unmaskable, match="does not render calls"):
        mask_chat(template_of(PLAIN), CALLED)


def test_no_chat_template_is_an_error_that_says_what_is_needed() -> None:
    with pytest.raises(DataError, match="no chat template"):
        mask_chat(template_of(None), CHAT)


def test_the_real_template_masks_exactly_what_the_model_would_write(smollm2) -> None:
    template = load_template(read_verifier(smollm2))
    tokenizer = template.tokenizer
    assert said(template, CHAT) == ["one two<|im_end|>", "three<|im_end|>"]
    masked = mask_chat(template, CHAT[:2])
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
