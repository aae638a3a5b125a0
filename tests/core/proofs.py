"""Where long proofs write their figures: a line a run, with date and commit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tests.conftest import ROOT


def record(name: str, figures: Mapping[str, Any]) -> None:
    """Add a line to docs/proofs/NAME.jsonl."""
    file = ROOT / "docs" / "proofs" / f"{name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    stamp = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": told.stdout.strip() or "unknown"}
    with file.open("a") as lines:
        lines.write(json.dumps({**stamp, **figures}) + "\n")
