"""The Data page and a data set as trees: facts, masks, flags, what may be added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.services import capacity, data_sets, looking
from app.services.views import DataSetView
from app.ui import data, data_set
from app.ui.components.elements import text_of
from speculators_core.data.capacity import Estimate, Need
from speculators_core.errors import Unavailable
from speculators_core.params import PARAMS_OF, PrepareParams
from tests.app.test_ui_conversion import HOSTILE, nodes
from tests.e2e import files

QUESTION, ANSWER = ["user", "\n", HOSTILE], ["So", " much", "\n"]


def prepared(folder: Path, question: list[str], answer: list[str]) -> DataSetView:
    place = files.prepared(folder / "set", question, answer, key=str(folder))
    facts = {"tokens": 3456, "verifier": "v", "draft_vocab_size": 8192}
    return data_sets.register(place, "set", "prepared", samples=files.SAMPLES, facts=facts)


def test_a_sample_is_shown_token_by_token_with_its_mask(sqlite_store, tmp_path):
    prepared(tmp_path, QUESTION, ANSWER)
    tree = data_set.sample_of("set", 3, False)
    told = text_of(tree)
    assert "Sample 3 of 384" in told and "11 tokens, 4 trained (36 %)" in told
    stretches = [n for n in nodes(tree, "span") if n[1].get("role") == "group"]
    labels = [n[1]["aria-label"] for n in stretches]
    assert labels == ["not trained", "trained", "not trained"]
    assert text_of(stretches[1]) == "So  much ⏎\n <|im_end|>"
    assert HOSTILE in text_of(stretches[0])


def test_only_validation_walks_the_samples_kept_for_it(sqlite_store, tmp_path):
    one = prepared(tmp_path, QUESTION, ANSWER)
    found = looking.look(one, 20, validation_only=True)
    assert (found.sample.number, found.previous, found.next) == (31, 15, 47)
    assert found.sample.validation and (found.place, found.count) == (1, 24)
    assert "Validation sample 2 of 24 (sample 32 of 384)" in text_of(
        data_set.sample_of("set", 21, True)
    )
    last = looking.look(one, 10_000, validation_only=True)
    assert (last.sample.number, last.next) == (383, None)


@pytest.mark.parametrize(
    ("question", "answer", "flag"),
    [(QUESTION, [], "0 % of the tokens are trained"), ([], ANSWER, "100 % of the tokens")],
)
def test_a_mask_of_nothing_or_of_everything_is_flagged(
    sqlite_store, tmp_path, question: list[str], answer: list[str], flag: str
):
    """B3"""
    one = prepared(tmp_path, question, answer)
    assert flag in text_of(data_set.facts_tree(one))
    assert "in this sample is trained" in text_of(data_set.sample_of("set", 1, False))


def test_facts_say_what_was_read_skipped_and_covered(sqlite_store, tmp_path):
    tree = data_set.facts_tree(prepared(tmp_path, QUESTION, ANSWER))
    told = text_of(tree)
    for words in ("99.73 %", "8,192 of 49,152", "no answer 9", "kept, but: cut", "up to 128"):
        assert words in told, words
    assert "% of the tokens are trained" not in told
    bars = [node[1] for node in nodes(tree, "progress")]
    assert [bar["value"] for bar in bars] == ["12", "201", "140", "31"]


def test_a_set_whose_files_are_gone_is_a_sentence(sqlite_store, tmp_path):
    one = prepared(tmp_path, QUESTION, ANSWER)
    (Path(one.path) / "meta.json").unlink()
    assert "not a prepared data set" in text_of(data_set.sample_of("set", 1, False))


def test_chats_are_shown_as_they_are(sqlite_store, tmp_path):
    file = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "x" * 5000}]
    file.write_text(json.dumps({"messages": turns}) + "\n" + '{"broken\n')
    one = data_sets.register(file, "chats", "chats", samples=1)
    told = text_of(data_set.facts_tree(one))
    assert HOSTILE in told and "xxx…" in told and len(told) < 2000
    assert "/data?form=prepare&data=chats" in json.dumps(data_set.facts_tree(one))


def test_the_table_says_size_origin_and_use(sqlite_store, tmp_path):
    prepared(tmp_path, QUESTION, ANSWER)
    told = text_of(data.sets_table(data_sets.list_data_sets()))
    assert "set prepared 384 3,456" in told and "KiB v added Train on it" in told
    assert "let the verifier write some" in text_of(data.sets_table([]))


def test_chats_are_added_from_a_path_that_may_be_read_and_from_no_other(
    sqlite_store, tmp_path, monkeypatch
):
    """G7"""
    monkeypatch.setenv("SPECLAB_ROOTS", str(tmp_path))
    from app.settings import settings

    settings.cache_clear()
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert "kept as mine" in text_of(data.add(None, str(file), ""))
    assert "not in a directory" in text_of(data.add(None, "../../etc/passwd", ""))
    assert "Upload a file, or name the path" in text_of(data.add(None, " ", ""))
    assert len(data_sets.list_data_sets()) == 1


def test_preparing_more_than_is_free_is_refused_before_it_is_queued(sqlite_store, monkeypatch):
    """B12"""
    small = Estimate(
        where="/d", free=5, needs=(Need(what="prepared tokens", size=9, arithmetic="x"),)
    )
    monkeypatch.setattr(capacity, "of_preparing", lambda sources: small)
    form = next(form for form in data.FORMS if form.key == "prepare")
    params = PrepareParams(data=("org/x",), verifier="org/v")
    assert "It needs 9 bytes, and 5 bytes are free." in text_of(form.needs(params))
    with pytest.raises(Unavailable, match="prepared tokens need 9 bytes"):
        form.require(params)


@pytest.mark.parametrize("form", data.FORMS, ids=lambda form: form.key)
def test_forms_name_fields_that_exist(form):
    fields = PARAMS_OF[form.kind].model_fields
    named = {name for row in form.rows for name in row} | set(form.choices)
    assert named <= set(fields)
