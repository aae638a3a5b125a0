"""Deployments: runs that last, and what is known of their servers."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TypedDict, Unpack

from sqlalchemy import select
from sqlalchemy import update as change
from sqlalchemy.orm import Session

from app.services import runs
from app.services.views import DeploymentView, RunView
from app.store.engine import reading, writing
from app.store.models import Deployment, DeploymentPhase, Run, RunState, TraceMode, now
from app.store.transitions import ACTIVE
from speculators_core.errors import NotFound

logger = logging.getLogger(__name__)


class Changes(TypedDict, total=False):
    """What a deployment's job may tell of its server."""

    phase: DeploymentPhase
    verifier: str
    speculator: str | None
    speculative_tokens: int
    served_name: str
    endpoint: str | None
    command: list[str]
    trace_mode: TraceMode
    server_pgid: int | None
    server_started: float | None
    notes: list[str]
    dropped_records: int
    ready_at: datetime


def list_deployments(active_only: bool = False, limit: int = 200) -> list[DeploymentView]:
    """Newest first."""
    query = select(Deployment, Run).join(Run, Run.id == Deployment.run_id)
    if active_only:
        query = query.where(Run.state.in_((RunState.QUEUED, *ACTIVE)))
    with reading() as session:
        rows = session.execute(query.order_by(Run.created_at.desc()).limit(limit))
        return [_view(deployment, run) for deployment, run in rows]


def get(deployment_id: str) -> DeploymentView:
    """Raises `NotFound`."""
    with reading() as session:
        return _get(session, deployment_id)


def update(deployment_id: str, **changes: Unpack[Changes]) -> bool:
    """Record facts of a running deployment's server; reaching `ready` stamps the time.

    False (and logged) when its run is not running any more. Raises `TypeError` for other fields.
    """
    unknown = set(changes) - set(Changes.__annotations__)
    if unknown:
        raise TypeError(f"a deployment has no field {', '.join(sorted(unknown))}")
    if changes.get("phase") is DeploymentPhase.READY:
        changes.setdefault("ready_at", now())
    living = select(Run.id).where(Run.id == deployment_id, Run.state.in_(ACTIVE))
    with writing() as session:
        changed = session.execute(
            change(Deployment)
            .where(Deployment.run_id == deployment_id, Deployment.run_id.in_(living))
            .values(**changes)
        )
    if changed.rowcount != 1:  # type: ignore[attr-defined]
        logger.warning("late report refused: deployment %s is not running", deployment_id)
        return False
    return True


def stop(deployment_id: str, who: str) -> RunView:
    """Ask a deployment to stop, server and all (`runs.cancel`)."""
    get(deployment_id)
    return runs.cancel(deployment_id, who)


def _get(session: Session, deployment_id: str) -> DeploymentView:
    query = select(Deployment, Run).join(Run, Run.id == Deployment.run_id)
    row = session.execute(query.where(Run.id == deployment_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no deployment {deployment_id!r}", hint="see the Deploy page")
    return _view(*row)


def _view(deployment: Deployment, run: Run) -> DeploymentView:
    fields = {
        name: getattr(deployment if hasattr(deployment, name) else run, name)
        for name in DeploymentView.model_fields
        if name != "id"
    }
    return DeploymentView(id=run.id, **fields)
