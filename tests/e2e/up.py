"""`speclab up` as a person starts it, for tests: its own SPECLAB_HOME, port and link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from tests.conftest import ROOT
from tests.e2e.browser import free_port
from tests.workers.lab import KEEP_ENVIRONMENT

SPECLAB = Path(sys.executable).with_name("speclab")
_LINK = re.compile(r"http://\S+/enter\?\S+")
_START_S = 180


class Lab:
    """Everything on this machine, started with the block and stopped by `speclab down`."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home = home
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SPECLAB_")}
        self.environment = outside | {
            "SPECLAB_HOME": str(home),
            "SPECLAB_PORT": str(self.port),
            **KEEP_ENVIRONMENT,
            "COLUMNS": "300",  # no line of the answer is folded
            **{f"SPECLAB_{name.upper()}": value for name, value in settings.items()},
        }
        self.output = home.parent / f"{home.name}.up.log"
        self.link = ""

    def __enter__(self) -> Lab:
        with self.output.open("w") as log:
            self._process = subprocess.Popen(
                [str(SPECLAB), "up"], env=self.environment, cwd=ROOT, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_S
        while not (found := _LINK.search(self.output.read_text())):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"speclab up did not start:\n{self.output.read_text()}")
            time.sleep(0.3)
        self.link = found.group()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.command("down")
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=30)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`speclab …` from another terminal of the same person."""
        return subprocess.run(
            [str(SPECLAB), *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def processes(self) -> list[str]:
        """Command lines of all living processes that carry this lab's SPECLAB_HOME."""
        mark = f"SPECLAB_HOME={self.home}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if mark in (entry / "environ").read_bytes() + b"\0":
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it ended meanwhile
                continue
        return [line for line in found if line]
