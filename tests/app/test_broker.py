"""Ringing for workers through a real broker, and without one."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest
import redis

from app import embedded_broker
from app.services import broker
from app.settings import settings


@pytest.fixture
def server(home):
    embedded_broker.prepare(settings())
    process = subprocess.Popen(embedded_broker.command(settings()), stdout=subprocess.DEVNULL)
    while not embedded_broker.answers(settings()):
        assert process.poll() is None
        time.sleep(0.02)
    yield process
    process.terminate()
    process.wait(10)


def test_a_ring_is_a_message_that_carries_the_run_id_alone(server):
    assert broker.wake("abc123")
    (message,) = broker.client().lrange("runs", 0, -1)
    headers = json.loads(message)["headers"]
    assert headers["task"] == "speclab.execute" and headers["ignore_result"]
    assert headers["argsrepr"] == "['abc123']"


def test_without_a_broker_a_ring_fails_soon_and_works_again_later(home, caplog):
    before = time.monotonic()
    assert not broker.wake("abc123")
    assert time.monotonic() - before < 10
    assert "abc123" in caplog.text
    with pytest.raises(redis.RedisError):
        broker.client().ping()


def test_a_ring_works_after_the_broker_was_away(server):
    assert broker.wake("first")
    os.kill(server.pid, 9)
    server.wait(10)
    assert not broker.wake("second")
    embedded_broker.prepare(settings())
    again = subprocess.Popen(embedded_broker.command(settings()), stdout=subprocess.DEVNULL)
    try:
        while not embedded_broker.answers(settings()):
            time.sleep(0.02)
        assert broker.wake("third")
        assert broker.client().llen("runs") == 2  # the append-only file kept the first
    finally:
        again.terminate()
        again.wait(10)


def test_every_deployment_has_a_stream_of_its_own():
    assert broker.trace_stream("abc") == "trace:abc"
