"""The application without its pages, as a program on this machine sees it."""

from __future__ import annotations

from fastapi.testclient import TestClient

from app.auth import Gate
from app.main import create_app
from app.settings import settings

ADDRESS = "http://127.0.0.1:7860"


def anonymous() -> TestClient:
    return TestClient(
        create_app(pages=False),
        base_url=ADDRESS,
        follow_redirects=False,
        raise_server_exceptions=False,
    )


def script() -> TestClient:
    """A caller with the API token."""
    client = anonymous()
    client.headers["authorization"] = f"Bearer {Gate.of(settings()).api_token}"
    return client


def browser() -> TestClient:
    """A caller that entered through a one-time link."""
    client = anonymous()
    link = Gate.of(settings()).issue_link(ADDRESS)
    assert client.get(link).status_code == 303
    return client
