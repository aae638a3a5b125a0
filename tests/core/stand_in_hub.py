"""A stand-in for the Hugging Face hub: a small HTTP server on 127.0.0.1 that says it is one.

It answers what `huggingface_hub` asks in these tests (model info, tree, resolve with ranges and
etags, create, preupload, LFS batch and commit), from directories in memory. It is not the hub: it
knows one token, one branch, and no Xet storage.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_standInTokenForTests0123456789"
_LARGE = (".safetensors", ".bin", ".parquet")
_PIECE = 1 << 14


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    @property
    def commit(self) -> str:
        parts = [f"{n}:{hashlib.sha1(c).hexdigest()}" for n, c in sorted(self.files.items())]
        return hashlib.sha1("\n".join(parts).encode()).hexdigest()


@dataclass
class StandInHub:
    """The server's state. `cut_after`: bytes of a large file after which a connection breaks, once
    each time it is set. `slowly`: seconds a piece of a large file takes.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    authorizations: set[str] = field(default_factory=set)
    sent: int = 0
    cut_after: int | None = None
    slowly: float = 0.0
    ignore_ranges: bool = False
    stored: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, files: dict[str, bytes], **how: bool) -> Repository:
        self.repositories[name] = Repository(files, **how)
        return self.repositories[name]

    def asked_for(self, part: str) -> list[tuple[str, str, str]]:
        return [request for request in self.requests if part in request[1]]


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    hub = StandInHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"
    server_version = "speclab-stand-in-hub"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self._chunked() if self.headers.get("Transfer-Encoding") else b""
        self.body = self.body or self.rfile.read(length)
        self.hub.requests.append((self.command, path, self.headers.get("Range") or ""))
        if authorization := self.headers.get("Authorization"):
            self.hub.authorizations.add(authorization)
            if authorization != f"Bearer {TOKEN}":
                self._say(
                    401, {"error": "no"}, message="Invalid credentials in Authorization header"
                )
                return
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, path):
                getattr(self, method)(**match.groupdict())
                return
        self._say(404, {"error": "the stand-in hub does not know this"})

    def _chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, repo: str, *, content: bool = False) -> Repository | None:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self.known):
            self._say(401 if not self.known else 404, {"error": "no"}, code="RepoNotFound")
            return None
        if content and found.gated:
            self._say(403 if self.known else 401, {"error": "no"}, code="GatedRepo")
            return None
        return found

    def _at(self, repo: str, revision: str, **how: bool) -> Repository | None:
        found = self._repository(repo, **how)
        if found and revision not in ("main", found.commit):
            self._say(404, {"error": "no"}, code="RevisionNotFound")
            return None
        return found

    def info(self, repo: str, revision: str = "main") -> None:
        if found := self._at(repo, revision):
            siblings = [_described(name, content) for name, content in found.files.items()]
            about = {"id": repo, "modelId": repo, "sha": found.commit, "siblings": siblings}
            gated = "manual" if found.gated else False
            self._say(200, {**about, "private": found.private, "gated": gated, "tags": []})

    def tree(self, repo: str, revision: str) -> None:
        if found := self._at(repo, revision):
            self._say(200, [_entry(name, content) for name, content in found.files.items()])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._at(repo, revision, content=True)
        if found is None:
            return
        if name not in found.files:
            self._say(404, {"error": "no"}, code="EntryNotFound")
            return
        content = found.files[name]
        digest = _sha256(content) if name.endswith(_LARGE) else _git(content)
        headers = {"X-Repo-Commit": found.commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status = 200
        if wanted and not self.hub.ignore_ranges:
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self._send(status, content, headers, large=name.endswith(_LARGE))

    def create(self) -> None:
        if not self.known:
            self._say(401, {"error": "no"})
            return
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        there = repo in self.hub.repositories
        if not there:
            self.hub.add(repo, {}, private=asked.get("visibility") == "private")
        self._say(409 if there else 200, {"url": f"{self.hub.url}/{repo}", "error": "it is there"})

    def validate(self) -> None:
        self._say(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        asked = json.loads(self.body)["files"]
        modes = [("lfs" if f["path"].endswith(_LARGE) else "regular", f["path"]) for f in asked]
        self._say(
            200,
            {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for m, p in modes]},
        )

    def batch(self, repo: str) -> None:
        asked = json.loads(self.body)["objects"]
        action = {"upload": {"href": f"{self.hub.url}/lfs/", "header": {}}}
        for one in asked:
            href = f"{self.hub.url}/lfs/{one['oid']}"
            one["actions"] = {"upload": {**action["upload"], "href": href}}
        self._say(200, {"transfer": "basic", "objects": asked})

    def store(self, digest: str) -> None:
        assert _sha256(self.body) == digest
        self.hub.stored[digest] = self.body
        self._say(200, {})

    def commit(self, repo: str, revision: str) -> None:
        found = self.hub.repositories[repo]
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                found.files[value["path"]] = self.hub.stored[value["oid"]]
        url = f"{self.hub.url}/{repo}/commit/{found.commit}"
        self._say(200, {"success": True, "commitOid": found.commit, "commitUrl": url})

    def _say(self, status: int, value: Any, code: str = "", message: str = "") -> None:
        headers = {"Content-Type": "application/json"}
        headers |= {"X-Error-Code": code} if code else {}
        headers |= {"X-Error-Message": message} if message else {}
        self._send(status, json.dumps(value).encode(), headers)

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], *, large: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(content), _PIECE):
            if large and self.hub.cut_after is not None and start >= self.hub.cut_after:
                self.hub.cut_after = None
                self.close_connection = True
                return
            try:
                self.wfile.write(content[start : start + _PIECE])
            except OSError:  # the client has heard enough
                self.close_connection = True
                return
            self.hub.sent += len(content[start : start + _PIECE])
            if large and self.hub.slowly:
                threading.Event().wait(self.hub.slowly)


_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_REVISION = r"(?P<revision>[\w.-]+)"
_ROUTES = [
    (r"/api/repos/create", "create"),
    (r"/api/validate-yaml", "validate"),
    (rf"/api/(?:models|datasets)/{_REPO}", "info"),
    (rf"/api/(?:models|datasets)/{_REPO}/revision/{_REVISION}", "info"),
    (rf"/api/(?:models|datasets)/{_REPO}/tree/{_REVISION}", "tree"),
    (rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    (rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    (rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    (r"/lfs/(?P<digest>[0-9a-f]{64})", "store"),
    (rf"(?:/datasets)?/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", "resolve"),
]


def _described(name: str, content: bytes) -> dict[str, Any]:
    entry = _entry(name, content)
    entry["rfilename"], entry["blobId"] = entry.pop("path"), entry.pop("oid")
    return entry


def _entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
    entry["oid"] = _git(content)
    if name.endswith(_LARGE):
        sha = _sha256(content)
        entry["lfs"] = {"oid": sha, "sha256": sha, "size": len(content), "pointerSize": 134}
    return entry


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
