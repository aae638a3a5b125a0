"""`python -m workers.serve` with the reference engine, and with what it can't serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT
from tests.workers.lab import wait_for


def start(home: Path, params: dict) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.serve"],
        cwd=ROOT,
        env={**os.environ, "SPECLAB_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(params))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"verifier": "/nowhere"}, "the verifier is not a directory"),
        ({"verifier": "/nowhere", "colour": "red"}, "colour"),
    ],
)
def test_what_can_not_be_served_is_an_error_in_json(tmp_path, params, message) -> None:
    process = start(tmp_path, params)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert message in json.loads(out)["error"]["message"]


def test_it_serves_in_the_foreground_and_leaves_no_process(tmp_path, served_models) -> None:
    verifier, speculator = served_models
    params = {
        "verifier": str(verifier),
        "speculator": str(speculator),
        "engine": "reference",
        "max_model_len": 512,
    }
    process = start(tmp_path, params)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    models = httpx.get(f"{told['endpoint']}/v1/models").json()
    assert told["served_name"] in [model["id"] for model in models["data"]]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    mark = f"SPECLAB_HOME={tmp_path}\0".encode()

    def nothing_left() -> bool:
        return not any(mark in _environment(entry) for entry in Path("/proc").glob("[0-9]*"))

    wait_for(nothing_left, 5, "its processes to be gone")


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
