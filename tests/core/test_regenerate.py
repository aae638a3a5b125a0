"""Answers made anew by an endpoint (a stand-in that says it is one) and by a tiny verifier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from speculators_core.data import answering, endpoint
from speculators_core.data.answering import conversation
from speculators_core.data.chats import Chat, Message
from speculators_core.data.regenerate import regenerate
from speculators_core.data.template import load_template
from speculators_core.errors import Conflict, DataError, Forbidden, NotFound, Stopped, Unavailable
from speculators_core.models.verifier import load_verifier
from speculators_core.params import RegenerateParams
from tests.core.listening import Listener
from tests.core.stand_in_endpoint import StandInEndpoint, stand_in_endpoint


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInEndpoint]:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT_S", 0.001)
    monkeypatch.delenv(endpoint.KEY, raising=False)
    with stand_in_endpoint() as found:
        yield found


def questions(folder: Path, *rows: Any, count: int = 10) -> Path:
    file = folder / "questions.jsonl"
    given = rows or [{"prompt": f"question {i}", "answer": "an old answer"} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in given))
    return file


def params(data: Path, server: StandInEndpoint | None = None, **changes: Any) -> RegenerateParams:
    values = {"data": str(data), "verifier": "V", "concurrency": 4}
    if server:
        values["endpoint"] = server.url
    return RegenerateParams.model_validate({**values, **changes})


def written(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def texts(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"]]


def test_old_answers_are_replaced_in_the_order_of_the_data(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    listener = Listener()
    result = regenerate(params(questions(tmp_path), server), tmp_path / "out", listener)
    rows = written(result.output)
    assert [texts(row) for row in rows] == [[f"question {i}", f"{i} noitseuq"] for i in range(10)]
    assert len({row["id"] for row in rows}) == 10
    assert (result.samples, result.failed, result.model) == (10, 0, "stand-in")
    assert (result.tokens, result.prompt_tokens) == (100, 100)
    record = json.loads((tmp_path / "out" / "regenerated.json").read_text())
    assert record["settings"]["temperature"] == 0 and record["settings"]["max_tokens"] == 512
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "questions.jsonl"]
    assert listener.fractions[-1] == 1.0
    sent = server.bodies[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("stand-in", 0, 512)
    assert server.most_open <= 4


def test_turns_are_answered_one_after_the_other_with_the_new_history(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "older"},
    ]
    out = tmp_path / "out"
    result = regenerate(params(questions(tmp_path, {"messages": chat}), server), out)
    assert texts(written(result.output)[0]) == ["be kind", "ab", "ba", "cd", "dc"]
    assert [texts(body) for body in server.bodies] == [
        ["be kind", "ab"],
        ["be kind", "ab", "ba", "cd"],
    ]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", "uA"),
        ("ua", "uA"),
        ("uaa", "uA"),
        ("suuau", "suuAuA"),
        ("aua", "auA"),
    ],
)
def test_every_order_of_turns_ends_with_new_answers(roles: str, expected: str) -> None:
    names = {"s": "system", "u": "user", "a": "assistant"}
    turns = conversation(Chat(tuple(Message(names[role], role) for role in roles), "here"))
    found: list[dict[str, Any]] = []
    answer = None
    try:
        while True:
            turns.send(answer)  # type: ignore[arg-type]
            answer = {"role": "assistant", "content": "A"}
    except StopIteration as end:
        found = end.value
    assert "".join(turn["content"] for turn in found) == expected


def test_a_busy_broken_or_absent_server_is_asked_again(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    server.faults = [429, 503, "cut", 500]
    result = regenerate(params(questions(tmp_path, count=3), server), tmp_path / "out")
    assert (result.samples, result.failed) == (3, 0)
    assert len(server.bodies) == 7


def test_the_key_comes_from_the_environment_and_one_that_is_refused_ends_the_work(
    tmp_path: Path, server: StandInEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY, "sesame")
    monkeypatch.setenv(endpoint.URL, "http://127.0.0.1:1/v1")
    regenerate(params(questions(tmp_path), server, samples=2), tmp_path / "unnamed")
    assert "Bearer sesame" not in server.keys, "another port is another server"
    server.keys.clear()
    monkeypatch.setenv(endpoint.URL, server.url)
    regenerate(params(questions(tmp_path), server, samples=2), tmp_path / "out")
    assert server.keys == {"Bearer sesame"}
    assert "sesame" not in (tmp_path / "out" / "regenerated.json").read_text()
    server.faults = [401] * 10
    with pytest.raises(Forbidden, match="refuses the key") as caught:
        regenerate(params(questions(tmp_path), server), tmp_path / "other")
    assert "sesame" not in str(caught.value)
    assert not list(tmp_path.glob("other*")), "nothing was answered, nothing is left"


def test_a_few_failures_are_counted_and_many_stop_the_work_with_their_reason(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    file = questions(tmp_path, count=25)
    server.refuse = "question 7"
    result = regenerate(params(file, server), tmp_path / "out")
    assert (result.samples, result.failed) == (24, 1)
    assert result.reasons == {"400 too long": 1}
    server.refuse = "question"
    with pytest.raises(Unavailable, match=r"chats failed, at most 5% may: .* × 400 too long"):
        regenerate(params(file, server), tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_an_empty_answer_is_a_failure(tmp_path: Path, server: StandInEndpoint) -> None:
    server.faults = ["empty"]
    result = regenerate(
        params(questions(tmp_path, count=3), server, max_failed=0.5), tmp_path / "out"
    )
    assert result.reasons == {"the answer is empty": 1}


def test_a_stopped_attempt_goes_on_by_id_and_drops_a_torn_line(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    file, out = questions(tmp_path), tmp_path / "out"
    slow = params(file, server, concurrency=1)
    with pytest.raises(Stopped, match="4 chats answered"):
        regenerate(slow, out, Listener(lambda me: me.asked > 3))
    answers = tmp_path / "out.answers" / "answers.jsonl"
    kept = answers.read_bytes()
    answers.write_bytes(kept + b'{"id": "4-abc", "mess')
    before = len(server.bodies)
    result = regenerate(params(file, server), out)
    assert len(server.bodies) - before == 6
    assert [texts(row)[0] for row in written(result.output)] == [f"question {i}" for i in range(10)]
    assert result.tokens == 100, "what an earlier attempt wrote counts"
    whole = regenerate(params(file, server), tmp_path / "whole")
    assert Path(whole.output).read_bytes() == Path(result.output).read_bytes()
    asked = len(server.bodies)
    assert regenerate(params(file, server), out) == result
    assert len(server.bodies) == asked, "what is finished is not asked again"


def test_an_edited_chat_is_asked_anew_and_other_settings_are_refused(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    file, out = questions(tmp_path, count=4), tmp_path / "out"
    with pytest.raises(Stopped):
        regenerate(params(file, server, concurrency=1), out, Listener(lambda me: me.asked > 3))
    file.write_text(file.read_text().replace("question 1", "something else"))
    with pytest.raises(Conflict, match="other settings"):
        regenerate(params(file, server, max_tokens=5), out)
    result = regenerate(params(file, server), out)
    assert texts(written(result.output)[1]) == ["something else", "esle gnihtemos"]
    assert result.samples == 4
    with pytest.raises(Conflict, match="other settings"):
        regenerate(params(file, server, max_tokens=5), out)


def test_other_data_or_another_model_is_refused_and_another_path_is_not(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    file, out = questions(tmp_path), tmp_path / "out"
    regenerate(params(file, server), out)
    moved = file.rename(tmp_path / "moved.jsonl")
    regenerate(params(moved, server), out)
    server.models = ["another"]
    with pytest.raises(Conflict, match="answered_by"):
        regenerate(params(moved, server), out)
    server.models = ["stand-in"]
    with pytest.raises(Conflict, match="other data"):
        regenerate(params(questions(tmp_path, count=3), server), out)


def test_kept_answers_of_another_model_are_not_mixed_in(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    file, out = questions(tmp_path), tmp_path / "out"
    with pytest.raises(Stopped):
        regenerate(params(file, server, concurrency=1), out, Listener(lambda me: me.asked > 3))
    server.models = ["another"]
    with pytest.raises(Conflict, match="by another model"):
        regenerate(params(file, server, concurrency=1), out)


@pytest.mark.parametrize("asked", ["nan", "-3", "inf", "soon"])
def test_a_wait_that_is_no_time_is_not_obeyed(asked: str) -> None:
    response = httpx.Response(429, headers={"Retry-After": asked})
    assert endpoint._retry_after(response) is None


def test_a_stop_does_not_wait_for_answers_under_way(
    tmp_path: Path, server: StandInEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_HEED_S", 0.05)
    server.slowly = 60.0
    with pytest.raises(Stopped, match="0 chats answered"):
        regenerate(
            params(questions(tmp_path), server),
            tmp_path / "out",
            Listener(lambda me: len(server.bodies) == 4),
        )


def test_what_cannot_be_asked_again_is_skipped_with_its_reason(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    file = questions(
        tmp_path,
        {"prompt": "ab"},
        {"text": "plain"},
        {"messages": [{"role": "system", "content": "alone"}]},
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [call]},
            ]
        },
    )
    result = regenerate(params(file, server), tmp_path / "out")
    assert result.samples == 1
    assert result.skipped == {
        "plain text: nothing is asked": 1,
        "no user turn": 1,
        "turns of tools, which can't be called again": 1,
    }
    with pytest.raises(DataError, match="no chat could be answered"):
        regenerate(params(questions(tmp_path, {"text": "x"}), server), tmp_path / "other")


def test_a_server_of_several_models_wants_a_name_and_the_switch_of_thinking_is_sent(
    tmp_path: Path, server: StandInEndpoint
) -> None:
    server.models = ["a", "b"]
    with pytest.raises(NotFound, match="serves a, b"):
        regenerate(params(questions(tmp_path), server), tmp_path / "out")
    now = params(questions(tmp_path), server, model="b", enable_thinking=False, samples=1)
    assert regenerate(now, tmp_path / "out").model == "b"
    assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_password_in_the_endpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SPECLAB_ENDPOINT_KEY"):
        params(tmp_path, endpoint="https://me:secret@example.org/v1")


def test_options_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name at an endpoint"):
        params(tmp_path, model="x")
    with pytest.raises(ValueError, match="does nothing at temperature 0"):
        params(tmp_path, top_p=0.9)


def test_in_process_answers_are_the_verifiers_greedy_ones_turn_after_turn(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    chat = [
        {"role": r, "content": c} for r, c in (("user", "ab"), ("assistant", "x"), ("user", "c"))
    ]
    rows = [{"messages": chat}, *({"prompt": f"say {i}"} for i in range(4))]
    now = params(
        questions(tmp_path, *rows), verifier=str(tiny_verifier), max_tokens=6, concurrency=3
    )
    result = regenerate(now, tmp_path / "out")
    found = written(result.output)
    assert result.samples == 5 and len(found[0]["messages"]) == 4
    assert result.tokens > 0 and result.cut > 0
    verifier = load_verifier(tiny_verifier)
    template = load_template(verifier.facts)
    text = template.render(found[0]["messages"][:3], opened=True)
    ids = list(verifier.tokenizer(text, add_special_tokens=False)["input_ids"])
    begun = len(ids)
    with torch.no_grad():
        while len(ids) < begun + 6 and (len(ids) == begun or ids[-1] not in template.stops):
            ids.append(int(verifier.model(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = verifier.tokenizer.decode(ids[begun:], skip_special_tokens=True)
    assert found[0]["messages"][3]["content"] == expected
    sampled = {**now.model_dump(), "temperature": 1.0}
    two = [
        regenerate(RegenerateParams.model_validate({**sampled, "seed": seed}), tmp_path / name)
        for name, seed in (("s1", 1), ("s2", 1), ("s3", 2))
    ]
    read = [Path(r.output).read_text() for r in two]
    assert read[0] == read[1] != read[2]


def test_in_process_a_stop_keeps_finished_answers_and_what_is_finished_loads_no_verifier(
    tmp_path: Path, tiny_verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out, verifier = questions(tmp_path, count=6), tmp_path / "out", tmp_path / "verifier"
    shutil.copytree(tiny_verifier, verifier)
    stops = {"eos_token_id": list(range(0, 256, 12))}  # so that answers end at different lengths
    (verifier / "generation_config.json").write_text(json.dumps(stops))
    asked = {"data": str(data), "verifier": str(verifier), "max_tokens": 64, "concurrency": 6}
    now = RegenerateParams.model_validate({**asked, "temperature": 1.0, "max_failed": 0.9})
    ended: list[int] = []  # answers open, at each look

    class SomeEnded(Listener):
        def update(self, fraction: float | None, text: str, eta_s: float | None = None) -> None:
            ended.extend([int(text.split()[3])] if text.endswith("answers open") else [])

        def stopping(self) -> bool:
            return bool(ended) and ended[-1] < 4

    with pytest.raises(Stopped, match=r"with [1-5] chats answered"):
        regenerate(now, out, SomeEnded())
    assert regenerate(now, out).samples >= 3
    monkeypatch.setattr(answering, "load_verifier", lambda *a, **b: pytest.fail("loaded"))
    assert regenerate(now, out).samples >= 3


def test_in_process_a_chat_longer_than_the_context_fails_alone(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    file = questions(tmp_path, {"prompt": "x" * 3000}, {"prompt": "short"})
    now = params(file, verifier=str(tiny_verifier), max_tokens=4, max_failed=0.5)
    result = regenerate(now, tmp_path / "out")
    assert result.reasons == {"the chat is longer than the verifier's context": 1}
    assert texts(written(result.output)[0])[0] == "short"
