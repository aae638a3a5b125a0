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
from speculators_core.training.presets import REFERENCE

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
    figures = [
        _loss(rows),
        _acceptance(rows),
        _length(rows),
        *(_small(rows, *one) for one in SMALL),
    ]
    return {
        "run": run_id,
        "after": after,
        "last": rows[-1].id if rows else after,
        "figures": [figure for figure in figures if figure["series"]],
    }


SMALL = (
    ("coverage", "The verifier's choices covered", "share"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("lr", "Learning rate", "rate"),
    ("tokens_per_second", "Speed", "tokens/s"),
    ("memory_mb", "Memory", "MB"),
    ("skipped", "Steps without a trained token", "steps"),
    ("quarantined", "Chats set aside", "chats"),
)
"""Metrics with a small chart of their own: name, title, unit."""


def _small(rows: Sequence[MetricView], name: str, title: str, unit: str) -> dict[str, Any]:
    wanted = [(name, title, 0, False), (f"val_{name}", f"{title}{VALIDATION}", 0, True)]
    return {"id": name, "title": title, "y": unit, "small": True, "series": _series(rows, wanted)}


def _loss(rows: Sequence[MetricView]) -> dict[str, Any]:
    wanted = [("loss", "training", 0, False), ("val_loss", "validation", 1, True)]
    steps = _draft_steps(rows, "loss")
    wanted += [(f"loss_{k}", f"step {k + 1}", k + 2, False) for k in steps if len(steps) > 1]
    return {"id": "loss", "title": "Loss", "y": "loss (nats)", "series": _series(rows, wanted)}


def _acceptance(rows: Sequence[MetricView]) -> dict[str, Any]:
    wanted = []
    for k in _draft_steps(rows, "acceptance"):
        wanted.append((f"acceptance_{k}", f"position {k + 1}", k, False))
        wanted.append((f"val_acceptance_{k}", f"position {k + 1}{VALIDATION}", k, True))
    return {
        "id": "acceptance",
        "title": "Acceptance by position",
        "note": f"dotted: validation; band: {REFERENCE.about}",
        "y": "accepted share",
        "range": [0, 1],
        "band": [REFERENCE.low, REFERENCE.high],
        "series": _series(rows, wanted),
    }


def _length(rows: Sequence[MetricView]) -> dict[str, Any]:
    wanted = [
        ("acceptance_length", "training", 0, False),
        ("val_served_acceptance_length", "validation", 1, True),
        ("measured_acceptance_length", "measured", 2, True),
    ]
    return {
        "id": "length",
        "title": "Acceptance length",
        "y": "tokens a step",
        "small": True,
        "series": _series(rows, wanted),
    }


def _draft_steps(rows: Iterable[MetricView], metric: str) -> list[int]:
    names = {name for row in rows for name in row.values}
    found = (re.fullmatch(rf"(?:val_)?{metric}_(\d+)", name) for name in names)
    return sorted({int(match[1]) for match in found if match})


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
