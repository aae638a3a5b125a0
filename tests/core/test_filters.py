"""Texts that were said before, nearly so, or in another language."""

from __future__ import annotations

import itertools
import random

import pytest

from speculators_core.data.filters import Language, Unheard, _triples
from speculators_core.errors import InputError

STORY = "Sam has twelve red apples in a box and gives three of them to his friend Mia today."


def test_the_same_words_are_one_question_whatever_their_case_and_spacing() -> None:
    unheard = Unheard(0.9)
    assert unheard.judge(STORY) is None
    assert unheard.judge(STORY.upper().replace(" ", "  ")) == "the same question"


def test_a_changed_word_is_near_at_a_low_threshold_only() -> None:
    changed = STORY.replace("today", "now")
    assert [Unheard(0.8).judge(STORY), Unheard(0.8).judge(changed)] == [None, None]
    for near, expected in ((0.8, "nearly the same question"), (0.95, None)):
        unheard = Unheard(near)
        unheard.judge(STORY)
        assert unheard.judge(changed) == expected


def test_what_was_dropped_is_not_remembered() -> None:
    unheard = Unheard(0.8)
    unheard.judge(STORY)
    assert unheard.judge(f"{STORY} Why?") == "nearly the same question"
    assert unheard.judge(f"{STORY} Why?") == "nearly the same question"


@pytest.mark.parametrize("near", [0.3, 0.6, 0.9, 1.0])
def test_no_near_duplicate_is_missed_by_the_prefix_filter(near: float) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choice("abc") for _ in range(rng.randint(1, 9))) for _ in range(150)]
    unheard = Unheard(near)
    kept = [text for text in texts if unheard.judge(text) is None]
    for one, other in itertools.combinations(map(_triples, kept), 2):
        assert len(one & other) < near * len(one | other)
    brute: list[frozenset[int]] = []
    for triples in map(_triples, texts):
        if all(len(triples & b) < near * len(triples | b) for b in brute):
            brute.append(triples)
    assert len(brute) == len(kept)


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("Tom has three bags with four apples each. How many apples does he have?", "en", True),
        ("Tom hat drei Beutel mit je vier Äpfeln. Wie viele Äpfel hat er?", "en", False),
        ("Tom hat drei Beutel mit je vier Äpfeln. Wie viele Äpfel hat er?", "de", True),
        ("Ile jabłek ma Tomek, jeśli kupił cztery i zjadł jedno?", "en", False),
        ("Сколько яблок осталось у Тома?", "ru", True),
        ("りんごは何個ありますか", "en", False),
        ("Sarah has 12 pens.", "en", True),  # a few words are of no language for sure
        ("7 + 5 = 12", "de", True),
        ("def add(x): return x + 1", "en", True),
        ("", "en", True),
    ],
)
def test_another_language_is_told_where_it_is_clear(
    text: str, language: str, expected: bool
) -> None:
    assert Language(language).spoken_in(text) is expected


def test_a_language_that_can_not_be_told_is_refused() -> None:
    with pytest.raises(InputError, match="no language 'xx'") as refused:
        Language("xx")
    assert ", en, " in str(refused.value.hint)
