"""Chromium for the whole session; a page that must stay free of errors and of foreign code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.e2e.browser import CHROMIUM, FLAGS, Stage

PATIENCE_MS = 60_000  # a busy machine draws slowly; a quiet one takes a second
expect.set_options(timeout=PATIENCE_MS)
EXPECTED = ("status of 422",)  # how Gradio answers a form that its validator refused


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        reason = f"no {CHROMIUM}: apt-get install -y chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """The real application over a seeded store (`tests.e2e.stage`)."""
    with tempfile.TemporaryDirectory(prefix="speclab-", dir="/tmp") as home, Stage(home) as staged:
        yield staged


@pytest.fixture(scope="module")
def signed_in(chromium: Browser, stage: Stage) -> Iterator[dict]:
    """The state of a browser that has used the one-time link."""
    context = chromium.new_context(base_url=stage.address)
    context.new_page().goto(stage.link)
    yield context.storage_state()
    context.close()


@pytest.fixture
def page(chromium: Browser, stage: Stage, signed_in: dict) -> Iterator[Page]:
    """A fresh browser's page. Afterwards: no error in its console, no foreign code has run."""
    context = chromium.new_context(
        base_url=stage.address,
        storage_state=signed_in,
        viewport={"width": 1280, "height": 900},
        accept_downloads=True,
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.extend(_errors(message)))
    yield page
    assert page.evaluate("typeof window.__xss") == "undefined"
    assert found == []
    context.close()


def _errors(message: ConsoleMessage) -> list[str]:
    harmless = message.type != "error" or any(text in message.text for text in EXPECTED)
    return [] if harmless else [message.text]
