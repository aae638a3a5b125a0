"""What the lab has registered, as choices of a form: most useful first."""

from __future__ import annotations

from app.services import data_sets, speculators, verifiers


def verifier_names() -> list[str]:
    return [one.name for one in verifiers.list_verifiers()]


def speculator_names() -> list[str]:
    return [one.name for one in speculators.list_speculators(deployable_only=True)]


def data_names(*kinds: str) -> list[str]:
    """Names of the data sets of these kinds."""
    return [one.name for one in data_sets.list_data_sets() if one.kind in kinds]
