"""Texts that were said before, nearly so, or in another script."""

from __future__ import annotations

import itertools
import random

import pytest

from speculators_core.data.filters import Unheard, _triples, is_in_script

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
    ("text", "script", "expected"),
    [
        ("How many apples?", "latin", True),
        ("Сколько яблок?", "latin", False),
        ("Сколько яблок?", "cyrillic", True),
        ("りんごは何個ですか", "cjk", True),
        ("사과가 몇 개", "cjk", True),
        ("Przykład łódź", "latin", True),
        ("mostly latin words with one тут", "latin", True),
        ("1 + 1 = 2", "greek", True),
        ("Сколько", "any", True),
    ],
)
def test_a_script_is_told_from_most_of_the_letters(text: str, script: str, expected: bool) -> None:
    assert is_in_script(text, script) is expected
