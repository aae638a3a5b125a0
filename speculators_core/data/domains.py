"""What the verifier is asked to write about: a system text, openings of questions, filters.

A domain is kept narrow on purpose where the training data is small: a speculator learns what it
has seen. Openings are built from small lists, so that a seed gives the same ones everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_PEOPLE = (
    ("Sam", "He"),
    ("Mia", "She"),
    ("Tom", "He"),
    ("Anna", "She"),
    ("Ben", "He"),
    ("Lucy", "She"),
    ("Max", "He"),
    ("Emma", "She"),
    ("Leo", "He"),
    ("Sara", "She"),
    ("Jack", "He"),
    ("Nina", "She"),
    ("Paul", "He"),
    ("Ella", "She"),
    ("Omar", "He"),
    ("Rosa", "She"),
)
_THINGS = (
    "apples",
    "books",
    "marbles",
    "stickers",
    "cookies",
    "pencils",
    "oranges",
    "cards",
    "eggs",
    "flowers",
    "coins",
    "balloons",
    "candies",
    "shells",
    "toys",
    "stamps",
)
_OPENINGS = (
    "{name} has {many} {things}. {they} gives {few}",
    "{name} has {many} {things}. {they} buys {few} more",
    "{name} buys {few} {things} for ${some} each.",
    "{name} has {many} {things} and {few} {others}.",
    "There are {many} {things} in a box. {name} takes",
    "{name} has {few} bags with {some} {things} in each bag.",
    "{name} wants to share {many} {things} with {few} friends.",
    "{name} has {many} {things} and {friend} has {few} more",
    "{name} sells {few} {things} every day for ${some} each.",
    "{name} makes {some} {things} an hour and works for {few} hours.",
)


@dataclass(frozen=True)
class Domain:
    """How questions of one kind are started, ended and judged."""

    system: str | None  # what the writer of the questions is told; answers never see it
    opening: Callable[[random.Random], str]
    stop: str | None  # ends a question, like a new line; None: only the verifier ends it
    keep: Callable[[str], bool]  # of the whole question


def _maths_opening(rng: random.Random) -> str:
    (name, they), (friend, _) = rng.sample(_PEOPLE, 2)
    things, others = rng.sample(_THINGS, 2)
    return rng.choice(_OPENINGS).format(
        name=name,
        they=they,
        friend=friend,
        things=things,
        others=others,
        many=rng.randint(11, 60),
        few=rng.randint(2, 10),
        some=rng.randint(2, 12),
    )


DOMAINS: dict[str, Domain] = {
    "maths": Domain(
        system=(
            "You write short maths word problems for children. Each problem ends with one "
            "question. Example: Lily has 14 plums. She eats 3 of them and gives 5 to her "
            "brother. How many plums does Lily have left?"
        ),
        opening=_maths_opening,
        stop="?",
        keep=lambda text: text.endswith("?") and len(text.split()) >= 8,
    ),
    "chat": Domain(
        system=None,
        opening=lambda rng: "",
        stop=None,
        keep=lambda text: len(text.split()) >= 3,
    ),
}
