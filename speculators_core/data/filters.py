"""Which texts are worth keeping: not said before, not nearly, and in the script that is wanted.

The script is told from the letters alone, not the language: `latin` keeps English and Polish
alike. Near duplicates are exact, not estimated: texts whose sets of word triples overlap enough
(Jaccard). They are found through a prefix filter, so a text is compared with few others.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import defaultdict

_MOSTLY = 0.8  # share of the letters
_NAMES = {"cjk": ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")}


class Unheard:
    """Remembers texts; tells of a new one whether it was said before. `near`: the share of word
    triples from which on two texts count as one.
    """

    def __init__(self, near: float) -> None:
        self._near = near
        self._texts: set[str] = set()
        self._triples: list[frozenset[int]] = []
        self._with: defaultdict[int, list[int]] = defaultdict(list)  # triple → numbers of texts

    def judge(self, text: str) -> str | None:
        """Why the text is dropped; None, and it is remembered."""
        words = " ".join(text.casefold().split())
        if words in self._texts:
            return "the same question"
        triples = _triples(words)
        # two sets of overlap near share one of these, whatever order all agree on
        first = sorted(triples)[: len(triples) - math.ceil(self._near * len(triples) - 1e-9) + 1]
        rivals = {number for triple in first for number in self._with[triple]}
        if any(self._overlap(triples, self._triples[number]) for number in rivals):
            return "nearly the same question"
        for triple in first:
            self._with[triple].append(len(self._triples))
        self._texts.add(words)
        self._triples.append(triples)
        return None

    def _overlap(self, one: frozenset[int], other: frozenset[int]) -> bool:
        return len(one & other) >= self._near * len(one | other)


def is_in_script(text: str, script: str) -> bool:
    """Whether most letters of the text are of a script (`any`: all are); digits and signs don't
    count, and a text without letters is in every script.
    """
    if script == "any":
        return True
    wanted = _NAMES.get(script, (script.upper(),))
    letters = [unicodedata.name(sign, "") for sign in text if sign.isalpha()]
    fitting = sum(name.startswith(wanted) for name in letters)
    return fitting >= _MOSTLY * len(letters)


def _triples(text: str) -> frozenset[int]:
    """Hashes of the runs of three words; of all words where there are fewer."""
    words = re.findall(r"\w+", text) or [text]
    runs = (words[i : i + 3] for i in range(max(len(words) - 2, 1)))
    return frozenset(_hash(" ".join(run)) for run in runs)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
