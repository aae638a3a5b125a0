"""A typed client of Speclab's REST interface.

    with Client("http://127.0.0.1:7860", token) as lab:
        run = lab.submit("train", {"data": "maths", "verifier": "smollm2-135m-instruct"})

Answers are the services' views; errors are raised as the classes of `speculators_core.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from app.services.views import (
    DataSetView,
    DemoView,
    DeploymentView,
    EvaluationView,
    LogChunk,
    MetricView,
    Page,
    RunView,
    SpeculatorView,
    VerifierView,
)
from speculators_core.errors import Forbidden, SpeclabError, Unavailable, revive


class Client:
    """One lab. `token`: what `Authorization: Bearer` carries."""

    def __init__(self, url: str, token: str | None, *, timeout_s: float = 60.0) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def submit(
        self,
        kind: str,
        params: Mapping[str, Any],
        *,
        name: str | None = None,
        needs: Sequence[str] = (),
        priority: int = 0,
        idempotency_key: str | None = None,
    ) -> RunView:
        """Queue a run."""
        body = {
            "kind": kind,
            "params": dict(params),
            "name": name,
            "needs": list(needs),
            "priority": priority,
        }
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        return RunView.model_validate(self._ask("POST", "/api/runs", json=body, headers=headers))

    def runs(
        self,
        *,
        kind: str | None = None,
        state: str | None = None,
        owner: str | None = None,
        search: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> Page[RunView]:
        """Newest first."""
        wanted = {
            "kind": kind,
            "state": state,
            "owner": owner,
            "search": search,
            "limit": limit,
            "offset": offset,
        }
        query = {name: value for name, value in wanted.items() if value is not None}
        return Page[RunView].model_validate(self._ask("GET", "/api/runs", params=query))

    def run(self, run_id: str) -> RunView:
        return RunView.model_validate(self._ask("GET", f"/api/runs/{run_id}"))

    def metrics(self, run_id: str, after: int = 0) -> list[MetricView]:
        """Logged steps with an id greater than `after`."""
        rows = self._ask("GET", f"/api/runs/{run_id}/metrics", params={"after": after})
        return [MetricView.model_validate(row) for row in rows]

    def log(self, run_id: str, offset: int | None = None) -> LogChunk:
        """Part of the log from a byte offset on; without one, its end."""
        query = {} if offset is None else {"offset": offset}
        return LogChunk.model_validate(self._ask("GET", f"/api/runs/{run_id}/log", params=query))

    def cancel(self, run_id: str) -> RunView:
        return RunView.model_validate(self._ask("POST", f"/api/runs/{run_id}/cancel"))

    def retry(self, run_id: str) -> RunView:
        return RunView.model_validate(self._ask("POST", f"/api/runs/{run_id}/retry"))

    def resume(self, run_id: str) -> RunView:
        """The same run once more: a training or a regeneration goes on from what it left."""
        return RunView.model_validate(self._ask("POST", f"/api/runs/{run_id}/resume"))

    def verifiers(self) -> list[VerifierView]:
        return [VerifierView.model_validate(row) for row in self._ask("GET", "/api/verifiers")]

    def speculators(self) -> list[SpeculatorView]:
        return [SpeculatorView.model_validate(row) for row in self._ask("GET", "/api/speculators")]

    def allow(self, speculator: str) -> SpeculatorView:
        """Decide that it may be deployed in spite of what its conversion left open."""
        path = f"/api/speculators/{quote(speculator, safe='')}/allow"
        return SpeculatorView.model_validate(self._ask("POST", path))

    def data_sets(self) -> list[DataSetView]:
        return [DataSetView.model_validate(row) for row in self._ask("GET", "/api/data-sets")]

    def evaluations(self) -> list[EvaluationView]:
        return [EvaluationView.model_validate(row) for row in self._ask("GET", "/api/evaluations")]

    def deployments(self, *, active_only: bool = False) -> list[DeploymentView]:
        rows = self._ask("GET", "/api/deployments", params={"active_only": active_only})
        return [DeploymentView.model_validate(row) for row in rows]

    def demo(self) -> DemoView:
        return DemoView.model_validate(self._ask("GET", "/api/demo"))

    def start_demo(self) -> DemoView:
        return DemoView.model_validate(self._ask("POST", "/api/demo"))

    def inspect(
        self, checkpoint: str, verifier: str | None = None, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """`params` are further ones of its conversion: the plan as they settle it."""
        body = {"checkpoint": checkpoint, "verifier": verifier, "params": dict(params or {})}
        return dict(self._ask("POST", "/api/inspect", json=body))

    def health(self) -> dict[str, Any]:
        return dict(self._ask("GET", "/api/health"))

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the lab does not answer: {error}",
                where=str(self._http.base_url),
                hint="is SPECLAB_URL right, and `speclab up` running there?",
            ) from error
        if answer.is_success:
            return answer.json()
        raise _error(answer)


def _error(answer: httpx.Response) -> SpeclabError:
    where = str(answer.request.url)
    if answer.status_code == 401:
        return Forbidden(
            "the lab does not know this token",
            where=where,
            hint="set SPECLAB_TOKEN to the content of SPECLAB_HOME/api-token there",
        )
    try:
        return revive(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(
            f"answered {answer.status_code}: {answer.text[:200]}",
            where=where,
            hint="is SPECLAB_URL the address of a Speclab?",
        )
