"""A real Chromium and a staged lab, for tests and pictures of pages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from playwright.sync_api import Page

from tests.conftest import ROOT

_START_S = 120
CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def opened(page: Page, path: str) -> None:
    """Go to a page and wait until it has been filled once."""
    page.goto(path)
    page.wait_for_selector("#nav nav a", timeout=120_000)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Stage:
    """`tests.e2e.stage` as a process of its own, ended with the block."""

    def __init__(self, home: str | Path) -> None:
        self.home = str(home)
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECLAB_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.stage", str(home), str(self.port)],
            cwd=ROOT,
            env=environment | {"GRADIO_ANALYTICS_ENABLED": "False", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.link = self._first_line()
        self._wait_until_it_listens()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stage does not listen on port {self.port}")
            time.sleep(0.1)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _first_line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the stage ended with status {self._process.wait()}")
        return line

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)
