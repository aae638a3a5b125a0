"""Preparing chats: what is written, when it is reused, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.data.prepare import load_prepared, prepare, prepared_key
from speculators_core.errors import Conflict, DataError, Stopped
from speculators_core.params import PrepareParams
from speculators_core.vocabulary import check_vocab_map
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats, write_chats


def params(data: Path, verifier: Path, **changes: object) -> PrepareParams:
    values = {"data": (str(data),), "verifier": str(verifier), "draft_vocab_size": 64}
    return PrepareParams.model_validate({**values, **changes})


def test_tokens_masks_map_and_split_are_written(tmp_path: Path, tiny_verifier: Path) -> None:
    file = write_chats(tmp_path / "c.jsonl")
    listener = Listener()
    result = prepare(params(file, tiny_verifier), tmp_path / "out", listener)
    prepared = load_prepared(tmp_path / "out")
    assert result.samples == len(prepared.lengths) == 40
    assert result.tokens == len(prepared.ids) == int(prepared.lengths.sum())
    assert result.masked_tokens == int(prepared.mask.sum())
    assert int(prepared.validation.sum()) == 2
    assert result.draft_vocab_size == 64 and 0.9 < result.coverage <= 1
    tensors = load_file(tmp_path / "out" / "tokens.safetensors")
    check_vocab_map(tensors["offsets"].numpy(), tensors["kept"].numpy(), where="out")
    assert listener.fractions[-1] == 1.0 and "cover" in " ".join(listener.notes)


def test_a_document_reads_back_as_its_chat(tmp_path: Path, tiny_verifier: Path) -> None:
    from transformers import AutoTokenizer

    prepared = load_prepared(prepare_chats(tmp_path, tiny_verifier, count=5))
    first = json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[0])["messages"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    ids, mask = prepared.document(0)
    expected = "".join(m["content"] + "<|im_end|>" for m in first if m["role"] == "assistant")
    assert tokenizer.decode(ids[mask]) == expected


def test_the_same_data_is_not_prepared_twice(tmp_path: Path, tiny_verifier: Path) -> None:
    file = write_chats(tmp_path / "c.jsonl")
    first = prepare(params(file, tiny_verifier), tmp_path / "out")
    before = (tmp_path / "out" / "tokens.safetensors").stat().st_mtime_ns
    listener = Listener()
    assert prepare(params(file, tiny_verifier), tmp_path / "out", listener) == first
    assert (tmp_path / "out" / "tokens.safetensors").stat().st_mtime_ns == before
    assert "already" in listener.notes[0]


def test_b15_changed_data_a_changed_template_and_changed_parameters_are_prepared_anew(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    verifier = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, verifier)
    file = write_chats(tmp_path / "c.jsonl")
    made = []

    def again(**changes: object) -> None:
        now = params(file, verifier, **changes)
        out = tmp_path / prepared_key(now)
        prepare(now, out)
        made.append(load_prepared(out))

    again()
    write_chats(file, seed=1)  # edited in place
    again()
    template = verifier / "chat_template.jinja"
    template.write_text(template.read_text().replace("'\\n' }}", "'\\n\\n' }}", 1))
    again()
    again(seq_length=50)
    assert len({p.meta.key for p in made}) == 4
    assert len({p.meta.template_sha256 for p in made}) == 2
    assert not torch.equal(made[0].ids[:50], made[1].ids[:50])
    assert int(made[3].lengths.max()) == 50
    again(seq_length=50)
    assert made[4].meta.key == made[3].meta.key


def test_data_prepared_from_something_else_are_not_replaced(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    file, out = write_chats(tmp_path / "c.jsonl"), tmp_path / "out"
    prepare(params(file, tiny_verifier), out)
    key = load_prepared(out).meta.key
    with pytest.raises(Conflict, match="prepared from something else"):
        prepare(params(file, tiny_verifier, seq_length=50), out)
    assert load_prepared(out).meta.key == key


def test_another_directory_in_the_place_is_left_alone(tmp_path: Path, tiny_verifier: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(Conflict, match="not a prepared data set"):
        prepare(params(write_chats(tmp_path / "c.jsonl"), tiny_verifier), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").exists()
    with pytest.raises(DataError, match="not a prepared data set"):
        load_prepared(tmp_path / "out")


def test_nothing_is_left_where_preparing_fails(tmp_path: Path, tiny_verifier: Path) -> None:
    file = write_chats(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match="larger than the verifier's 256"):
        prepare(params(file, tiny_verifier, draft_vocab_size=300), tmp_path / "out")
    with pytest.raises(DataError, match="40 × no answer within 3 tokens"):
        prepare(params(file, tiny_verifier, seq_length=3), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_skipped_chats_are_counted_by_reason(tmp_path: Path, tiny_verifier: Path) -> None:
    file = write_chats(tmp_path / "c.jsonl", count=3)
    with file.open("a") as lines:
        lines.write(json.dumps({"prompt": "no answer"}) + "\n")
    result = prepare(params(file, tiny_verifier), tmp_path / "out")
    assert result.skipped == {"no assistant turn": 1} and result.samples == 3


def test_the_split_is_seeded_and_the_map_counts_training_answers_only(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    splits = []
    for seed in (0, 0, 1):
        folder = tmp_path / f"{len(splits)}"
        folder.mkdir()
        prepared = load_prepared(
            prepare_chats(folder, tiny_verifier, seed=seed, validation_fraction=0.25)
        )
        splits.append(prepared.validation)
        assert int(prepared.validation.sum()) == 10
    assert torch.equal(splits[0], splits[1]) and not torch.equal(splits[0], splits[2])


def test_the_whole_vocabulary_is_kept_where_no_size_is_given(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    prepared = load_prepared(prepare_chats(tmp_path, tiny_verifier, draft_vocab_size=None))
    assert bool(prepared.kept.all())


def test_a_truncated_file_is_reported(tmp_path: Path, tiny_verifier: Path) -> None:
    place = prepare_chats(tmp_path, tiny_verifier)
    file = place / "tokens.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match="can't be read"):
        load_prepared(place)
