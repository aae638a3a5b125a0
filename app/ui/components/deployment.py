"""How a deployment is named on every page."""

from __future__ import annotations

from collections.abc import Sequence

from app.services import speculators, verifiers
from app.services.views import DeploymentView, SpeculatorView, VerifierView


def word(one: DeploymentView) -> str:
    """The one word for its chip: the phase while it runs, else the state."""
    return one.phase.value if one.state == "running" and one.phase else one.state.value


def drafter(one: DeploymentView) -> str:
    """Who drafts, by the name it is registered as where it has one."""
    return _named(one.speculator, speculators.list_speculators()) if one.speculator else "n-gram"


def verifier(one: DeploymentView) -> str:
    """Who answers, by the name it is registered as where it has one."""
    return _named(one.verifier, verifiers.list_verifiers())


def _named(reference: str, known: Sequence[SpeculatorView | VerifierView]) -> str:
    made_by = reference.removeprefix("run:")
    names = (row.name for row in known if made_by in (row.run_id, row.path))
    return next(names, reference.rstrip("/").rsplit("/", 1)[-1])
