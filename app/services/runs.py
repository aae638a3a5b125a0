"""Runs: submit, look at, cancel, try again. Claiming and ending them is `services.claims`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import PurePath
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from app.services import run_names, speculators
from app.services.fingerprint import fingerprint, run_references
from app.services.logs import log, log_path
from app.services.machines import require_machine
from app.services.views import MetricView, Page, RunView
from app.services.waking import wake, wake_ready
from app.store.engine import reading, serialise, writing
from app.store.models import Deployment, Run, RunDependency, RunMetric, RunState, now
from app.store.transitions import end, move
from speculators_core.errors import Conflict, InputError, NotFound
from speculators_core.params import DeployParams, JobKind, TrainParams, parse_params

__all__ = [
    "add",
    "cancel",
    "get",
    "kind_of",
    "list_runs",
    "log",
    "log_path",
    "metrics",
    "retry",
    "submit",
    "submit_chain",
    "view",
]

DOUBLE_CLICK = timedelta(seconds=5)
"""Within this time the same work from the same person is one run."""
_UNFINISHED = (RunState.QUEUED, RunState.RUNNING)


def submit(
    kind: JobKind | str,
    params: Mapping[str, Any],
    *,
    owner: str,
    name: str | None = None,
    needs: Sequence[str] = (),
    replaces: str | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
) -> RunView:
    """Write a queued run and ring for a worker; the view of it.

    Runs that the parameters refer to (`run:<id>`) are needed too. The same idempotency key, or
    the same work by the same owner a moment ago, gives the run that is there already.

    Raises `InputError` (a parameter), `NotFound` (a run named), `Conflict` (a run that is needed
    has ended without success; a key used for other work; a speculator that may not be deployed).
    """
    if kind == JobKind.DEPLOY and isinstance(drafter := params.get("speculator"), str):
        speculators.require_servable(drafter)
    with writing() as session:
        run = add(
            session,
            kind,
            params,
            owner=owner,
            name=name,
            needs=needs,
            replaces=replaces,
            priority=priority,
            idempotency_key=idempotency_key,
        )
        seen = view(session, run)
    if seen.state is RunState.QUEUED and seen.woken_at is None:
        wake([seen.id])
    return seen


def submit_chain(
    planned: Sequence[tuple[JobKind, Mapping[str, Any]]],
    following: Callable[[Mapping[str, Any], str], Mapping[str, Any]],
    *,
    owner: str,
) -> list[RunView]:
    """`submit` all of them or, where one is refused, none. `following(params, id)` gives the
    parameters of a run that works on what run `id`, the one before it, makes.
    """
    with writing() as session:
        made: list[Run] = []
        for kind, params in planned:
            values = following(params, made[-1].id) if made else params
            made.append(add(session, kind, values, owner=owner))
        seen = [view(session, run) for run in made]
    if fresh := [one.id for one in seen if one.state is RunState.QUEUED and one.woken_at is None]:
        wake(fresh)
    return seen


def add(
    session: Session,
    kind: JobKind | str,
    params: Mapping[str, Any],
    *,
    owner: str,
    name: str | None = None,
    needs: Sequence[str] = (),
    replaces: str | None = None,
    priority: int = 0,
    idempotency_key: str | None = None,
) -> Run:
    """`submit` within the caller's write transaction, without the ring."""
    kind = kind_of(kind)
    parsed = parse_params(kind, params)
    values = parsed.model_dump(mode="json")
    needed = dict.fromkeys([*needs, *run_references(values)])
    prints = {run_id: _needed(session, run_id).fingerprint for run_id in needed}
    print_ = fingerprint(kind, values, prints.__getitem__)
    key = f"{owner}:{idempotency_key}" if idempotency_key else None
    serialise(session, f"submit {owner}")
    existing = _same_key(session, key, print_) or _double_click(session, owner, print_, replaces)
    if existing:
        return existing
    run = Run(
        kind=kind,
        name=run_names.given(name) if name else run_names.default(kind, values),
        params=values,
        fingerprint=print_,
        idempotency_key=key,
        owner=owner,
        priority=priority,
        replaces_id=_replaced(session, kind, replaces),
    )
    if isinstance(parsed, TrainParams):
        require_machine(session, parsed)
    session.add(run)
    session.flush()
    session.add_all(RunDependency(run_id=run.id, needs_id=needs_id) for needs_id in needed)
    if isinstance(parsed, DeployParams):
        session.add(_deployment(run.id, parsed))
    session.flush()
    return run


def get(run_id: str) -> RunView:
    """Raises `NotFound`."""
    with reading() as session:
        return view(session, _row(session, run_id))


def list_runs(
    *,
    kind: JobKind | str | None = None,
    state: RunState | str | Iterable[RunState | str] | None = None,
    owner: str | None = None,
    search: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> Page[RunView]:
    """Newest first. `search` looks into names, owners and the start of ids."""
    conditions = _conditions(kind, state, owner, search)
    limit, offset = max(1, min(limit, 500)), max(0, offset)
    with reading() as session:
        total = session.scalar(select(func.count()).select_from(Run).where(*conditions)) or 0
        rows = session.scalars(
            select(Run)
            .where(*conditions)
            .order_by(Run.created_at.desc(), Run.id)
            .limit(limit)
            .offset(offset)
        ).all()
        needs = _needs(session, [run.id for run in rows])
        items = tuple(_view(run, needs.get(run.id, ())) for run in rows)
    return Page[RunView](items=items, total=total, limit=limit, offset=offset)


def cancel(run_id: str, who: str) -> RunView:
    """Queued: cancelled at once. Running: asked to stop. Asking again changes nothing.

    Raises `NotFound`, and `Conflict` when the run has ended in another way already.
    """
    with writing() as session:
        run = _row(session, run_id, lock=True)  # or a claim could slip in between
        if run.state is RunState.QUEUED:
            end(session, run_id, RunState.CANCELLED, expected=(RunState.QUEUED,))
        elif run.state is RunState.RUNNING:
            text = f"{who} asked it to stop"
            move(
                session,
                run_id,
                (RunState.RUNNING,),
                RunState.CANCELLING,
                progress_text=run_names.clean(text),
            )
        elif run.state in (RunState.SUCCEEDED, RunState.FAILED, RunState.LOST):
            raise Conflict(f"run {run_id} has ended already: {run.state.value}")
        session.refresh(run)
        seen = view(session, run)
    if seen.state is RunState.CANCELLED:
        wake_ready()  # its dependents have failed, what replaces it may start
    return seen


def retry(run_id: str, who: str) -> RunView:
    """A new run with the same parameters, needs and place in the queue, owned by `who`."""
    with reading() as session:
        old = view(session, _row(session, run_id))
    if not old.ended:
        raise Conflict(
            f"run {run_id} is still {old.state.value}", hint="cancel it first, or wait for its end"
        )
    return submit(
        old.kind,
        old.params,
        owner=who,
        name=old.name,
        needs=old.needs,
        replaces=old.replaces_id,
        priority=old.priority,
    )


def metrics(run_id: str, after: int = 0, limit: int = 10_000) -> list[MetricView]:
    """Logged steps with an id greater than `after`, in the order they were written.

    A resumed run writes the steps that it repeats anew, with new ids: a reader keys them by step.
    """
    with reading() as session:
        _row(session, run_id)
        rows = session.scalars(
            select(RunMetric)
            .where(RunMetric.run_id == run_id, RunMetric.id > after)
            .order_by(RunMetric.id)
            .limit(limit)
        )
        return [MetricView.model_validate(row) for row in rows]


def view(session: Session, run: Run) -> RunView:
    """The view of a row within the caller's transaction."""
    return _view(run, _needs(session, [run.id]).get(run.id, ()))


def _view(run: Run, needs: tuple[str, ...]) -> RunView:
    return RunView.model_validate(run).model_copy(update={"needs": needs})


def _needs(session: Session, run_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    rows = session.execute(
        select(RunDependency.run_id, RunDependency.needs_id)
        .where(RunDependency.run_id.in_(run_ids))
        .order_by(RunDependency.needs_id)
    )
    for run_id, needs_id in rows:
        found[run_id] = (*found.get(run_id, ()), needs_id)
    return found


def _row(session: Session, run_id: str, *, lock: bool = False) -> Run:
    run = session.get(Run, run_id, with_for_update=lock)
    if run is None:
        raise NotFound(f"there is no run {run_id!r}", hint="see `speclab runs`, or the Runs page")
    return run


def _needed(session: Session, run_id: str) -> Run:
    run = _row(session, run_id)
    if run.state.ended and run.state is not RunState.SUCCEEDED:
        raise Conflict(
            f"run {run_id} ({run.name}) ended {run.state.value}: it has no output to use",
            hint="run it again, and name the new run",
        )
    return run


def _replaced(session: Session, kind: JobKind, run_id: str | None) -> str | None:
    if run_id is None:
        return None
    replaced = _row(session, run_id)
    if kind is not JobKind.DEPLOY or replaced.kind is not JobKind.DEPLOY:
        raise InputError("only a deployment can replace a deployment", where=f"replaces {run_id}")
    return run_id


def _same_key(session: Session, key: str | None, print_: str) -> Run | None:
    if key is None:
        return None
    run = session.scalar(select(Run).where(Run.idempotency_key == key))
    if run and run.fingerprint != print_:
        raise Conflict(
            f"this idempotency key belongs to run {run.id}, which does other work",
            hint="send a fresh key with changed parameters",
        )
    return run


def _double_click(session: Session, owner: str, print_: str, replaces: str | None) -> Run | None:
    return session.scalar(
        select(Run)
        .where(
            Run.fingerprint == print_,
            Run.owner == owner,
            Run.replaces_id.is_not_distinct_from(replaces),
            Run.state.in_(_UNFINISHED),
            Run.created_at > now() - DOUBLE_CLICK,
        )
        .order_by(Run.created_at.desc())
        .limit(1)
    )


def _deployment(run_id: str, params: DeployParams) -> Deployment:
    return Deployment(
        run_id=run_id,
        engine=params.engine,
        verifier=params.verifier,
        speculator=params.speculator,
        speculative_tokens=params.speculative_tokens or 0,
        served_name=PurePath(params.verifier).name[: run_names.LONGEST],
        notes=[],
    )


def _conditions(
    kind: JobKind | str | None,
    state: RunState | str | Iterable[RunState | str] | None,
    owner: str | None,
    search: str | None,
) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if kind:
        found.append(Run.kind == kind_of(kind))
    if state:
        states = [state] if isinstance(state, str) else list(state)
        found.append(Run.state.in_([_state(one) for one in states]))
    if owner:
        found.append(Run.owner == owner)
    if search and (words := run_names.clean(search).strip()):
        found.append(
            or_(
                Run.name.icontains(words, autoescape=True),
                Run.owner.icontains(words, autoescape=True),
                Run.id.startswith(words.lower(), autoescape=True),
            )
        )
    return found


def kind_of(kind: JobKind | str) -> JobKind:
    """Raises `InputError` where there is no such kind."""
    try:
        return JobKind(str(kind).replace("-", "_"))
    except ValueError:
        known = ", ".join(JobKind)
        raise InputError(f"there is no kind of run {kind!r}", hint=f"known: {known}") from None


def _state(state: RunState | str) -> RunState:
    try:
        return RunState(state)
    except ValueError:
        known = ", ".join(RunState)
        raise InputError(f"there is no run state {state!r}", hint=f"known: {known}") from None
