"""Groups are ended whole, and strangers with the same number are left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from workers import processes

_SLEEPER = "import time; time.sleep(60)"
_DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(60)
"""
_PARENT_THAT_LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
sys.stdin.readline()
"""
_DIES_WITH_PARENT = """
import time
from speculators_core.lifeline import die_with_parent
die_with_parent()
print(1, flush=True)
time.sleep(60)
"""
_PARENT_OF_ONE_THAT_DIES = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_DIES_WITH_PARENT!r}],
                         stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.readline()
"""
_CHILD_OF_ANOTHER = """
from speculators_core.lifeline import die_with_parent
die_with_parent(parent=1 << 30)
print("alive")
"""


@pytest.fixture
def group():
    """Starts `python -c CODE` as leader of a new session; ends what is left of it afterwards."""
    started = []

    def start(code: str, **options) -> tuple[subprocess.Popen, float]:
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **options)
        started.append(child)
        return child, processes.start_time(child.pid)

    yield start
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


def test_a_running_process_has_a_start_time_and_a_dead_one_has_none(group):
    child, started = group(_SLEEPER)
    assert started > 0
    assert processes.process_alive(child.pid, started)
    child.kill()
    time.sleep(0.1)  # a zombie: nobody has waited for it yet
    assert processes.start_time(child.pid) is None
    child.wait()
    assert not processes.process_alive(child.pid, started)


def test_ending_a_group_ends_it_with_term_when_it_listens(group):
    child, started = group(_SLEEPER)
    assert processes.end_group(child.pid, started, grace_s=5)
    assert child.wait() == -signal.SIGTERM


def test_a_group_that_ignores_term_is_killed_after_the_grace(group):
    child, started = group(_DEAF, stdout=subprocess.PIPE)
    child.stdout.readline()
    began = time.monotonic()
    assert processes.end_group(child.pid, started, grace_s=0.3)
    assert time.monotonic() - began >= 0.3
    assert child.wait() == -signal.SIGKILL


def test_a_group_outlives_its_leader_and_is_still_ended(group):
    leader, started = group(_PARENT_THAT_LEAVES, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    orphan = int(leader.stdout.readline())
    leader.stdin.write(b"\n")
    leader.stdin.flush()
    leader.wait()
    assert processes.start_time(orphan) is not None
    assert processes.group_alive(leader.pid, started)
    assert processes.end_group(leader.pid, started, grace_s=2)
    assert processes.start_time(orphan) is None


def test_a_reused_number_is_never_signalled(group):
    child, started = group(_SLEEPER)
    assert not processes.group_alive(child.pid, started - 1)
    assert processes.end_group(child.pid, started - 1, grace_s=0)
    assert processes.process_alive(child.pid, started)


def test_a_group_that_is_gone_counts_as_ended(group):
    child, started = group("pass")
    child.wait()
    assert processes.end_group(child.pid, started or 1.0, grace_s=0)


def test_a_child_dies_with_its_parent(group):
    leader, _ = group(_PARENT_OF_ONE_THAT_DIES, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = int(leader.stdout.readline())
    assert processes.start_time(pid) is not None
    leader.kill()
    deadline = time.monotonic() + 5
    while processes.start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes.start_time(pid) is None


def test_a_child_whose_parent_has_gone_already_ends_at_once(group):
    child, _ = group(_CHILD_OF_ANOTHER, stdout=subprocess.PIPE)
    assert child.communicate()[0] == b""
    assert child.returncode == -signal.SIGKILL
