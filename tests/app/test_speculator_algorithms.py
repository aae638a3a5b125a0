"""The lab registers drafts of every algorithm that can be converted, and says what each is."""

from __future__ import annotations

import pytest

from app.services import speculators
from speculators_core.conversion.convert import convert
from speculators_core.errors import CheckpointError
from speculators_core.params import ConvertParams
from tests.core.layouts import families
from tests.core.layouts.families import Family

FAMILY = Family(layers=2, seed=2)


@pytest.mark.parametrize(
    ("algorithm", "k", "deployable"), [("dflash", 5, True), ("eagle", 3, True), ("mtp", 3, False)]
)
def test_a_converted_draft_is_registered_as_what_it_is(
    store, tmp_path, algorithm, k, deployable
) -> None:
    if algorithm == "mtp":
        verifier = checkpoint = families.with_mtp(tmp_path / "v", FAMILY, "qwen3_5_moe")
    else:
        verifier = families.verifier(tmp_path / "v", FAMILY)
        checkpoint = getattr(families, algorithm)(tmp_path / "c", FAMILY)
    params = ConvertParams(
        checkpoint=str(checkpoint), verifier=str(verifier), validate_on_verifier=False
    )
    convert(params, tmp_path / "out")
    row = speculators.register(tmp_path / "out", "draft", verifier="my-verifier")
    assert (row.algorithm, row.speculative_tokens, row.verifier) == (algorithm, k, "my-verifier")
    assert row.draft_vocab_size == FAMILY.vocab
    assert row.deployable is deployable
    assert speculators.get("draft").algorithm == algorithm


def test_a_draft_of_an_algorithm_that_nothing_here_serves_is_refused(store, tmp_path) -> None:
    verifier = families.verifier(tmp_path / "v", FAMILY)
    (verifier / "config.json").write_text('{"speculators_model_type": "peagle"}')
    with pytest.raises(CheckpointError, match="'peagle'; what can be served: eagle3, dflash, mtp"):
        speculators.register(verifier, "draft")
