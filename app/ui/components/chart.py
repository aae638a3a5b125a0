"""Live charts of a run's metrics. Plotly's script is served from the installed wheel, so charts
work without a network; only points that are new since the last update travel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import plotly

from app.services.views import MetricView
from app.ui.components.live import Live

PLOTLY = Path(plotly.__file__).with_name("package_data") / "plotly.min.js"
VALIDATION = ", validation"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito


class Chart(Live):
    """Its `input` event asks for all points again, after updates that the browser missed."""

    SCRIPT = "chart.js"
    ROOT = "sl-chart"

    def __init__(self, **options: Any) -> None:
        gr.set_static_paths([str(PLOTLY)])
        super().__init__(
            head=f'<script src="/gradio_api/file={PLOTLY}"></script>',
            **options,
        )


def chart_payload(run_id: str, rows: Sequence[MetricView], after: int) -> dict[str, Any]:
    """The points of `rows`, which follow metric row `after` (0: from the start)."""
    return {
        "run": run_id,
        "after": after,
        "last": rows[-1].id if rows else after,
        "figures": [figure for figure in (_loss(rows), _acceptance(rows)) if figure["series"]],
    }


def _loss(rows: Sequence[MetricView]) -> dict[str, Any]:
    series = [("loss", "training", 0, False), ("val_loss", "validation", 1, True)]
    return {"id": "loss", "title": "Loss", "y": "loss (nats)", "series": _series(rows, series)}


def _acceptance(rows: Sequence[MetricView]) -> dict[str, Any]:
    series = []
    for step in _draft_steps(rows):
        series.append((f"acceptance_{step}", f"position {step + 1}", step, False))
        series.append((f"val_acceptance_{step}", f"position {step + 1}{VALIDATION}", step, True))
    return {
        "id": "acceptance",
        "title": "Acceptance by draft position",
        "note": "dotted: validation",
        "y": "accepted share",
        "range": [0, 1],
        "series": _series(rows, series),
    }


def _draft_steps(rows: Iterable[MetricView]) -> list[int]:
    names = {name for row in rows for name in row.values}
    return sorted(
        {int(m[1]) for m in (re.fullmatch(r"(?:val_)?acceptance_(\d+)", n) for n in names) if m}
    )


def _series(
    rows: Sequence[MetricView], wanted: Iterable[tuple[str, str, int, bool]]
) -> list[dict[str, Any]]:
    found = []
    for key, name, colour, marks in wanted:
        points = [(row.step, row.values[key]) for row in rows if row.values.get(key) is not None]
        if points:
            x, y = zip(*points, strict=True)
            found.append(
                {
                    "name": name,
                    "color": COLOURS[colour % len(COLOURS)],
                    "marks": marks,
                    "quiet": marks and name.endswith(VALIDATION),
                    "x": list(x),
                    "y": list(y),
                }
            )
    return found
