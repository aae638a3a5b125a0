"""The parent process: with small children, and as `speclab up` with the real ones."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from app import embedded_broker, instance
from app.settings import Settings
from app.supervisor import rotate
from app.up import require_free_port
from speculators_core.errors import Conflict, Unavailable

Found = TypeVar("Found")

_PARENT = """
import sys
from pathlib import Path
from app.supervisor import Child, Supervisor
from speculators_core.errors import SpeclabError
folder = Path(sys.argv[1])
with Supervisor() as supervisor:
    for name, code in (("first", sys.argv[2]), ("second", sys.argv[3])):
        child = supervisor.add(Child(name, [sys.executable, "-c", code], folder / name, 2.0))
    try:
        supervisor.wait_until((folder / "ready").exists, child, 20.0)
        supervisor.watch()
    except SpeclabError as error:
        (folder / "error").write_text(str(error))
"""
_SLEEP = "import time; time.sleep(600)"
_TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}


def test_a_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with _parent(tmp_path, _SLEEP, _SLEEP) as parent:
        first, second = _eventually(lambda: _pair(parent))
        os.kill(first, signal.SIGKILL)
        after = _eventually(lambda: _without(parent, first))
        assert second in after


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_parent_and_all_of_its_children(tmp_path: Path, number: int) -> None:
    with _parent(tmp_path, _SLEEP, _SLEEP) as parent:
        children = _eventually(lambda: _pair(parent))
        parent.send_signal(number)
        assert parent.wait(10) == 0
        assert not any(psutil.pid_exists(pid) for pid in children)


def test_the_last_child_added_is_stopped_first(tmp_path: Path) -> None:
    def note(name: str) -> str:
        return (
            "import signal, sys, time\n"
            "def end(*_):\n"
            f"    print({name!r}, file=open({str(tmp_path / 'order')!r}, 'a'))\n"
            "    sys.exit()\n"
            "signal.signal(signal.SIGTERM, end)\n"
            f"open({str(tmp_path / name)!r} + '.up', 'w').close()\n"
            "time.sleep(600)"
        )

    with _parent(tmp_path, note("first"), note("second")) as parent:
        _eventually(lambda: (tmp_path / "first.up").exists() and (tmp_path / "second.up").exists())
        parent.terminate()
        parent.wait(10)
    assert (tmp_path / "order").read_text().split() == ["second", "first"]


def test_a_child_that_ignores_term_is_killed_after_its_grace(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(600)"
    )
    with _parent(tmp_path, _SLEEP, stubborn) as parent:
        _eventually((tmp_path / "up").exists)
        children = _children(parent)
        parent.terminate()
        assert parent.wait(10) == 0
        assert not any(psutil.pid_exists(pid) for pid in children)


def test_orphans_of_children_do_not_outlive_the_parent(tmp_path: Path) -> None:
    leaves_one = (
        "import subprocess, sys, time\n"
        f"left = subprocess.Popen([sys.executable, '-c', {_SLEEP!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'orphan')!r}, 'w').write(str(left.pid)); time.sleep(600)"
    )
    with _parent(tmp_path, _SLEEP, leaves_one) as parent:
        orphan = int(_eventually((tmp_path / "orphan").read_text))
        parent.terminate()
        assert parent.wait(10) == 0
        assert not psutil.pid_exists(orphan)


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    with _parent(tmp_path, _SLEEP, _SLEEP) as parent:
        children = _eventually(lambda: _pair(parent))
        parent.kill()
        parent.wait()
        _eventually(lambda: not any(_runs(pid) for pid in children))


def test_a_child_that_never_starts_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with _parent(tmp_path, _SLEEP, "raise SystemExit('no such device')", ready=False) as parent:
        assert parent.wait(20) == 0
    assert "second does not start: no such device" in (tmp_path / "error").read_text()


def test_logs_are_rotated_at_start(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    for number in range(5):
        log.write_text(str(number))
        rotate(log)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"app.log.1": "4", "app.log.2": "3", "app.log.3": "2"}


def test_a_reused_pid_is_not_taken_for_the_instance(tmp_path: Path) -> None:
    with instance.hold(tmp_path, "up"):
        assert instance.running(tmp_path, "up")
        with pytest.raises(Conflict), instance.hold(tmp_path, "up"):
            pass
        file = tmp_path / "up.json"
        told = json.loads(file.read_text())
        file.write_text(json.dumps({**told, "started": told["started"] - 1}))
        assert instance.running(tmp_path, "up") is None
    assert not file.exists()


def test_a_damaged_instance_file_is_no_instance(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"pid": 1}'):
        (tmp_path / "up.json").write_text(text)
        assert instance.running(tmp_path, "up") is None


def test_the_broker_socket_is_short_and_private_under_a_long_home(tmp_path: Path) -> None:
    current = Settings(home=tmp_path / ("x" * 120))
    assert len(os.fsencode(current.broker_socket)) <= 100
    embedded_broker.prepare(current)
    folder = current.broker_socket.parent
    try:
        folder.chmod(0o755)
        with pytest.raises(Unavailable, match="not private"):
            embedded_broker.prepare(current)
    finally:
        embedded_broker.tidy(current)
    assert not folder.exists()


def test_a_broker_left_by_a_killed_parent_is_ended(tmp_path: Path, short: Path) -> None:
    current = Settings(home=short)
    embedded_broker.prepare(current)
    left = subprocess.Popen(embedded_broker.command(current), stdout=subprocess.DEVNULL)
    try:
        _eventually(lambda: embedded_broker.answers(current))
        embedded_broker.prepare(current)
        left.wait(5)
        assert not current.broker_socket.exists()
    finally:
        left.kill()
        left.wait()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose sockets have short paths."""
    with _short_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """The real thing, started once."""
    with _short_directory() as directory:
        lab = Lab(directory / ("home-too-long-for-a-socket" * 4), _free_port())
        lab.start()
        try:
            yield lab
        finally:
            lab.end()


class Lab:
    """`speclab up` in a home of its own."""

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self.up: subprocess.Popen[str] | None = None
        self.told: dict[str, Any] = {}

    def start(self) -> None:
        self.up = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "up", "--port", str(self.port), "--json"],
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.up.stdout
        self.told = json.loads(self.up.stdout.readline() or '{"error": "nothing was said"}')
        assert "link" in self.told, self.told

    @property
    def environment(self) -> dict[str, str]:
        mine = {k: v for k, v in os.environ.items() if not k.startswith("SPECLAB_")}
        return {**mine, "SPECLAB_HOME": str(self.home), "OMP_NUM_THREADS": "1"}

    def speclab(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "app.cli", *arguments],
            env={**self.environment, **settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def child(self, part: str) -> int | None:
        """The pid of the child whose command line contains `part`."""
        assert self.up
        for child in psutil.Process(self.up.pid).children():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(child.cmdline()):
                    return child.pid
        return None

    def healthy(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.port}/healthz"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(json.load(answer)["ok"])
        except OSError:
            return False

    def processes(self) -> list[str]:
        """Command lines of everything that runs with this home."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SPECLAB_HOME") == str(self.home):
                    found.append(" ".join(process.cmdline()))
        return found

    def end(self) -> None:
        if self.up and self.up.poll() is None:
            self.up.terminate()
            self.up.wait(60)


def test_up_makes_a_private_home_and_lets_its_user_in(lab: Lab) -> None:
    assert lab.home.stat().st_mode & 0o777 == 0o700
    assert (lab.home / "api-token").stat().st_mode & 0o777 == 0o600
    jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with jar.open(lab.told["link"]) as page:
        assert page.status == 200
        assert b"gradio" in page.read().lower()
    token = lab.told["link"].partition("token=")[2]
    for log in (lab.home / "logs").iterdir():
        assert token not in log.read_text(errors="replace")


def test_up_again_says_that_it_runs(lab: Lab) -> None:
    again = lab.speclab("up", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["address"] == f"http://127.0.0.1:{lab.port}"
    status = json.loads(lab.speclab("status", "--json").stdout)
    assert status["up"] and status["store"]["ok"] and status["broker"]["ok"]


def test_a_busy_port_is_named_and_leaves_nothing(lab: Lab, short: Path) -> None:
    other = Lab(short / "other", lab.port)
    refused = other.speclab("up", "--port", str(lab.port), "--json")
    error = json.loads(refused.stdout)["error"]
    assert refused.returncode == 1
    assert str(lab.port) in error["message"] and error["hint"]
    assert not other.home.exists()
    assert other.processes() == []


@pytest.mark.parametrize("part", ["valkey-server", "celery", "uvicorn"])
def test_whatever_is_killed_comes_back(lab: Lab, part: str) -> None:
    before = _eventually(lambda: lab.child(part))
    os.kill(before, signal.SIGKILL)
    _eventually(lambda: lab.child(part) not in (None, before))
    _eventually(lab.healthy, 90)
    _eventually(lambda: json.loads(lab.speclab("status", "--json").stdout)["working"], 60)


def test_a_run_submitted_from_a_terminal_is_done(lab: Lab, short: Path) -> None:
    (short / "config.json").write_text(json.dumps(_TINY_LLAMA))
    submitted = lab.speclab(
        "submit", "verifier", "--source", str(short), "--name", "tiny", "--json"
    )
    run_id = json.loads(submitted.stdout)["id"]
    followed = lab.speclab("logs", "-f", run_id)
    assert "succeeded" in followed.stderr, followed.stdout
    page = json.loads(lab.speclab("runs", "--json").stdout)
    assert page["items"][0]["result"]["name"] == "tiny"
    elsewhere = {
        "SPECLAB_HOME": str(short / "elsewhere"),
        "SPECLAB_URL": f"http://127.0.0.1:{lab.port}",
        "SPECLAB_TOKEN": (lab.home / "api-token").read_text(),
    }
    assert json.loads(lab.speclab("runs", "--json", **elsewhere).stdout) == page
    refused = lab.speclab("runs", "--json", **{**elsewhere, "SPECLAB_TOKEN": "wrong"})
    assert json.loads(refused.stdout)["error"]["kind"] == "forbidden"


def test_down_stops_everything_and_a_second_up_is_clean(lab: Lab) -> None:
    assert lab.up
    down = lab.speclab("down", "--json")
    assert json.loads(down.stdout) == {"stopped": True, "orderly": True}
    assert lab.up.wait(5) == 0
    assert lab.processes() == []
    assert not _listens(lab.port)
    require_free_port(Settings(home=lab.home, port=lab.port))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _short_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sl-", dir="/tmp") as name:
        yield Path(name)


@contextlib.contextmanager
def _parent(
    folder: Path, first: str, second: str, *, ready: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    if ready:
        (folder / "ready").touch()
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(folder), first, second])
    try:
        yield parent
    finally:
        parent.kill()
        parent.wait()


def _children(parent: subprocess.Popen[bytes]) -> list[int]:
    return [child.pid for child in psutil.Process(parent.pid).children()]


def _pair(parent: subprocess.Popen[bytes]) -> list[int] | None:
    found = _children(parent)
    return found if len(found) == 2 else None


def _without(parent: subprocess.Popen[bytes], gone: int) -> list[int] | None:
    found = _pair(parent)
    return found if found and gone not in found else None


def _runs(pid: int) -> bool:
    return instance.start_ticks(pid) is not None


def _eventually(look: Callable[[], Found], seconds: float = 20.0) -> Found:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            if found := look():
                return found
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
