"""What the services hand out: frozen copies of rows, safe to keep, show and send.

A view never touches the store again. Times are aware UTC datetimes, durations seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from app.store.models import DeploymentPhase, RunState, SlotKind, TraceMode, now
from speculators_core.params import JobKind

Item = TypeVar("Item")


class View(BaseModel):
    """Frozen; made from a row by attribute names."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class Page(View, Generic[Item]):
    """Some rows of a list, and how many there are in all."""

    items: tuple[Item, ...]
    total: int
    limit: int
    offset: int


class RunView(View):
    """One run. `needs`: ids of the runs that must succeed before it starts."""

    id: str
    kind: JobKind
    name: str
    state: RunState
    params: dict[str, Any]
    fingerprint: str
    owner: str
    priority: int
    replaces_id: str | None
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    updated_at: datetime
    heartbeat_at: datetime | None
    woken_at: datetime | None
    host: str | None
    job_pgid: int | None
    job_started: float | None
    progress: float | None
    progress_text: str
    eta_s: float | None
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    needs: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state.ended

    @property
    def seconds(self) -> float | None:
        """How long it has run, or ran; None before it starts."""
        if self.started_at is None:
            return None
        return ((self.finished_at or now()) - self.started_at).total_seconds()

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last sign of life."""
        return (now() - self.heartbeat_at).total_seconds() if self.heartbeat_at else None


class MetricView(View):
    """One logged step. A number that was not finite is None."""

    id: int
    step: int
    at: datetime
    values: dict[str, float | None]


class LogChunk(View):
    """Bytes `start` to `end` of a log of `size` bytes, as text."""

    text: str
    start: int
    end: int
    size: int


class SlotView(View):
    """A GPU or CPU slot of a host, and the run that holds it."""

    id: str
    host: str
    kind: SlotKind
    device: int
    run_id: str | None
    taken_at: datetime | None
    heartbeat_at: datetime | None
    host_seen_at: datetime


class DeploymentView(View):
    """A deployment and its run in one. `id` is the run's id."""

    id: str
    name: str
    owner: str
    state: RunState
    phase: DeploymentPhase | None
    engine: str
    verifier: str
    speculator: str | None
    speculative_tokens: int
    served_name: str
    endpoint: str | None
    command: list[str] | None
    trace_mode: TraceMode
    server_pgid: int | None
    server_started: float | None
    notes: list[str]
    dropped_records: int
    host: str | None
    created_at: datetime
    started_at: datetime | None
    ready_at: datetime | None
    finished_at: datetime | None
    progress_text: str
    error: dict[str, Any] | None
    params: dict[str, Any]

    @property
    def active(self) -> bool:
        return not self.state.ended

    @property
    def ready(self) -> bool:
        """It answers requests."""
        return (
            self.state is RunState.RUNNING
            and self.phase is DeploymentPhase.READY
            and self.endpoint is not None
        )


class AcceptanceView(View):
    """What a deployment's traffic accepted, summed over requests."""

    requests: int
    steps: int
    drafted: int
    accepted: int
    tokens: int
    per_position: tuple[float, ...]
    """Joint: share of drafting steps that accepted position k and all before it."""

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted a drafting step."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


def _is_of_layers(doubt: Any) -> bool:
    if not isinstance(doubt, dict):
        return False
    choices = doubt.get("choices") or ()
    params = [choice.get("params") for choice in choices if isinstance(choice, dict)]
    return any("aux_layers" in chosen for chosen in params if isinstance(chosen, dict))


class VerifierView(View):
    id: str
    name: str
    path: str
    source: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_fingerprint: str
    run_id: str | None
    created_at: datetime


class Verdict(View):
    """What a conversion found about serving its result."""

    algorithm: str
    deployable: bool
    doubts: list[Any]
    failed: list[str]

    @property
    def open_doubts(self) -> list[Any]:
        """Those that neither a rule nor a person has settled."""
        return [d for d in self.doubts if not isinstance(d, dict) or d.get("chosen") is None]

    @property
    def obstacles(self) -> list[str]:
        """What its conversion left standing in the way of a deployment, in words."""
        about = [d.get("about", d) if isinstance(d, dict) else d for d in self.open_doubts]
        found = [f"{what} must be settled first" for what in about] + self.failed
        return [] if self.deployable else found or [self.needed or "its conversion did not say why"]

    @property
    def needed(self) -> str | None:
        """What has to be done before anything could serve it; None where a decision is enough."""
        if self.algorithm == "mtp":
            return "an MTP head is served inside its verifier: put it back there"
        if any(_is_of_layers(doubt) for doubt in self.open_doubts):
            return "convert it again with a choice of verifier states: nothing can serve it without"
        return None


class SpeculatorView(Verdict):
    """`deployable` is what its conversion found; `allowed_by`, `_at` and `_despite` are a person's
    decision to deploy it all the same."""

    id: str
    name: str
    path: str
    verifier: str
    draft_vocab_size: int
    speculative_tokens: int
    allowed_by: str | None
    allowed_at: datetime | None
    allowed_despite: list[str] | None
    run_id: str | None
    created_at: datetime

    @property
    def servable(self) -> bool:
        """Whether it may be deployed."""
        return self.deployable or self.allowed_by is not None


class DataSetView(View):
    """`kind`: chats, prompts or prepared."""

    id: str
    name: str
    kind: str
    path: str
    digest: str
    samples: int
    facts: dict[str, Any]
    run_id: str | None
    created_at: datetime


class EvaluationView(View):
    id: str
    run_id: str | None
    speculator: str
    verifier: str
    data: str
    engine: str
    speculative_tokens: int
    temperature: float
    acceptance_length: float
    acceptance_rate: float
    tokens_per_second: float
    tokens_per_second_plain: float | None
    report: dict[str, Any]
    created_at: datetime


class GenerationView(View):
    id: str
    user: str
    deployment_id: str | None
    created_at: datetime
    messages: list[dict[str, Any]]
    sampling: dict[str, Any]
    plain: bool
    text: str
    steps: list[Any]
    numbers: dict[str, Any]


class DemoStage(View):
    """One stage of the demo; `run_id` and `state` are None before it was submitted."""

    key: str
    title: str
    purpose: str
    run_id: str | None = None
    state: RunState | None = None
    phase: DeploymentPhase | None = None
    progress: float | None = None
    text: str = ""
    eta_s: float | None = None
    error: dict[str, Any] | None = None


class DemoView(View):
    """The demo as a whole. `state`: absent, running, done or failed."""

    state: str
    stages: tuple[DemoStage, ...]
    domain: str
    limits: str
    """What a general speculator would need beyond this."""
    acceptance_length: float | None
    headline: str | None
    deployment_id: str | None
    """The deployment to chat with now: the trained one when it is ready, else the n-gram one."""

    def stage(self, key: str) -> DemoStage:
        return next(stage for stage in self.stages if stage.key == key)
