"""The card and the report of a speculator that was trained here."""

from __future__ import annotations

import json
import shutil

from speculators_core.conversion.convert import convert
from speculators_core.conversion.coverage import known_coverage
from speculators_core.data.prepared import read_meta
from speculators_core.params import ConvertParams
from speculators_core.training.made import texts
from tests import tiny
from tests.core.small_data import prepare_chats


def test_a_trained_speculator_tells_its_coverage_and_keeps_it_when_it_is_converted(
    tmp_path, tiny_verifier, tiny_speculator
):
    meta = read_meta(prepare_chats(tmp_path, tiny_verifier, count=4))
    config = tiny.draft_config(tiny_verifier)
    best = {"served_acceptance_length": 2.25, "step": 100.0}
    made = texts("mine", config, meta, 0.987654, best)
    assert "- Coverage: 98.77% of the answers' tokens that it was trained on" in made["README.md"]
    assert "predicted on validation chats: 2.250" in made["README.md"]
    assert '"method": "eagle3"' in made["README.md"]
    assert str(tiny_verifier.parent) not in "".join(made.values())
    assert json.loads(made["training_report.json"])["best"] == best
    draft = shutil.copytree(tiny_speculator, tmp_path / "mine")
    for name, text in made.items():
        (draft / name).write_text(text)
    assert known_coverage(draft).share == 0.987654
    params = ConvertParams(
        checkpoint=str(draft), verifier=str(tiny_verifier), validate_on_verifier=False
    )
    convert(params, tmp_path / "out")
    assert "Coverage: 98.77% of the answers' tokens" in (tmp_path / "out" / "README.md").read_text()


def test_reports_that_say_nothing_of_coverage_are_passed_over(tmp_path):
    assert known_coverage(tmp_path) is None
    for share in ('"much"', "2.0", "null"):
        text = f'{{"coverage": {{"share": {share}, "of": "x"}}}}'
        (tmp_path / "conversion_report.json").write_text(text)
        assert known_coverage(tmp_path) is None
