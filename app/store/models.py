"""The tables. The store is the truth: every page, route and worker reads and writes these rows.

Times are UTC. Ids are short random strings. JSON columns hold what is displayed or replayed
whole; what is searched, joined or summed has a column.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    DateTime,
    Enum,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from speculators_core.params import JobKind

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u


def new_id() -> str:
    """Ten characters, 50 random bits, readable aloud."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


def now() -> datetime:
    return datetime.now(UTC)


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC datetime on every dialect (SQLite drops the zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class RunState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED, RunState.LOST})


class DeploymentPhase(StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"


class SlotKind(StrEnum):
    GPU = "gpu"
    JOBS = "jobs"
    SERVING = "serving"


class TraceMode(StrEnum):
    IDS = "ids"
    COUNTS = "counts"
    OFF = "off"


def _enum(kind: type[StrEnum], name: str) -> Enum:
    return Enum(
        kind,
        native_enum=False,
        values_callable=lambda values: [v.value for v in values],
        create_constraint=True,
        length=16,
        name=name,
    )


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        datetime: UtcDateTime,
        str: String(255),
    }


class Run(Base):
    """One piece of work, from submission to its end. A deployment is a run that lasts."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    kind: Mapped[JobKind] = mapped_column(_enum(JobKind, "kind"))
    name: Mapped[str]
    state: Mapped[RunState] = mapped_column(_enum(RunState, "state"), default=RunState.QUEUED)
    params: Mapped[dict[str, Any]]
    fingerprint: Mapped[str] = mapped_column(index=True)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    owner: Mapped[str]
    priority: Mapped[int] = mapped_column(default=0)
    replaces_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    attempt: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime] = mapped_column(default=now, index=True)
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    updated_at: Mapped[datetime] = mapped_column(default=now, onupdate=now)
    heartbeat_at: Mapped[datetime | None]
    woken_at: Mapped[datetime | None]
    host: Mapped[str | None]
    job_pgid: Mapped[int | None]
    job_started: Mapped[float | None]
    """Start time of the process group's leader in clock ticks since boot: a reused pid differs."""
    progress: Mapped[float | None]
    progress_text: Mapped[str] = mapped_column(Text, default="")
    eta_s: Mapped[float | None]
    result: Mapped[dict[str, Any] | None]
    error: Mapped[dict[str, Any] | None]

    __table_args__ = (
        Index("ix_runs_state_priority", "state", "priority", "created_at"),
        Index("ix_runs_kind_state_created", "kind", "state", "created_at"),
        Index("ix_runs_kind_created", "kind", "created_at"),
        Index("ix_runs_state_created", "state", "created_at"),
        Index("ix_runs_owner_created", "owner", "created_at"),
    )


class RunDependency(Base):
    """`run_id` starts only after `needs_id` has succeeded."""

    __tablename__ = "run_dependencies"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    needs_id: Mapped[str] = mapped_column(
        ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, index=True
    )


class RunMetric(Base):
    """One logged step of a run; scalars as JSON. A resumed run replaces steps it repeats."""

    __tablename__ = "run_metrics"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    step: Mapped[int]
    at: Mapped[datetime] = mapped_column(default=now)
    values: Mapped[dict[str, Any]]

    # an id is never given twice: readers ask for rows after the last id that they saw
    __table_args__ = (UniqueConstraint("run_id", "step"), {"sqlite_autoincrement": True})


class Slot(Base):
    """A GPU, or a CPU slot, of a host, and the run that holds its lease."""

    __tablename__ = "gpu_leases"

    id: Mapped[str] = mapped_column(primary_key=True)
    """`host/gpu:0`, `host/jobs:0`, `host/serving:0`"""
    host: Mapped[str] = mapped_column(index=True)
    kind: Mapped[SlotKind] = mapped_column(_enum(SlotKind, "kind"))
    device: Mapped[int]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"), index=True)
    taken_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    host_seen_at: Mapped[datetime] = mapped_column(default=now)


class VerifierModel(Base):
    """A model that answers, as a directory on disk or a hub id."""

    __tablename__ = "verifiers"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    path: Mapped[str] = mapped_column(Text)
    source: Mapped[str] = mapped_column(Text)
    architecture: Mapped[str]
    hidden_size: Mapped[int]
    num_layers: Mapped[int]
    vocab_size: Mapped[int]
    tokenizer_fingerprint: Mapped[str]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    created_at: Mapped[datetime] = mapped_column(default=now)


class DataSet(Base):
    """Chats, evaluation prompts, or a prepared (tokenised, masked) data set."""

    __tablename__ = "data_sets"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str] = mapped_column(String(16))
    """`chats`, `prompts` or `prepared`"""
    path: Mapped[str] = mapped_column(Text)
    digest: Mapped[str]
    samples: Mapped[int]
    facts: Mapped[dict[str, Any]]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    created_at: Mapped[datetime] = mapped_column(default=now)


class Speculator(Base):
    """A registered draft in speculators format."""

    __tablename__ = "speculators"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    path: Mapped[str] = mapped_column(Text)
    verifier: Mapped[str] = mapped_column(Text)
    algorithm: Mapped[str] = mapped_column(String(16), default="eagle3")
    draft_vocab_size: Mapped[int]
    speculative_tokens: Mapped[int]
    deployable: Mapped[bool]
    """What the conversion found; a person may allow it all the same."""
    doubts: Mapped[list[Any]]
    failed: Mapped[list[Any]] = mapped_column(default=list, server_default="[]")
    """Checks that failed, in words."""
    allowed_by: Mapped[str | None]
    allowed_at: Mapped[datetime | None]
    allowed_despite: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """What stood in the way when it was allowed, in words."""
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    created_at: Mapped[datetime] = mapped_column(default=now)


class Deployment(Base):
    """What is known of a deployment beside its run."""

    __tablename__ = "deployments"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    phase: Mapped[DeploymentPhase | None] = mapped_column(_enum(DeploymentPhase, "phase"))
    engine: Mapped[str] = mapped_column(String(16))
    verifier: Mapped[str] = mapped_column(Text)
    speculator: Mapped[str | None] = mapped_column(Text)
    """Name or path; null: the n-gram drafter."""
    speculative_tokens: Mapped[int]
    served_name: Mapped[str]
    endpoint: Mapped[str | None]
    """Base URL that the lab reaches, without /v1."""
    command: Mapped[list[Any] | None]
    trace_mode: Mapped[TraceMode] = mapped_column(
        _enum(TraceMode, "trace_mode"), default=TraceMode.OFF
    )
    server_pgid: Mapped[int | None]
    server_started: Mapped[float | None]
    notes: Mapped[list[Any]]
    dropped_records: Mapped[int] = mapped_column(default=0)
    ready_at: Mapped[datetime | None]


class AcceptanceSample(Base):
    """What one request accepted. `accepted_per_step` is one byte a drafting step."""

    __tablename__ = "acceptance_samples"

    id: Mapped[int] = mapped_column(primary_key=True)
    deployment_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    request_id: Mapped[str]
    at: Mapped[datetime] = mapped_column(default=now)
    steps: Mapped[int]
    drafted: Mapped[int]
    accepted: Mapped[int]
    per_position: Mapped[list[Any]]
    accepted_per_step: Mapped[bytes] = mapped_column(LargeBinary)
    context_len: Mapped[int]
    tokens: Mapped[int]

    __table_args__ = (Index("ix_acceptance_samples_deployment_at", "deployment_id", "at"),)


class Generation(Base):
    """A playground answer, kept for its author."""

    __tablename__ = "generations"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    user: Mapped[str] = mapped_column(index=True)
    deployment_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))
    created_at: Mapped[datetime] = mapped_column(default=now)
    messages: Mapped[list[Any]]
    sampling: Mapped[dict[str, Any]]
    plain: Mapped[bool]
    text: Mapped[str] = mapped_column(Text)
    steps: Mapped[list[Any]]
    numbers: Mapped[dict[str, Any]]


class Evaluation(Base):
    """A finished evaluation: headline numbers as columns, the whole report as JSON."""

    __tablename__ = "evaluations"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    speculator: Mapped[str] = mapped_column(Text, index=True)
    verifier: Mapped[str] = mapped_column(Text)
    data: Mapped[str] = mapped_column(Text)
    engine: Mapped[str] = mapped_column(Text)
    speculative_tokens: Mapped[int]
    temperature: Mapped[float]
    acceptance_length: Mapped[float]
    acceptance_rate: Mapped[float]
    tokens_per_second: Mapped[float]
    tokens_per_second_plain: Mapped[float | None]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime] = mapped_column(default=now)
