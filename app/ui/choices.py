"""What the lab has registered, as choices of a form: most useful first."""

from __future__ import annotations

from app.services import data_sets, speculators, verifiers


def verifier_names() -> list[str]:
    return [one.name for one in verifiers.list_verifiers()]


def speculator_names() -> list[str]:
    """Those that may be deployed."""
    return [one.name for one in speculators.list_speculators(deployable_only=True)]


def all_speculator_names() -> list[str]:
    return [one.name for one in speculators.list_speculators()]


def chats_names() -> list[str]:
    return data_names("chats")


def data_names(*kinds: str) -> list[str]:
    """Names of the data sets of these kinds."""
    return [one.name for one in data_sets.list_data_sets() if one.kind in kinds]
