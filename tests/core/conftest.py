"""Tiny models that the core's tests share, built once a session. Read-only: copy to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="session")
def tied_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_verifier(tmp_path_factory.mktemp("tiny") / "tied-verifier", tied=True)


@pytest.fixture(scope="session")
def tiny_speculator(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return tiny.build_speculator(tmp_path_factory.mktemp("tiny") / "speculator", tiny_verifier)


@pytest.fixture(scope="session")
def tiny_research(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    return tiny.build_research(tmp_path_factory.mktemp("tiny") / "research", tiny_verifier)
