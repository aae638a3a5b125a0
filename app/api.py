"""REST under `/api`, the same use cases as the pages and the CLI. OpenAPI at `/api/docs`.

Routes only translate: services do the work, `app.main` turns errors into JSON, and `app.guard`
has let the caller in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import FileResponse

from app.auth import current_user
from app.services import (
    artifacts,
    conversions,
    data_sets,
    demo,
    deployments,
    evaluations,
    health,
    playground,
    references,
    resuming,
    runs,
    speculators,
    verifiers,
)
from app.services.views import (
    DataSetView,
    DemoView,
    DeploymentView,
    EvaluationView,
    GenerationView,
    LogChunk,
    MetricView,
    Page,
    RunView,
    SpeculatorView,
    VerifierView,
)
from app.store.models import RunState
from speculators_core.errors import Forbidden
from speculators_core.params import PARAMS_OF, JobKind, parse_params


class ErrorBody(BaseModel):
    """What is wrong, in which file or field, and what to do."""

    kind: str
    message: str
    where: str | None
    hint: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 400 and above."""

    error: ErrorBody


class RunRequest(BaseModel):
    """A run to submit. `params` are those of its kind: see `GET /api/kinds`."""

    model_config = ConfigDict(extra="forbid")

    kind: JobKind
    params: dict[str, Any]
    name: str | None = None
    needs: tuple[str, ...] = Field((), description="ids of runs that must succeed first")
    priority: int = Field(0, ge=-100, le=100, description="higher starts earlier")


class InspectRequest(BaseModel):
    """A checkpoint to look at without converting it."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: str = Field(min_length=1, description="path or hub id")
    verifier: str | None = Field(None, description="path, hub id or registered name")
    params: dict[str, Any] = Field(
        {}, description="further parameters of its conversion: the plan as they settle it"
    )


def signed_in(request: Request) -> str:
    """The caller's name."""
    user = current_user(request)
    if user is None:
        raise Forbidden("nobody is signed in")
    return user


User = Annotated[str, Depends(signed_in)]
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (401, 403, 404, 409, 422, 503)
}

router = APIRouter(prefix="/api", responses=_ERRORS)


@router.get("/health", tags=["lab"])
def get_health() -> health.Health:
    """Store, broker, workers and the queue."""
    return health.check()


@router.get("/kinds", tags=["runs"])
def list_kinds() -> dict[JobKind, dict[str, Any]]:
    """JSON schema of the parameters of each kind of run."""
    return {kind: model.model_json_schema() for kind, model in PARAMS_OF.items()}


@router.post("/runs", status_code=201, tags=["runs"])
def submit_run(
    body: RunRequest,
    user: User,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> RunView:
    """Queue a run. The same `Idempotency-Key` again gives the run that is there."""
    params = parse_params(body.kind, body.params).model_dump(mode="json")
    references.check_paths(params)
    if not body.needs:
        references.check_names(body.kind, params)
    return runs.submit(
        body.kind,
        params,
        owner=user,
        name=body.name,
        needs=body.needs,
        priority=body.priority,
        idempotency_key=idempotency_key,
    )


@router.get("/runs", tags=["runs"])
def list_runs(
    kind: JobKind | None = None,
    state: RunState | None = None,
    owner: str | None = None,
    search: str | None = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> Page[RunView]:
    """Newest first."""
    return runs.list_runs(
        kind=kind, state=state, owner=owner, search=search, limit=limit, offset=offset
    )


@router.get("/runs/{run_id}", tags=["runs"])
def get_run(run_id: str) -> RunView:
    return runs.get(run_id)


@router.get("/runs/{run_id}/metrics", tags=["runs"])
def get_metrics(run_id: str, after: Annotated[int, Query(ge=0)] = 0) -> list[MetricView]:
    """Logged steps with an id greater than `after`; a repeated step replaces the earlier one."""
    return runs.metrics(run_id, after=after)


@router.get("/runs/{run_id}/log", tags=["runs"])
def get_log(
    run_id: str,
    offset: Annotated[int | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=16, le=1 << 20)] = 65_536,
) -> LogChunk:
    """Part of the log from a byte offset on; without one, its end."""
    runs.get(run_id)
    return runs.log(run_id, offset=offset, limit=limit)


@router.post("/runs/{run_id}/cancel", tags=["runs"])
def cancel_run(run_id: str, user: User) -> RunView:
    """A queued run ends at once; a running one is asked to stop."""
    return runs.cancel(run_id, user)


@router.post("/runs/{run_id}/retry", status_code=201, tags=["runs"])
def retry_run(run_id: str, user: User) -> RunView:
    """A new run with the same parameters."""
    return runs.retry(run_id, user)


@router.post("/runs/{run_id}/resume", tags=["runs"])
def resume_run(run_id: str, user: User) -> RunView:
    """The same run once more: a training or a regeneration goes on from what it left."""
    return resuming.resume(run_id, user)


@router.get("/runs/{run_id}/artifacts", tags=["runs"])
def list_artifacts(run_id: str) -> list[artifacts.Artifact]:
    """The files that a run left."""
    return artifacts.list_files(run_id)


@router.get("/runs/{run_id}/artifacts/{path:path}", tags=["runs"], response_class=FileResponse)
def get_artifact(run_id: str, path: str) -> FileResponse:
    """One file of a run, never one outside it."""
    file = artifacts.file_of(run_id, path)
    return FileResponse(file, filename=file.name, content_disposition_type="attachment")


@router.get("/verifiers", tags=["models"])
def list_verifiers() -> list[VerifierView]:
    return verifiers.list_verifiers()


@router.get("/speculators", tags=["models"])
def list_speculators() -> list[SpeculatorView]:
    return speculators.list_speculators()


@router.post("/speculators/{name}/allow", tags=["models"])
def allow_speculator(name: str, user: User) -> SpeculatorView:
    """Decide that it may be deployed in spite of open doubts or failed checks; it is recorded."""
    return speculators.allow(name, user)


@router.get("/speculators/{name}/report", tags=["models"], response_class=FileResponse)
def get_conversion_report(name: str) -> FileResponse:
    """What each tensor and field became, the doubts, and what was measured (JSON)."""
    return _download(conversions.report_path(name), "application/json", f"{name}.report.json")


@router.get("/speculators/{name}/card", tags=["models"], response_class=FileResponse)
def get_card(name: str) -> FileResponse:
    """The model card (Markdown)."""
    return _download(conversions.card_path(name), "text/markdown; charset=utf-8", f"{name}.md")


@router.post("/inspect", tags=["models"])
def inspect_checkpoint(body: InspectRequest) -> dict[str, Any]:
    """Layout of a checkpoint, what every tensor would become, and what is doubtful."""
    asked = {"checkpoint": body.checkpoint, "verifier": body.verifier}
    references.check_params(JobKind.CONVERT, asked)
    return references.inspect_checkpoint(body.checkpoint, body.verifier, body.params)


@router.get("/data-sets", tags=["data"])
def list_data_sets() -> list[DataSetView]:
    return data_sets.list_data_sets()


@router.get("/evaluations", tags=["models"])
def list_evaluations() -> list[EvaluationView]:
    return evaluations.list_evaluations()


@router.get("/deployments", tags=["deployments"])
def list_deployments(active_only: bool = False) -> list[DeploymentView]:
    """Newest first. People reach one at `/deployments/{id}/v1`."""
    return deployments.list_deployments(active_only=active_only)


@router.get("/deployments/{deployment_id}", tags=["deployments"])
def get_deployment(deployment_id: str) -> DeploymentView:
    return deployments.get(deployment_id)


@router.get("/generations", tags=["playground"])
def list_generations(
    user: User, limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> list[GenerationView]:
    """The caller's own answers with their decoding steps, newest first."""
    return playground.list_generations(user, limit=limit)


@router.get("/generations/{generation_id}", tags=["playground"])
def get_generation(generation_id: str, user: User) -> GenerationView:
    return playground.generation(generation_id, user)


@router.get("/demo", tags=["demo"])
def get_demo() -> DemoView:
    return demo.status()


@router.post("/demo", status_code=201, tags=["demo"])
def start_demo(user: User) -> DemoView:
    """Start the demo, or find the one that runs; finished stages are reused."""
    return demo.start(user)


def _download(file: Path, media_type: str, name: str) -> FileResponse:
    """As a file to keep, so that no browser takes what it holds for a page."""
    return FileResponse(
        file, media_type=media_type, filename=name, content_disposition_type="attachment"
    )
