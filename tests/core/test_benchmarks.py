"""That what prints the figures of `docs/benchmarks.md` still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import tiny
from tests.conftest import ROOT


def test_the_benchmark_of_decoding_runs_on_a_tiny_verifier(tmp_path: Path) -> None:
    verifier = tiny.build_verifier(tmp_path / "verifier")
    script = [sys.executable, "benchmarks/decode.py", "--verifier", str(verifier)]
    done = subprocess.run(
        [*script, "--quick", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["speculator"] == "random"
    assert figures["plain_tokens_per_second"] > 0
    assert 1 <= figures["acceptance_length"] <= 1 + figures["speculative_tokens"]
