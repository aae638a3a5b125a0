"""The application as it is mounted: pages behind the guard, its own temporary directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.auth import Gate
from app.main import create_app
from app.settings import settings
from app.store import engine
from tests.app.web import ADDRESS


@pytest.fixture(scope="module")
def home(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One home for the module: mounting the pages takes seconds."""
    place = tmp_path_factory.mktemp("home")
    shutil.copy(sqlite_template, place / "speclab.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLAB_HOME", str(place))
        settings.cache_clear()
        yield place
        engine.dispose()
    settings.cache_clear()


@pytest.fixture(scope="module")
def whole(home: Path) -> FastAPI:
    return create_app()


@pytest.fixture
def inside(whole: FastAPI) -> TestClient:
    client = TestClient(whole, base_url=ADDRESS)
    assert client.get(Gate.of(settings()).issue_link(ADDRESS)).status_code == 200
    return client


def test_gradio_is_reached_with_a_session_only(whole: FastAPI, inside: TestClient) -> None:
    outside = TestClient(whole, base_url=ADDRESS)
    for path in ("/config", "/gradio_api/info", "/gradio_api/startup-events", "/theme.css"):
        assert outside.get(path).status_code == 401, path
    assert inside.get("/config").json()["analytics_enabled"] is False
    assert (
        "access-control-allow-origin"
        not in inside.get("/config", headers={"origin": "http://evil.example"}).headers
    )


def test_what_lies_in_the_home_is_not_served_as_a_file(inside: TestClient, home: Path) -> None:
    Gate.of(settings()).open_session()
    for path in (home / "secret", home / "speclab.db", Path("/etc/hostname")):
        assert inside.get(f"/gradio_api/file={path}").status_code in (403, 404), path


def test_the_api_stands_before_the_pages(inside: TestClient) -> None:
    assert inside.get("/api/runs").json()["total"] == 0
    assert inside.get("/api/absent").status_code == 404
