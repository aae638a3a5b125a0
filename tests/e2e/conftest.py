"""Chromium, and a page in it that must stay free of errors and of foreign code."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)

from tests.e2e.browser import CHROMIUM, FLAGS, Stage

PATIENCE_MS = 60_000  # a busy machine draws slowly; a quiet one takes a second
expect.set_options(timeout=PATIENCE_MS)
# How Gradio answers a form that its validator refused, and how it ends requests on a reload.
EXPECTED = ("status of 422", "AbortError", "errored out")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Gone with its module: while it lives, no other event loop can run in this thread."""
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
def visitor(chromium: Browser, stage: Stage) -> Iterator[BrowserContext]:
    """A browser that has used the one-time link; its cache serves all tests of a module."""
    context = chromium.new_context(
        base_url=stage.address, viewport={"width": 1280, "height": 900}, accept_downloads=True
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(stage.link)
    page.close()
    yield context
    context.close()


@pytest.fixture
def page(visitor: BrowserContext) -> Iterator[Page]:
    """A fresh page. Afterwards: no error in its console, no foreign code has run."""
    page = visitor.new_page()
    found: list[str] = []
    page.on("pageerror", lambda error: found.extend(_unexpected(str(error))))
    page.on("console", lambda message: found.extend(_errors(message)))
    yield page
    assert page.evaluate("typeof window.__xss") == "undefined"
    assert found == []
    page.close()


def _errors(message: ConsoleMessage) -> list[str]:
    return _unexpected(message.text) if message.type == "error" else []


def _unexpected(text: str) -> list[str]:
    return [] if any(known in text for known in EXPECTED) else [text]
