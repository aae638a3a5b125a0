"""Engine events to what people see; drops are counted and nothing waits for a broker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from app.services import acceptance, deployments
from app.store.models import TraceMode
from speculators_core.errors import Unavailable
from speculators_core.trace import TraceWriter
from tests import tiny
from workers import trace_relay
from workers.trace_relay import TraceRelay, Translator, load_tokenizer


class Letters:
    """A tokenizer of one letter an id; 0xE2 0x82 0xAC as three tokens make one sign."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def start(rid: str = "r", k: int = 3) -> dict[str, Any]:
    return {"ev": "start", "rid": rid, "t": 1.0, "k": k, "prompt_tokens": 5, "prompt_tail": [32]}


def step(i: int, drafted: str | list[int], accepted: int, emitted: str | list[int], rid="r"):
    ids = [list(x.encode()) if isinstance(x, str) else x for x in (drafted, emitted)]
    return {
        "ev": "step", "rid": rid, "step": i, "t": 2.0 + i, "drafted": ids[0],
        "accepted": accepted, "emitted": ids[1], "context_len": 5 + i, "p_draft": None,
        "p_verifier": None, "draft_ms": None, "verify_ms": None,
    }  # fmt: skip


def end(rid: str = "r", dropped: int = 0) -> dict[str, Any]:
    return {"ev": "end", "rid": rid, "t": 9.0, "status": "stop", "dropped": dropped}


def test_ids_become_text_and_every_token_has_its_source() -> None:
    translator = Translator(Letters())
    translator.record(start())
    record = translator.record(step(0, "abx", 2, "abc"))
    assert record["request_id"] == "r"
    assert [token["text"] for token in record["drafted"]] == ["a", "b", "x"]
    assert [(t["text"], t["source"]) for t in record["emitted"]] == [
        ("a", "draft"),
        ("b", "draft"),
        ("c", "verifier"),
    ]
    assert record["drafted"][0] == {"id": 97, "text": "a", "p_draft": None, "p_verifier": None}


def test_a_character_of_several_tokens_is_told_once_it_is_whole() -> None:
    translator = Translator(Letters())
    translator.record(start())
    first = translator.record(step(0, [], 0, [0xE2]))
    second = translator.record(step(1, [0x82, 0xAC, 0x41], 2, [0x82, 0xAC, 0x42]))
    assert [token["text"] for token in first["emitted"]] == [""]
    assert [token["text"] for token in second["emitted"]] == ["", "€", "B"]
    assert [token["text"] for token in second["drafted"]] == ["", "€", "A"]


def test_rejected_placeholders_keep_their_place_without_text() -> None:
    record = Translator(Letters()).record(step(0, [97, -1, -1], 1, "ab"))
    assert [(token["id"], token["text"]) for token in record["drafted"]] == [
        (97, "a"),
        (-1, ""),
        (-1, ""),
    ]


def test_probabilities_of_the_reference_engine_pass_through() -> None:
    event = step(0, "ab", 1, "ax") | {"p_draft": [0.9, 0.4], "p_verifier": [0.8, 0.1]}
    drafted = Translator(Letters()).record(event)["drafted"]
    assert [(token["p_draft"], token["p_verifier"]) for token in drafted] == [
        (0.9, 0.8),
        (0.4, 0.1),
    ]


def test_a_request_is_summed_over_its_drafting_steps() -> None:
    translator = Translator(Letters())
    events = [
        start(),
        step(0, "", 0, "a"),
        step(1, "bcd", 3, "bcde"),
        step(2, "xyz", 0, "f"),
        end(),
    ]
    for event in events:
        translator.record(event)
    (finished,) = translator.finished
    assert finished.accepted_per_step == (3, 0)
    assert (finished.drafted, finished.tokens, finished.context_len) == (6, 6, 8)
    assert finished.per_position() == [1, 1, 1]


def test_warm_up_and_empty_requests_leave_no_row() -> None:
    translator = Translator(Letters())
    for rid in ("chatcmpl-speclab-warm-up-1", "empty"):
        translator.record(start(rid))
        if rid != "empty":
            translator.record(step(0, "", 0, "a", rid))
        translator.record(end(rid))
    assert not translator.finished


def test_a_step_whose_start_was_dropped_is_still_told() -> None:
    translator = Translator(Letters())
    assert translator.record(step(4, "ab", 1, "ax"))["step"] == 4
    assert translator.record(end(dropped=5))["dropped"] == 5
    assert translator.dropped == 5


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was written to the store; `away` makes it refuse."""
    told: dict[str, Any] = {"requests": [], "changes": {}, "away": False}

    def record(_: str, requests: Sequence[Any]) -> None:
        if told["away"]:
            raise Unavailable("the store is away")
        told["requests"] += requests

    monkeypatch.setattr(acceptance, "record", record)
    monkeypatch.setattr(deployments, "update", lambda _, **changes: told["changes"].update(changes))
    return told


def wait_until(condition) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until, "waited 5 s in vain"
        time.sleep(0.01)


def test_what_an_engine_writes_is_published_and_kept(rows: dict[str, Any]) -> None:
    published: list[dict[str, Any]] = []
    relay = TraceRelay("d", Letters(), published.extend)
    writer = TraceWriter(relay.path)
    for event in [start(), *(step(i, "abc", 3, "abcd") for i in range(50)), end()]:
        writer.write(event)
    wait_until(lambda: len(published) == 52)
    writer.close()
    directory = relay.path.parent
    relay.close()
    assert [record["ev"] for record in published[:2]] == ["start", "step"]
    assert [request.tokens for request in rows["requests"]] == [200]
    assert rows["changes"] == {}
    assert not directory.exists()


def test_a_broker_that_is_away_costs_records_and_no_time(rows: dict[str, Any]) -> None:
    def away(_: Sequence[Any]) -> None:
        raise redis.ConnectionError("no broker")

    relay = TraceRelay("d", Letters(), away)
    writer = TraceWriter(relay.path)
    began = time.monotonic()
    for event in [start(), *(step(i, "abc", 3, "abcd") for i in range(200)), end()]:
        writer.write(event)
    assert time.monotonic() - began < 1
    wait_until(lambda: relay.dropped == 202)
    relay.close()
    assert rows["changes"] == {"dropped_records": 202}
    assert [request.tokens for request in rows["requests"]] == [800]


def test_rows_wait_for_a_store_that_is_away(rows: dict[str, Any]) -> None:
    relay = TraceRelay("d", Letters(), lambda _: None)
    writer = TraceWriter(relay.path)
    rows["away"] = True
    for event in [start(), step(0, "", 0, "a"), end()]:
        writer.write(event)
    wait_until(lambda: relay._translator.finished)
    relay.settle()
    assert rows["requests"] == []
    rows["away"] = False
    relay.close()
    assert len(rows["requests"]) == 1


def test_placeholders_make_it_a_trace_of_counts(rows: dict[str, Any]) -> None:
    published: list[dict[str, Any]] = []
    relay = TraceRelay("d", Letters(), published.extend)
    writer = TraceWriter(relay.path)
    for event in [start(), step(0, [97, -1, -1], 1, "ab"), end()]:
        writer.write(event)
    wait_until(lambda: len(published) == 3)
    relay.close()
    assert rows["changes"] == {"trace_mode": TraceMode.COUNTS}


def test_lines_that_are_no_events_are_counted_and_skipped(rows: dict[str, Any]) -> None:
    published: list[dict[str, Any]] = []
    relay = TraceRelay("d", Letters(), published.extend)
    engine = trace_relay.socket.socket(trace_relay.socket.AF_UNIX)
    engine.connect(str(relay.path))
    engine.sendall(b'not json\n{"ev": "step"}\n' + json.dumps(start()).encode() + b"\n")
    wait_until(lambda: published)
    engine.close()
    relay.close()
    assert [record["ev"] for record in published] == ["start"]
    assert relay.dropped == 2


def test_the_tokenizer_of_a_model_directory_is_loaded(tmp_path: Path) -> None:
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tiny.byte_tokenizer()("hallo")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hallo"
