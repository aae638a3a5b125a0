"""How a deployment is named on every page."""

from __future__ import annotations

from app.services import speculators
from app.services.views import DeploymentView


def word(one: DeploymentView) -> str:
    """The one word for its chip: the phase while it runs, else the state."""
    return one.phase.value if one.state == "running" and one.phase else one.state.value


def drafter(one: DeploymentView) -> str:
    """Who drafts, by the name it is registered as where it has one."""
    if not one.speculator:
        return "n-gram"
    made_by = one.speculator.removeprefix("run:")
    known = (s.name for s in speculators.list_speculators() if made_by in (s.run_id, s.path))
    return next(known, one.speculator.rstrip("/").rsplit("/", 1)[-1])


def verifier(one: DeploymentView) -> str:
    """Who answers: what the server calls it, once there is a server."""
    if one.endpoint or not one.verifier.startswith("run:"):
        return one.served_name
    return one.verifier
