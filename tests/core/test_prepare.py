"""Preparing chats: what is written, when it is reused, what is refused."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speculators_core.data import occupancy
from speculators_core.data import prepare as module
from speculators_core.data.prepare import load_prepared, prepare, prepared_key
from speculators_core.data.samples import read_facts, read_sample
from speculators_core.data.sources import Taken
from speculators_core.data.tokenise import Tokeniser
from speculators_core.errors import Conflict, DataError, Stopped, Unavailable
from speculators_core.params import PrepareParams
from speculators_core.progress import Quiet
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
    """B15"""
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


def test_an_empty_file_is_called_empty(tmp_path: Path, tiny_verifier: Path) -> None:
    file = tmp_path / "empty.jsonl"
    file.write_text("\n")
    with pytest.raises(DataError, match=r"the data is empty: expected .* found no row") as caught:
        prepare(params(file, tiny_verifier), tmp_path / "out")
    assert caught.value.where == str(file) and "generation" not in str(caught.value.hint)


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


def test_b8_a_killed_preparation_goes_on_and_ends_like_one_that_was_not(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    """B8"""
    file = write_chats(tmp_path / "c.jsonl", count=20)
    write, made = Tokeniser.write, []

    def killed_at_the_eighth(self: Tokeniser, rows: list[Taken], part: Path) -> None:
        if len(made) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(part)
        write(self, rows, part)

    def work() -> None:
        module.ROWS_A_PART = 1
        Tokeniser.write = killed_at_the_eighth  # type: ignore[method-assign, assignment]
        prepare(params(file, tiny_verifier), tmp_path / "out")

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "out").exists()
    (parts,) = tmp_path.glob(".out.*.parts")
    assert len(list(parts.glob("*.part"))) == 7
    assert occupancy.facts_of(parts) == {"output": "out"} and not occupancy.occupied(parts)
    stamps = {part: part.stat().st_mtime_ns for part in parts.glob("*.part")}
    seen = []

    class Watching(Listener):
        def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
            seen.append({p: p.stat().st_mtime_ns for p in stamps if p.exists()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROWS_A_PART", 1)
        prepare(params(file, tiny_verifier), tmp_path / "out", Watching())
    assert seen[-2] == stamps, "what was made is not made again"
    prepare(params(file, tiny_verifier), tmp_path / "whole")
    for name in ("tokens.safetensors", "texts.json", "meta.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rows = [read_sample(tmp_path / "out", i).source for i in range(20)]
    assert len(set(rows)) == 20
    assert not list(tmp_path.glob(".*"))


def test_a_stopped_preparation_goes_on_and_one_of_other_data_is_cleared(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_A_PART", 4)
    file = write_chats(tmp_path / "c.jsonl")
    with pytest.raises(Stopped, match="after 8 rows"):
        prepare(params(file, tiny_verifier), tmp_path / "out", Listener(lambda me: me.asked > 2))
    assert len(list(tmp_path.glob(".out.*.parts"))) == 1
    prepare(params(file, tiny_verifier, seq_length=50), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "out"]


def test_the_second_of_two_equal_preparations_waits_and_uses_what_the_first_made(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    now, out = params(write_chats(tmp_path / "c.jsonl"), tiny_verifier), tmp_path / "out"
    plan, second = module._plan(now, Quiet()), Listener()
    with ThreadPoolExecutor(1) as pool:
        with module._working_directory(out, plan.key, Quiet()) as work:
            waiting = pool.submit(prepare, now, out, second)
            while not second.notes:
                time.sleep(0.01)
            assert "waiting" in second.notes[0] and not waiting.done()
            module.assemble(plan, module._tokenise(plan, work, Quiet()), out)
            made = (out / "tokens.safetensors").stat().st_mtime_ns
        assert waiting.result(60).samples == 40
    assert "already" in second.notes[-1]
    assert (out / "tokens.safetensors").stat().st_mtime_ns == made
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "out"]


def test_waiting_for_an_equal_preparation_can_be_stopped(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    now, out = params(write_chats(tmp_path / "c.jsonl"), tiny_verifier), tmp_path / "out"
    with (
        module._working_directory(out, prepared_key(now), Quiet()) as work,
        pytest.raises(Stopped, match="another process"),
    ):
        prepare(now, out, Listener(lambda me: True))
    assert not work.exists()


def test_data_that_change_while_they_are_read_are_refused(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    file = write_chats(tmp_path / "c.jsonl")

    def edit(me: Listener) -> bool:
        with file.open("a") as lines:
            lines.write(json.dumps({"prompt": "more"}) + "\n")
        return False

    with pytest.raises(DataError, match="changed while they were read"):
        prepare(params(file, tiny_verifier), tmp_path / "out", Listener(edit))
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_place_that_takes_nothing_and_a_full_disk_are_said_in_words(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_chats(tmp_path / "c.jsonl")
    with pytest.raises(Unavailable, match="can't be written: Not a directory"):
        prepare(params(file, tiny_verifier), file / "out")

    def full(self: Tokeniser, rows: list[Taken], part: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tokeniser, "write", full)
    with pytest.raises(Unavailable, match="No space left"):
        prepare(params(file, tiny_verifier), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_b16_fewer_tokens_than_the_draft_vocabulary_are_filled_up(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    """B16"""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM"  # 39, and the end of turn
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"prompt": "?", "answer": letters}) + "\n")
    result = prepare(params(file, tiny_verifier, draft_vocab_size=64), tmp_path / "out")
    prepared = load_prepared(tmp_path / "out")
    ids = prepared.kept.nonzero().flatten().tolist()
    written = set(prepared.ids[prepared.mask].tolist())
    assert len(written) == 40 and written < set(ids)
    assert len(ids) == result.draft_vocab_size == 64 and ids == sorted(set(ids))
    assert result.coverage == read_facts(tmp_path / "out").coverage == 1.0
    with pytest.raises(DataError, match="257 is larger than the verifier's 256"):
        prepare(params(file, tiny_verifier, draft_vocab_size=257), tmp_path / "other")


def test_b3_a_template_that_shows_no_answers_stops_the_work(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    verifier = shutil.copytree(tiny_verifier, tmp_path / "verifier")
    (verifier / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    )
    with pytest.raises(DataError, match="40 × the template alters the answer"):
        prepare(params(write_chats(tmp_path / "c.jsonl"), verifier), tmp_path / "out")


def test_b5_strange_orders_of_turns_are_prepared_or_counted(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    def turns(*found: tuple[str, str]) -> dict:
        return {"messages": [{"role": role, "content": content} for role, content in found]}

    rows = [
        turns(("user", "one"), ("user", "two"), ("assistant", "both")),
        turns(("assistant", "welcome"), ("user", "hi"), ("assistant", "hello")),
        turns(("user", "look"), ("assistant", "calling"), ("tool", "42"), ("assistant", "42")),
        turns(("user", "q"), ("assistant", "")),
        turns(("system", "be kind")),
        {"conversations": []},
        {"prompt": "half a pair: \ud800", "answer": "x"},
    ]
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    result = prepare(params(file, tiny_verifier), tmp_path / "out")
    assert result.samples == 3
    assert result.skipped == {
        "an empty answer": 1,
        "no assistant turn": 2,
        "text that is no Unicode": 1,
    }
    said = "".join(t.text for t in read_sample(tmp_path / "out", 1).tokens if t.trained)
    assert said == "welcome<|im_end|>hello<|im_end|>"


def test_a_row_of_no_layout_names_file_row_and_keys(tmp_path: Path, tiny_verifier: Path) -> None:
    file = write_chats(tmp_path / "c.jsonl", count=2)
    with file.open("a") as lines:
        lines.write('{"id": 1, "body": "x"}\n')
    with pytest.raises(DataError, match="found the keys id, body") as caught:
        prepare(params(file, tiny_verifier), tmp_path / "out")
    assert caught.value.where == f"{file}:3" and "conversations" in str(caught.value.hint)


def test_text_trains_all_but_the_first_token_of_each_stretch_and_needs_no_template(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    verifier = shutil.copytree(tiny_verifier, tmp_path / "verifier")
    (verifier / "chat_template.jinja").unlink()
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"text": "a" * 25}) + "\n" + json.dumps({"text": "b"}))
    result = prepare(params(file, verifier, seq_length=10), tmp_path / "out")
    prepared = load_prepared(tmp_path / "out")
    assert prepared.lengths.tolist() == [10, 10, 5]
    assert result.masked_tokens == 22 and result.skipped == {"text without two tokens": 1}
    facts = read_facts(tmp_path / "out")
    assert "plain text" in facts.masked_by and facts.template_sha256 is None


def test_weights_take_a_seeded_share_of_each_source_and_repeat_rows(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    files = [write_chats(tmp_path / f"{i}.jsonl", count=100, seed=i) for i in range(2)]

    def taken(**changes: object) -> list[str]:
        values = {"data": [str(f) for f in files], "verifier": str(tiny_verifier)}
        now = PrepareParams.model_validate({**values, "draft_vocab_size": 64, **changes})
        out = tmp_path / prepared_key(now)
        prepare(now, out)
        made.append(out)
        return [read_sample(out, i).source for i in range(read_facts(out).samples)]

    made: list[Path] = []
    rows = taken(weights=[0.3, 2.5])
    first = [row for row in rows if row.startswith(str(files[0]))]
    second = [row for row in rows if row not in first]
    assert 15 <= len(first) == len(set(first)) <= 45  # 30 ± 3 sigma
    assert 235 <= len(second) <= 265 and len(set(second)) == 100
    facts = read_facts(made[0])
    assert [(s.weight, s.rows, s.samples) for s in facts.sources] == [
        (0.3, 100, len(first)),
        (2.5, 100, len(second)),
    ]
    assert taken(weights=[0.3, 2.5], seed=1) != rows
    chosen = load_prepared(made[0]).validation.tolist()
    sides = {(row, side) for row, side in zip(rows, chosen, strict=True)}
    assert len(sides) == len(set(rows)), "copies of a row are on one side of the split"
    with pytest.raises(ValueError, match="1 weights for 2 sources"):
        taken(weights=[1])


def test_several_processes_make_what_one_makes(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_chats(tmp_path / "c.jsonl")
    prepare(params(file, tiny_verifier), tmp_path / "one")
    monkeypatch.setattr(module, "ROWS_A_PART", 8)
    monkeypatch.setattr(module, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr("speculators_core.data.tokenise._START", "fork")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    prepare(params(file, tiny_verifier), tmp_path / "several")
    one, several = (tmp_path / name / "tokens.safetensors" for name in ("one", "several"))
    assert one.read_bytes() == several.read_bytes()
    with file.open("a") as lines:
        lines.write('{"id": 1}\n')
    with pytest.raises(DataError, match="found the keys id") as caught:
        prepare(params(file, tiny_verifier), tmp_path / "wrong")
    assert caught.value.where == f"{file}:41"


def test_the_choice_of_thinking_is_part_of_the_key_and_of_the_facts(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    verifier = shutil.copytree(tiny_verifier, tmp_path / "verifier")
    template = verifier / "chat_template.jinja"
    switch = "{% if enable_thinking is defined and enable_thinking %}{{ ' ' }}{% endif %}"
    template.write_text(template.read_text() + switch)
    file = write_chats(tmp_path / "c.jsonl")
    seen = set()
    for thinking in (None, True, False):
        now = params(file, verifier, enable_thinking=thinking)
        prepare(now, tmp_path / str(thinking))
        facts = read_facts(tmp_path / str(thinking))
        assert facts.enable_thinking is thinking
        seen.add(facts.key)
    assert len(seen) == 3
