"""How a deployment is named on every page."""

from __future__ import annotations

from app.services.views import DeploymentView


def word(one: DeploymentView) -> str:
    """The one word for its chip: the phase while it runs, else the state."""
    return one.phase.value if one.state == "running" and one.phase else one.state.value


def drafter(one: DeploymentView) -> str:
    """Who drafts."""
    return one.speculator.rstrip("/").rsplit("/", 1)[-1] if one.speculator else "n-gram"
