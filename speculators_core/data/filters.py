"""Which texts are worth keeping: not said before, not nearly, and in the language that is wanted.

Near duplicates are exact, not estimated: texts whose sets of word triples overlap enough
(Jaccard). They are found through a prefix filter, so a text is compared with few others.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from functools import cache
from typing import Any

from speculators_core.errors import InputError

_CLEARLY = 10.0  # nats between the languages' log-likelihoods of a text


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


class Language:
    """Tells the texts of a language (py3langid, 140 languages). Raises `InputError` for a code that
    it does not know.
    """

    def __init__(self, code: str) -> None:
        self._code = code
        self._model = _model()
        if code not in self._model.labels:
            raise InputError(
                f"no language {code!r} can be told from others",
                where="language",
                hint=f"known: {', '.join(self._model.labels)}",
            )

    def spoken_in(self, text: str) -> bool:
        """Whether no other language is clearly likelier; of a few words or a formula none is."""
        likely = dict(self._model.rank(text))
        return bool(max(likely.values()) - likely[self._code] <= _CLEARLY)


@cache
def _model() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)


def _triples(text: str) -> frozenset[int]:
    """Hashes of the runs of three words; of all words where there are fewer."""
    words = re.findall(r"\w+", text) or [text]
    runs = (words[i : i + 3] for i in range(max(len(words) - 2, 1)))
    return frozenset(_hash(" ".join(run)) for run in runs)


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
