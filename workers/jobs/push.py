"""Upload a speculator to the hub, with the token of the worker's own environment."""

from __future__ import annotations

from typing import Any

from app.services.views import RunView
from speculators_core.hub.push import push
from speculators_core.params import PushParams
from workers.reporter import Reporter


def run(run: RunView, params: PushParams, reporter: Reporter) -> dict[str, Any]:
    return push(params, reporter).model_dump(mode="json")
