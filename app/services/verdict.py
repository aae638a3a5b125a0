"""What a directory's own conversion report says about serving it. Asks no store."""

from __future__ import annotations

from pathlib import Path

from app.services.views import Verdict
from speculators_core.config import read_json

REPORT = "conversion_report.json"


def verdict_of(directory: Path) -> Verdict | None:
    """None where no conversion wrote into this directory.

    Raises `CheckpointError` where its report is damaged.
    """
    if not (directory / REPORT).is_file():
        return None
    report = read_json(directory / REPORT)
    parts = [report.get(part) for part in ("serving", "validation")]
    serving, validation = (part if isinstance(part, dict) else {} for part in parts)
    return Verdict(
        algorithm=str(serving.get("algorithm")),
        deployable=report.get("deployable") is not False,
        doubts=list(report.get("doubts") or ()),
        failed=[str(check) for check in validation.get("failed") or ()],
    )
