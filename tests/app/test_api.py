"""REST: what programs can do, and what they are told when it can't be."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.client import Client
from app.services import claims, deployments
from app.settings import settings
from app.store.models import DeploymentPhase
from speculators_core.errors import Conflict, Forbidden, InputError, NotFound, Unavailable
from tests.app.web import anonymous, script

VERIFIER = {"kind": "verifier", "params": {"name": "tiny"}}


@pytest.fixture
def client(sqlite_store: str) -> TestClient:
    return script()


def test_a_submitted_run_is_a_row_and_rings_once(client: TestClient, rings: list[str]) -> None:
    answer = client.post("/api/runs", json={**VERIFIER, "name": "first", "priority": 3})
    run = answer.json()
    assert answer.status_code == 201
    assert (run["state"], run["name"], run["priority"]) == ("queued", "first", 3)
    assert run["owner"] == "local"
    assert client.get(f"/api/runs/{run['id']}").json()["params"]["name"] == "tiny"
    assert rings == [run["id"]]


def test_the_same_idempotency_key_gives_the_same_run(client: TestClient) -> None:
    headers = {"idempotency-key": "k1"}
    first, second = (client.post("/api/runs", json=VERIFIER, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    other = {"kind": "verifier", "params": {"name": "other"}}
    assert client.post("/api/runs", json=other, headers=headers).status_code == 409


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"kind": "verifier", "params": {"nmae": "x"}}, "nmae"),
        ({"kind": "nothing", "params": {}}, "kind"),
        ({"kind": "verifier", "params": {}, "extra": 1}, "extra"),
        ({"kind": "train", "params": {"data": "d", "verifier": "v", "epochs": 0}}, "epochs"),
        ({"kind": "verifier"}, "params"),
        ({"kind": "prepare", "params": {"data": [5, [None]], "verifier": "v"}}, "data"),
        ([], "body"),
    ],
)
def test_a_malformed_body_names_the_bad_field(client: TestClient, body: Any, named: str) -> None:
    answer = client.post("/api/runs", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 422
    assert set(error) == {"kind", "message", "where", "hint"}
    assert named in f"{error['message']} {error['where']}"
    assert client.get("/api/runs").json()["total"] == 0


def test_a_body_that_is_no_json_is_refused(client: TestClient) -> None:
    answer = client.post("/api/runs", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["error"]["kind"] == "input"


def test_a_path_outside_the_roots_is_refused(client: TestClient) -> None:
    params = {"checkpoint": "../../etc/passwd", "verifier": "/etc"}
    submitted = client.post("/api/runs", json={"kind": "convert", "params": params})
    inspected = client.post("/api/inspect", json=params)
    assert {submitted.status_code, inspected.status_code} <= {403, 404}


def test_runs_are_listed_filtered_and_paged(client: TestClient) -> None:
    for number in range(3):
        body = {"kind": "verifier", "params": {"name": f"v{number}"}}
        client.post("/api/runs", json=body)
    page = client.get("/api/runs", params={"kind": "verifier", "limit": 2, "offset": 2}).json()
    assert (page["total"], len(page["items"])) == (3, 1)
    assert client.get("/api/runs", params={"state": "running"}).json()["total"] == 0
    assert client.get("/api/runs", params={"state": "sleeping"}).status_code == 422


def test_a_queued_run_is_cancelled_and_tried_again(client: TestClient) -> None:
    run_id = client.post("/api/runs", json=VERIFIER).json()["id"]
    assert client.post(f"/api/runs/{run_id}/retry").status_code == 409
    assert client.post(f"/api/runs/{run_id}/cancel").json()["state"] == "cancelled"
    again = client.post(f"/api/runs/{run_id}/retry")
    assert again.status_code == 201
    assert again.json()["id"] != run_id


@pytest.mark.parametrize("part", ["", "/metrics", "/log", "/artifacts", "/artifacts/x"])
def test_an_unknown_run_is_not_found(client: TestClient, part: str) -> None:
    answer = client.get(f"/api/runs/absent{part}")
    assert answer.status_code == 404
    assert answer.json()["error"]["kind"] == "not_found"


def test_a_log_is_read_by_offset(client: TestClient) -> None:
    run_id = client.post("/api/runs", json=VERIFIER).json()["id"]
    assert client.get(f"/api/runs/{run_id}/log").json()["text"] == ""
    _write(run_id, "log.txt", "one\ntwo\n" * 10)
    chunk = client.get(f"/api/runs/{run_id}/log", params={"offset": 76}).json()
    assert (chunk["text"], chunk["start"], chunk["end"], chunk["size"]) == ("two\n", 76, 80, 80)


def test_artifacts_are_served_and_nothing_else(client: TestClient, tmp_path: Path) -> None:
    run_id = client.post("/api/runs", json=VERIFIER).json()["id"]
    _write(run_id, "artifacts/deep/result.json", "{}")
    (settings().run_dir(run_id) / "artifacts" / "way-out").symlink_to("/etc/hostname")
    base = f"/api/runs/{run_id}/artifacts"

    assert {"path": "deep/result.json", "size": 2} in client.get(base).json()
    served = client.get(f"{base}/deep/result.json")
    assert (served.status_code, served.text) == (200, "{}")
    assert served.headers["content-disposition"].startswith("attachment")
    for path in (
        "../log.txt",
        "%2e%2e/log.txt",
        "..%2f..%2f..%2fsecret",
        "way-out",
        "deep",
        "%00",
        300 * "x",
    ):
        assert client.get(f"{base}/{path}").status_code in (404, 403)


@pytest.mark.parametrize(
    "route", ["verifiers", "speculators", "data-sets", "evaluations", "deployments"]
)
def test_registries_start_empty(client: TestClient, route: str) -> None:
    assert client.get(f"/api/{route}").json() == []


def test_the_schema_of_every_kind_is_told(client: TestClient) -> None:
    kinds = client.get("/api/kinds").json()
    assert "epochs" in kinds["train"]["properties"]
    paths = client.get("/api/openapi.json").json()["paths"]
    assert "/api/runs/{run_id}/metrics" in paths


def test_the_demo_is_started_and_looked_at(client: TestClient) -> None:
    assert client.get("/api/demo").json()["state"] == "absent"
    assert client.post("/api/demo").json()["state"] == "running"
    assert client.get("/api/runs").json()["total"] >= 5


def test_health_tells_each_part(client: TestClient) -> None:
    told = client.get("/api/health").json()
    assert told["store"]["ok"] and not told["broker"]["ok"]
    assert told["complaint"].startswith("The broker does not answer")


def test_a_store_that_is_away_is_said_so(home: Path) -> None:
    answer = script().get("/api/runs")
    assert answer.status_code == 503
    assert answer.json()["error"]["hint"] == "run `speclab db upgrade`"


class _Server(BaseHTTPRequestHandler):
    """Says back what it was sent, in two pieces; `/v1/models` fails."""

    def do_GET(self) -> None:
        self.send_response(418)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"no")

    def do_POST(self) -> None:
        size = self.headers["content-length"]
        body = self.rfile.read(int(size)) if size else self._chunks()
        seen = {"path": self.path, "headers": dict(self.headers), "body": body.decode()}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: 1\n\n")
        self.wfile.write(json.dumps(seen).encode())

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def _deployed(client: TestClient, endpoint: str) -> str:
    claims.register_slots("host", (), 1, 1)
    body = {"kind": "deploy", "params": {"verifier": "org/model"}}
    run_id = client.post("/api/runs", json=body).json()["id"]
    assert claims.claim("host")
    assert deployments.update(run_id, endpoint=endpoint, phase=DeploymentPhase.READY)
    return str(run_id)


def test_the_gateway_passes_requests_on_without_our_credentials(
    sqlite_store: str, endpoint: str
) -> None:
    with script() as client:
        run_id = _deployed(client, endpoint)
        url = f"/deployments/{run_id}/v1/chat/completions?x=1%262"
        answer = client.post(url, content=b'{"a": 1}', headers={"x-request-id": "mine"})
        failed = client.get(f"/deployments/{run_id}/v1/models")
    first, _, rest = answer.text.partition("\n\n")
    seen = json.loads(rest)
    headers = {name.lower(): value for name, value in seen["headers"].items()}
    assert (answer.status_code, first) == (200, "data: 1")
    assert seen["path"] == "/v1/chat/completions?x=1%262"
    assert seen["body"] == '{"a": 1}'
    assert headers["x-request-id"] == "mine"
    assert not {"authorization", "cookie"} & set(headers)
    assert (failed.status_code, failed.text) == (418, "no")


def test_the_gateway_says_what_is_missing(sqlite_store: str) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with script() as client:
            run_id = _deployed(client, nobody)
            gone = client.post(f"/deployments/{run_id}/v1/completions", json={})
            absent = client.post("/deployments/absent/v1/completions", json={})
            odd = client.get(f"/deployments/{run_id}/v1/x/%2e%2e/metrics")
    assert gone.status_code == 503
    assert absent.status_code == 404
    assert odd.status_code in (404, 422)


@pytest.fixture
def lab(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Client:
    lab = Client(str(client.base_url), token=None)
    monkeypatch.setattr(lab, "_http", client)
    return lab


def test_the_client_speaks_in_views_and_errors(lab: Client) -> None:
    run = lab.submit("verifier", {"name": "tiny"}, name="mine", idempotency_key="k")
    assert (lab.run(run.id).id, lab.run(run.id).name) == (run.id, "mine")
    assert [r.id for r in lab.runs(kind="verifier").items] == [run.id]
    assert lab.metrics(run.id) == []
    assert lab.log(run.id).text == ""
    assert lab.cancel(run.id).state.ended
    assert lab.retry(run.id).id != run.id
    assert lab.verifiers() == lab.speculators() == lab.data_sets() == lab.evaluations() == []
    assert lab.deployments(active_only=True) == []
    assert lab.demo().state == "absent"
    assert lab.health()["store"]["ok"]
    with pytest.raises(NotFound):
        lab.run("absent")
    with pytest.raises(InputError, match="epochs"):
        lab.submit("train", {"data": "d", "verifier": "v", "epochs": 0})
    with pytest.raises(Conflict):
        lab.submit("verifier", {"name": "other"}, idempotency_key="k")


def test_the_client_says_when_it_is_not_let_in(
    sqlite_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Client("http://127.0.0.1:1", token=None)
    with pytest.raises(Unavailable, match="does not answer"):
        lab.runs()
    monkeypatch.setattr(lab, "_http", anonymous())
    with pytest.raises(Forbidden, match="token"):
        lab.runs()


def _write(run_id: str, name: str, text: str) -> None:
    file = settings().run_dir(run_id) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_name_may_be_one_that_a_needed_run_will_make(client: TestClient) -> None:
    prepare = {"kind": "prepare", "params": {"data": ["org/chats"], "verifier": "later"}}
    refused = client.post("/api/runs", json=prepare)
    assert (refused.status_code, refused.json()["error"]["where"]) == (404, "verifier")
    bring = {"kind": "verifier", "params": {"name": "later"}}
    first = client.post("/api/runs", json=bring).json()["id"]
    waiting = client.post("/api/runs", json={**prepare, "needs": [first]})
    assert (waiting.status_code, waiting.json()["name"]) == (201, "prepare chats")
