"""Prompt lookup: the longest suffix that occurred before, at its earliest place."""

from __future__ import annotations

import random

from speculators_core.decode.ngram import NgramDrafter
from speculators_core.decode.sampling import Sampler
from speculators_core.params import SamplingParams


def propose(context: list[int], k: int = 3, **sizes: int) -> tuple[int, ...]:
    drafting = NgramDrafter(**sizes).begin(context[0], 1000, Sampler(SamplingParams()))
    drafting.absorb(context[1:], None)
    return drafting.propose(k).ids


def by_search(context: list[int], k: int, longest: int, shortest: int) -> tuple[int, ...]:
    for size in range(min(longest, len(context) - 1), shortest - 1, -1):
        for start in range(len(context) - size):
            if context[start : start + size] == context[-size:]:
                return tuple(context[start + size : start + size + k])
    return ()


def test_what_followed_the_longest_repeated_suffix_is_proposed():
    assert propose([1, 2, 3, 9, 9, 2, 3, 7, 1, 2, 3]) == (9, 9, 2)


def test_of_equal_matches_the_earliest_is_taken():
    assert propose([5, 1, 5, 2, 5]) == (1, 5, 2)


def test_fewer_tokens_are_proposed_where_fewer_followed():
    assert propose([7, 7]) == (7,)


def test_nothing_is_proposed_where_nothing_repeats():
    assert propose([1, 2, 3, 4]) == ()
    assert propose([1]) == ()


def test_a_match_shorter_than_the_shortest_does_not_count():
    assert propose([1, 2, 3, 1], shortest=2) == ()


def test_growing_by_steps_agrees_with_searching_the_whole_context():
    rng = random.Random(3)
    for _ in range(50):
        context = [rng.randrange(4)]
        drafting = NgramDrafter(4, 2).begin(context[0], 1000, Sampler(SamplingParams()))
        for _ in range(12):
            settled = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
            context += settled
            drafting.absorb(settled, None)
            assert drafting.propose(5).ids == by_search(context, 5, 4, 2)
