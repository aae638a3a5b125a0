"""Submitting, finding, cancelling and repeating runs; their metrics and logs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from app.services import claims, runs
from app.services.logs import MOST_BYTES
from app.settings import settings
from app.store.engine import writing
from app.store.models import Run, RunState, now
from speculators_core.errors import Conflict, InputError, NotFound
from speculators_core.params import JobKind

PREPARE = {"data": ["chats.jsonl"], "verifier": "v"}
DEPLOY = {"verifier": "v"}


def submit(kind="prepare", params=None, owner="ada", **more):
    return runs.submit(kind, PREPARE if params is None else params, owner=owner, **more)


def start(host="here"):
    claims.register_slots(host, [], 1, 1)
    claimed = claims.claim(host)
    assert claimed is not None
    return claimed.run_id


def age(run_id: str, **ago: float) -> None:
    with writing() as session:
        session.get(Run, run_id).created_at = now() - timedelta(**ago)


def test_a_submitted_run_is_queued_with_every_parameter_and_a_worker_is_woken(store, rings):
    run = submit()
    assert run.state is RunState.QUEUED and run.kind is JobKind.PREPARE and run.owner == "ada"
    assert run.params["seq_length"] == 2048 and run.params["data"] == ["chats.jsonl"]
    assert rings == [run.id]
    assert runs.get(run.id).woken_at is not None


def test_bad_parameters_name_the_field_and_leave_no_run(store, rings):
    with pytest.raises(InputError, match="seq_len: no such parameter"):
        submit(params={**PREPARE, "seq_len": 5})
    with pytest.raises(InputError, match="seq_length"):
        submit(params={**PREPARE, "seq_length": 0})
    with pytest.raises(InputError, match="no kind of run 'bake'"):
        submit(kind="bake")
    with pytest.raises(InputError, match="name"):
        submit(name="x" * 201)
    assert runs.list_runs().total == 0 and rings == []


def test_the_same_form_twice_in_a_moment_is_one_run(store, rings):
    with ThreadPoolExecutor(8) as pool:
        views = list(pool.map(lambda _: submit(), range(8)))
    assert len({view.id for view in views}) == 1
    assert runs.list_runs().total == 1


def test_equal_work_of_another_person_or_later_or_after_its_end_is_another_run(store):
    first = submit()
    assert submit(owner="bob").id != first.id
    assert submit(params={**PREPARE, "seed": 1}).id != first.id
    age(first.id, minutes=1)
    second = submit()
    assert second.id != first.id
    runs.cancel(second.id, "ada")
    assert submit().id != second.id


def test_an_idempotency_key_gives_the_same_run_for_ever_and_refuses_other_work(store):
    first = submit(idempotency_key="k1")
    age(first.id, days=3)
    runs.cancel(first.id, "ada")
    assert submit(idempotency_key="k1").id == first.id
    assert submit(idempotency_key="k1", owner="bob").id != first.id
    with pytest.raises(Conflict, match="idempotency"):
        submit(params={**PREPARE, "seed": 2}, idempotency_key="k1")


def test_a_reference_to_a_run_is_a_need_of_it(store):
    first = submit()
    second = submit("train", {"data": f"run:{first.id}", "verifier": "v"})
    assert second.needs == (first.id,)
    assert runs.get(second.id).needs == (first.id,)
    assert runs.list_runs(kind="train").items[0].needs == (first.id,)


def test_a_need_that_is_unknown_or_has_failed_is_refused(store):
    with pytest.raises(NotFound):
        submit(needs=["nosuchrun0"])
    failed = submit()
    runs.cancel(failed.id, "ada")
    with pytest.raises(Conflict, match="cancelled"):
        submit("train", {"data": f"run:{failed.id}", "verifier": "v"})


def test_equal_chains_have_equal_fingerprints_whatever_their_ids(store):
    first, second = submit(), submit(owner="bob")
    trains = [submit("train", {"data": f"run:{r.id}", "verifier": "v"}) for r in (first, second)]
    assert trains[0].fingerprint == trains[1].fingerprint
    held_out = submit("train", {"data": f"run:{first.id}/held_out", "verifier": "v"})
    assert held_out.fingerprint != trains[0].fingerprint


def test_a_chain_is_queued_whole_or_not_at_all(store):
    def following(params, before):
        return {**params, "data": f"run:{before}"}

    train = {"data": "run:PREPARED", "verifier": "v"}
    with pytest.raises(InputError, match="lr"):
        runs.submit_chain(
            [("prepare", PREPARE), ("train", {**train, "lr": -1})], following, owner="ada"
        )
    assert runs.list_runs().total == 0
    first, second = runs.submit_chain(
        [("prepare", PREPARE), ("train", train)], following, owner="ada"
    )
    assert second.params["data"] == f"run:{first.id}"


def test_lists_are_filtered_searched_and_paged_in_the_store(store):
    ids = [submit(params={**PREPARE, "seed": n}, name=f"run 100% {n}").id for n in range(5)]
    for n, run_id in enumerate(ids):
        age(run_id, minutes=n)
    other = submit("deploy", DEPLOY, owner="Bob_2", name="other").id
    page = runs.list_runs(kind="prepare", limit=2, offset=1)
    assert page.total == 5 and [run.id for run in page.items] == ids[1:3]
    assert runs.list_runs(search="100% 3").items[0].id == ids[3]
    assert runs.list_runs(search="100_").total == 0
    assert [run.id for run in runs.list_runs(search="bob_").items] == [other]
    assert [run.id for run in runs.list_runs(search=other[:6].upper()).items] == [other]
    assert runs.list_runs(owner="ada").total == 5
    runs.cancel(ids[0], "ada")
    assert runs.list_runs(state="cancelled").total == 1
    assert runs.list_runs(state=[RunState.CANCELLED, RunState.QUEUED]).total == 6
    with pytest.raises(InputError, match="known: queued"):
        runs.list_runs(state="asleep")


def test_a_run_that_is_not_there_is_not_found(store):
    for call in (runs.get, runs.metrics, lambda r: runs.cancel(r, "ada")):
        with pytest.raises(NotFound, match="nosuchrun"):
            call("nosuchrun")


def test_a_queued_run_is_cancelled_at_once_and_a_running_one_is_asked_to_stop(store):
    queued = submit()
    assert runs.cancel(queued.id, "bob").state is RunState.CANCELLED
    assert runs.cancel(queued.id, "bob").state is RunState.CANCELLED
    submit()
    running = start()
    asked = runs.cancel(running, "bob")
    assert asked.state is RunState.CANCELLING and "bob" in asked.progress_text
    assert runs.cancel(running, "bob").state is RunState.CANCELLING
    assert claims.finish(running, "succeeded")
    with pytest.raises(Conflict, match="succeeded"):
        runs.cancel(running, "bob")


def test_a_retry_copies_the_parameters_into_a_new_run(store):
    run = submit(params={**PREPARE, "seed": 3}, name="mine", priority=2)
    with pytest.raises(Conflict, match="queued"):
        runs.retry(run.id, "bob")
    runs.cancel(run.id, "ada")
    again = runs.retry(run.id, "bob")
    assert again.id != run.id and again.state is RunState.QUEUED and again.owner == "bob"
    assert (again.params, again.name, again.priority) == (run.params, "mine", 2)


def test_metrics_come_after_an_id_and_a_step_logged_again_comes_again(store):
    run_id = submit().id
    claims.add_metrics(run_id, {1: {"loss": 3.0}, 2: {"loss": float("nan")}})
    seen = runs.metrics(run_id)
    assert [(m.step, m.values) for m in seen] == [(1, {"loss": 3.0}), (2, {"loss": None})]
    assert runs.metrics(run_id, after=seen[-1].id) == []
    claims.add_metrics(run_id, {2: {"loss": 2.0}})
    assert [(m.step, m.values) for m in runs.metrics(run_id, after=seen[-1].id)] == [
        (2, {"loss": 2.0})
    ]
    assert len(runs.metrics(run_id)) == 2


def write_log(run_id: str, data: bytes) -> None:
    path = settings().run_dir(run_id) / "log.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_a_log_is_read_in_chunks_that_join_without_loss(home):
    text = "".join(f"line {n}: ünïcødé ✓ 🙂\n" for n in range(200))
    write_log("abc", text.encode())
    offset, parts = 0, []
    while offset < (chunk := runs.log("abc", offset, limit=101)).size:
        assert len(chunk.text.encode()) <= 101
        parts.append(chunk.text)
        offset = chunk.end
    assert "".join(parts) == text


def test_a_tail_of_a_huge_log_is_short_and_starts_at_a_line(home):
    write_log("abc", b"x" * 99 + b"\n" + b"a line of the log\n" * 1_000_000)
    chunk = runs.log("abc")
    assert chunk.size == 18_000_100 and chunk.end == chunk.size
    assert len(chunk.text) <= 65_536 and chunk.text.startswith("a line")
    assert len(runs.log("abc", 0, limit=1 << 40).text) == MOST_BYTES


def test_a_log_without_newlines_or_with_broken_bytes_is_still_shown(home):
    write_log("abc", "é".encode() * 50_000)
    chunk = runs.log("abc", limit=1001)
    assert set(chunk.text) == {"é"} and chunk.end == chunk.size
    write_log("abc", b"good\xff\xc3")
    chunk = runs.log("abc", 0)
    rest = runs.log("abc", chunk.end)
    assert chunk.text + rest.text == "good\ufffd\ufffd" and rest.end == rest.size


def test_an_absent_log_is_empty_and_an_id_that_is_a_path_is_refused(home):
    assert runs.log("abc").size == 0
    for run_id in ("../abc", "..", "a/b", ""):
        with pytest.raises(NotFound):
            runs.log(run_id)
