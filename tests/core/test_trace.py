"""The trace writer never blocks, counts what it drops, and always starts on a whole line."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from speculators_core.trace import TraceWriter


def listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    return server


def read_lines(connection: socket.socket) -> list[dict]:
    data = b""
    connection.settimeout(2)
    while not data.endswith(b"\n") or b'"end"' not in data.splitlines()[-1]:
        piece = connection.recv(1 << 16)
        if not piece:
            break
        data += piece
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)  # socket paths are short
    return Path("s")


def event(kind: str, rid: str = "r", **more) -> dict:
    return {"ev": kind, "rid": rid, **more}


def test_events_arrive_as_lines_in_order(path):
    server, writer = listen(path), TraceWriter(path)
    for one in (event("start", k=3), event("step", drafted=[1, 2]), event("end", status="stop")):
        writer.write(one)
    lines = read_lines(server.accept()[0])
    assert [line["ev"] for line in lines] == ["start", "step", "end"]
    assert lines[1]["drafted"] == [1, 2]
    assert lines[2]["dropped"] == 0


def test_without_a_listener_writes_return_at_once_and_keep_what_fits(path):
    writer = TraceWriter(path, max_pending_bytes=2000)
    began = time.monotonic()
    for i in range(1000):
        writer.write(event("step", i=i))
    assert time.monotonic() - began < 1.0
    assert 0 < writer.dropped < 1000


def test_a_request_is_told_how_many_of_its_own_events_were_lost(path):
    writer = TraceWriter(path, max_pending_bytes=500)
    for _ in range(100):
        writer.write(event("step", rid="a"))
    writer.write(event("step", rid="b"))
    lost = writer.dropped
    server = listen(path)
    time.sleep(0.6)  # the writer looks for a listener twice a second
    writer.write(event("end", rid="b"))
    writer.write(event("end", rid="a"))
    ends = {e["rid"]: e["dropped"] for e in read_all_ends(server.accept()[0], 2)}
    assert ends == {"b": 1, "a": lost - 1}


def read_all_ends(connection: socket.socket, count: int) -> list[dict]:
    connection.settimeout(2)
    data = b""
    while data.count(b'"end"') < count or not data.endswith(b"\n"):
        data += connection.recv(1 << 16)
    return [e for e in map(json.loads, data.splitlines()) if e["ev"] == "end"]


def test_a_listener_that_does_not_read_costs_events_not_time(path):
    server = listen(path)
    writer = TraceWriter(path, max_pending_bytes=10_000)
    began = time.monotonic()
    for _ in range(20_000):
        writer.write(event("step", drafted=list(range(20))))
    assert time.monotonic() - began < 5.0
    assert writer.dropped > 0
    server.close()


def test_after_a_listener_left_the_next_one_gets_whole_lines(path):
    server = listen(path)
    writer = TraceWriter(path)
    writer.write(event("start"))
    first, _ = server.accept()
    while writer.flush():  # fill the socket until half a line is stuck in it
        writer.write(event("step", filler="x" * 50_000))
    first.close()
    server.close()
    path.unlink()
    writer.flush()  # notices
    server = listen(path)
    time.sleep(0.6)
    writer.write(event("end", status="abort"))
    lines = read_lines(server.accept()[0])
    assert lines[-1]["ev"] == "end"
    assert lines[-1]["dropped"] == writer.dropped == 1


def test_closing_waits_for_a_slow_listener(path):
    server, writer = listen(path), TraceWriter(path)
    writer.write(event("end"))
    writer.close(wait_s=1.0)
    assert len(read_lines(server.accept()[0])) == 1


def test_the_environment_names_the_socket(path, monkeypatch):
    monkeypatch.delenv("SPECLAB_TRACE_SOCKET", raising=False)
    assert TraceWriter.from_environment() is None
    monkeypatch.setenv("SPECLAB_TRACE_SOCKET", str(path))
    writer = TraceWriter.from_environment()
    assert writer is not None and writer.path == str(path)
