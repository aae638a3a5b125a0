"""The draft's vocabulary: the most frequent answer tokens, padded to exactly dv."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculators_core.data.vocab_map import count_tokens, coverage, most_frequent, offsets
from speculators_core.errors import DataError
from speculators_core.vocabulary import check_vocab_map


def test_only_what_the_assistant_wrote_is_counted() -> None:
    ids = torch.tensor([5, 5, 7, 9], dtype=torch.int32)
    mask = torch.tensor([False, True, True, False])
    counts = count_tokens(ids, mask, 12)
    assert counts.nonzero().flatten().tolist() == [5, 7]


def test_the_most_frequent_are_kept_and_ties_go_to_the_lower_id() -> None:
    counts = torch.tensor([0, 3, 1, 1, 9, 1])
    assert most_frequent(counts, 3).nonzero().flatten().tolist() == [1, 2, 4]


def test_fewer_used_tokens_than_asked_are_filled_up_with_unused_ones() -> None:
    counts = torch.zeros(256, dtype=torch.int64)
    counts[100:140] = 2
    kept = most_frequent(counts, 64)
    ids = kept.nonzero().flatten().tolist()
    assert len(ids) == 64 and ids == sorted(set(ids))
    assert set(range(100, 140)) <= set(ids)


def test_a_draft_vocabulary_above_the_verifiers_is_refused() -> None:
    with pytest.raises(DataError, match="300 is larger than the verifier's 256"):
        most_frequent(torch.zeros(256, dtype=torch.int64), 300)


def test_coverage_is_the_share_of_answer_tokens_that_can_be_proposed() -> None:
    counts = torch.tensor([6, 3, 1])
    assert coverage(counts, most_frequent(counts, 2)) == pytest.approx(0.9)
    assert coverage(torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)) == 0.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data())
def test_offsets_always_name_exactly_the_kept_rows(values: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values)))
    kept = most_frequent(torch.tensor(values), size)
    d2t = offsets(kept)
    assert len(d2t) == size
    check_vocab_map(d2t.numpy(), kept.numpy(), where="here")
