"""Incremental text is, piece by piece, what decoding everything at once gives."""

from __future__ import annotations

import random

import pytest

from speculators_core.decode.detokenize import Detokenizer
from tests.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()  # one token a byte: every character beyond ASCII comes in pieces
SAMPLE = "Grüße, 日本語 and 🦜🦜 — naïve café"


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_the_pieces_of_a_plain_answer_join_to_its_text():
    detokenizer = Detokenizer(TOKENIZER, ids("Hello "))
    texts = [detokenizer.step((), 0, [token])[1][0] for token in ids(SAMPLE)]
    assert "".join(texts) == SAMPLE
    assert detokenizer.finish() == ""


def test_an_incomplete_character_is_held_back_until_its_last_byte():
    detokenizer = Detokenizer(TOKENIZER)
    _, texts = detokenizer.step((), 0, ids("é🦜"))
    assert texts == ["", "é", "", "", "", "🦜"]


def test_a_character_may_begin_in_the_prompt_and_end_in_the_answer():
    first, *rest = ids("🦜!")
    detokenizer = Detokenizer(TOKENIZER, [*ids("ab"), first])
    assert "".join(detokenizer.step((), 0, rest)[1]) == "🦜!"


def test_rejected_drafts_have_the_text_they_would_have_added():
    detokenizer = Detokenizer(TOKENIZER, ids("x"))
    drafted, emitted = detokenizer.step(ids("abé"), 1, ids("aZ"))
    assert drafted == ["a", "b", "", "é"]
    assert emitted == ["a", "Z"]
    assert detokenizer.step((), 0, ids("!"))[1] == ["!"]


def test_accepted_drafts_and_emitted_tokens_have_the_same_text():
    detokenizer = Detokenizer(TOKENIZER)
    drafted, emitted = detokenizer.step(ids("né"), 3, [*ids("né"), *ids("e")])
    assert drafted == ["n", "", "é"]
    assert emitted == ["n", "", "é", "e"]


def test_a_step_that_was_cut_by_a_stop_shows_all_that_was_drafted():
    detokenizer = Detokenizer(TOKENIZER)
    drafted, emitted = detokenizer.step(ids("abc"), 3, ids("a"))
    assert drafted == ["a", "b", "c"]
    assert emitted == ["a"]


def test_what_never_became_a_character_is_shown_broken_at_the_end():
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.step((), 0, ids("🦜")[:2])[1] == ["", ""]
    assert detokenizer.finish() == "�"


def test_bytes_that_are_no_text_do_not_hold_back_the_answer_for_ever():
    stray = ids("🦜")[1]
    detokenizer = Detokenizer(TOKENIZER)
    texts = [detokenizer.step((), 0, [stray])[1][0] for _ in range(30)]
    assert any(texts)
    assert "".join(texts) + detokenizer.finish() == "�" * 30


@pytest.mark.parametrize(("show", "text"), [(False, "ab"), (True, "a<|im_end|>b")])
def test_special_tokens_have_text_only_where_asked(show, text):
    detokenizer = Detokenizer(TOKENIZER, show_special=show)
    _, texts = detokenizer.step((), 0, [*ids("a"), TOKENIZER.eos_token_id, *ids("b")])
    assert "".join(texts) == text


def test_random_steps_join_to_what_decoding_at_once_gives():
    rng = random.Random(1)
    answer = ids(SAMPLE * 6)
    detokenizer, at, joined = Detokenizer(TOKENIZER), 0, ""
    while at < len(answer):
        k = rng.randint(0, 5)
        accepted = min(rng.randint(0, k), len(answer) - at - 1)
        wrong = [rng.randrange(200) for _ in range(k - accepted)]
        emitted = answer[at : at + accepted + 1]
        drafted_texts, emitted_texts = detokenizer.step(
            answer[at : at + accepted] + wrong, accepted, emitted
        )
        assert drafted_texts[:accepted] == emitted_texts[:accepted]
        assert len(drafted_texts) == k
        joined += "".join(emitted_texts)
        at += len(emitted)
    assert joined == SAMPLE * 6
