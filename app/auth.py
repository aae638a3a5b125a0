"""Who may come in: single-user mode on loopback.

`speclab up` prints a link that works once. Opening it sets a signed session cookie, which outlives
restarts of the app because the signing key is a file of SPECLAB_HOME. Scripts send the bearer
token of `SPECLAB_HOME/api-token`. Of a link only a hash is kept; nothing here is ever logged.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.requests import HTTPConnection

from app.settings import Settings
from speculators_core.errors import InputError

LOCAL_USER = "local"
SESSION_SECONDS = 30 * 24 * 3600


def require_loopback(host: str) -> None:
    """Refuse to listen where others could reach a server without accounts."""
    if is_loopback(host):
        return
    raise InputError(
        f"host {host}: Speclab has no accounts yet, so it listens on this machine only",
        where="SPECLAB_HOST / --host",
        hint="use 127.0.0.1 and reach it through an SSH tunnel: "
        "ssh -L 7860:127.0.0.1:7860 THIS-MACHINE",
    )


def is_loopback(host: str) -> bool:
    """Whether the name or address means this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def private_text(path: Path) -> str:
    """The secret kept in a file of mode 0600; made, once, where there is none."""
    try:
        return _read_secret(path)
    except FileNotFoundError:
        pass
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(partial, path)  # fails where another process was first: its secret counts
    except FileExistsError:
        pass
    finally:
        partial.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> str:
    text = path.read_text().strip()
    if not text:
        raise InputError("an empty secret", where=str(path), hint="delete the file and start again")
    return text


@dataclass(frozen=True, slots=True)
class Gate:
    """The secrets of one SPECLAB_HOME, and the questions that are asked of them."""

    home: Path

    @classmethod
    def of(cls, settings: Settings) -> Gate:
        return cls(settings.home)

    @property
    def cookie(self) -> str:
        """Differs between homes: cookies of one address are shared by all its ports."""
        digest = hashlib.sha256(self._secret.encode()).hexdigest()
        return f"speclab_{digest[:8]}"

    @property
    def api_token(self) -> str:
        """What scripts send as `Authorization: Bearer …`."""
        return private_text(self.api_token_file)

    @property
    def api_token_file(self) -> Path:
        return self.home / "api-token"

    def issue_link(self, address: str) -> str:
        """A fresh one-time link; earlier ones that nobody used stop working."""
        directory = self._links
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for earlier in directory.iterdir():
            earlier.unlink(missing_ok=True)
        token = secrets.token_urlsafe(24)
        (directory / _digest(token)).touch(mode=0o600)
        return f"{address}/enter?token={token}"

    def use_link(self, token: str) -> bool:
        """True for one caller only, the first who brings a token that was issued."""
        try:
            (self._links / _digest(token)).unlink()
        except FileNotFoundError:
            return False
        return True

    def open_session(self, user: str = LOCAL_USER) -> str:
        """The value of a session cookie."""
        return self._signer.dumps(user)

    def user_of(self, connection: HTTPConnection) -> str | None:
        """The person behind a request: session cookie first, then bearer token."""
        cookie = connection.cookies.get(self.cookie)
        return (cookie and self._user_of_cookie(cookie)) or self._user_of_bearer(connection)

    def _user_of_cookie(self, cookie: str) -> str | None:
        try:
            user = self._signer.loads(cookie, max_age=SESSION_SECONDS)
        except BadSignature:
            return None
        return user if isinstance(user, str) else None

    def _user_of_bearer(self, connection: HTTPConnection) -> str | None:
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        known = secrets.compare_digest(token.strip().encode(), self.api_token.encode())
        return LOCAL_USER if known else None

    @property
    def _links(self) -> Path:
        return self.home / "links"

    @property
    def _secret(self) -> str:
        return private_text(self.home / "secret")

    @property
    def _signer(self) -> URLSafeTimedSerializer:
        return URLSafeTimedSerializer(self._secret, salt="speclab session")


def current_user(request: Request) -> str | None:
    """The user that the guard in front of every route has let in (`app.guard`)."""
    user: str | None = getattr(request.state, "user", None)
    return user


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
