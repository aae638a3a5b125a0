"""Who is let in, by what, and what every answer carries."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from app.auth import Gate, require_loopback
from app.guard import CONTENT_SECURITY_POLICY
from app.main import create_app
from app.settings import settings
from speculators_core.errors import InputError
from tests.app.web import ADDRESS, anonymous, browser, script


def test_a_one_time_link_opens_a_session_once(sqlite_store: str) -> None:
    link = Gate.of(settings()).issue_link(ADDRESS)
    first, second = anonymous(), anonymous()

    entered = first.get(link)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    assert first.get("/api/runs").status_code == 200

    refused = second.get(link)
    assert refused.status_code == 403
    assert "speclab status --link" in refused.text
    assert second.get("/api/runs").status_code == 401


def test_whoever_has_a_session_may_open_a_used_link_again(sqlite_store: str) -> None:
    link = Gate.of(settings()).issue_link(ADDRESS)
    client = anonymous()
    client.get(link)
    assert client.get(link).headers["location"] == "/"


def test_a_new_link_ends_the_earlier_one(sqlite_store: str) -> None:
    gate = Gate.of(settings())
    earlier, later = gate.issue_link(ADDRESS), gate.issue_link(ADDRESS)
    assert anonymous().get(earlier).status_code == 403
    assert anonymous().get(later).status_code == 303


@pytest.mark.parametrize("token", ["", "guess", "../secret", "x" * 5000])
def test_a_guessed_link_opens_nothing(sqlite_store: str, token: str) -> None:
    Gate.of(settings()).issue_link(ADDRESS)
    assert anonymous().get("/enter", params={"token": token}).status_code == 403


def test_the_link_is_kept_as_a_hash_only(home: Path) -> None:
    token = Gate.of(settings()).issue_link(ADDRESS).partition("token=")[2]
    kept = [p for p in home.rglob("*") if p.is_file()]
    assert kept
    assert not any(token in p.name or token in p.read_text() for p in kept)


def test_a_session_survives_a_restart_of_the_app(sqlite_store: str) -> None:
    before = browser()
    after = anonymous()
    after.cookies = before.cookies
    assert after.get("/api/runs").status_code == 200


def test_a_forged_or_foreign_cookie_is_nobody(sqlite_store: str, tmp_path: Path) -> None:
    gate = Gate.of(settings())
    foreign = Gate(tmp_path / "other").open_session()
    for value in ("local", foreign, gate.open_session()[:-2] + "zz"):
        client = anonymous()
        client.cookies.set(gate.cookie, value)
        assert client.get("/api/runs").status_code == 401


def test_scripts_come_in_with_the_api_token(sqlite_store: str) -> None:
    assert script().get("/api/runs").status_code == 200
    wrong = anonymous().get("/api/runs", headers={"authorization": "Bearer wrong"})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["hint"]


def test_secrets_are_files_that_only_their_owner_reads(home: Path) -> None:
    gate = Gate.of(settings())
    assert gate.api_token == gate.api_token
    gate.open_session()
    for name in ("api-token", "secret"):
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600


def test_a_page_without_a_session_says_how_to_get_in(sqlite_store: str) -> None:
    answer = anonymous().get("/runs", headers={"accept": "text/html"})
    assert answer.status_code == 401
    assert "speclab status --link" in answer.text


@pytest.mark.parametrize(
    "path", ["/api/runs", "/gradio_api/startup-events", "/deployments/x/v1/models", "/anything"]
)
def test_programs_without_a_session_get_json(sqlite_store: str, path: str) -> None:
    answer = anonymous().get(path)
    assert answer.status_code == 401
    assert answer.json()["error"]["kind"] == "unauthenticated"


def test_health_is_open_and_says_nothing_private(sqlite_store: str) -> None:
    answer = anonymous().get("/healthz")
    assert answer.json() == {"ok": False}  # no broker runs here
    assert answer.status_code == 503


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:7860", True),
        ("localhost:9000", True),
        ("[::1]:7860", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_only_names_of_this_machine_are_answered(
    sqlite_store: str, host: str, allowed: bool
) -> None:
    answer = script().get("/api/runs", headers={"host": host})
    assert answer.status_code == (200 if allowed else 403)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": ADDRESS}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "http://127.0.0.1:3000"}, False),
        ({"origin": "null"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site", "origin": ADDRESS}, False),
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_unsafe_requests_must_come_from_our_own_pages(
    sqlite_store: str, headers: dict[str, str], allowed: bool
) -> None:
    answer = browser().post("/api/runs/absent/cancel", headers=headers)
    assert answer.status_code == (404 if allowed else 403)


def test_a_token_without_a_cookie_needs_no_origin(sqlite_store: str) -> None:
    headers = {"origin": "http://evil.example"}
    assert script().post("/api/runs/absent/cancel", headers=headers).status_code == 404


def test_no_foreign_page_may_read_answers(sqlite_store: str) -> None:
    answer = script().get("/api/runs", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/healthz", "/api/runs", "/enter?token=x", "/absent"])
def test_every_answer_carries_the_security_headers(sqlite_store: str, path: str) -> None:
    headers = script().get(path).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "lab.example"])
def test_listening_for_others_is_refused(
    home: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no accounts yet"):
        require_loopback(host)
    monkeypatch.setenv("SPECLAB_HOST", host)
    settings.cache_clear()
    with pytest.raises(InputError):
        create_app(pages=False)
