"""The lab's queue: `submit`, `runs`, `logs`, `cancel`, `resume`; and `allow`, a decision for all.

Over REST where SPECLAB_URL is set, else on the local store as its single user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from app.commands.flags import Config, parse, read_config, with_flags
from app.commands.output import Json, emit, say, table
from app.settings import settings
from speculators_core.errors import NotFound
from speculators_core.params import PARAMS_OF, JobKind, parse_params

if TYPE_CHECKING:
    from app.services.views import LogChunk, Page, RunView, SpeculatorView

_FOLLOW_S = 1.0
_PATHS = ("verifier", "speculator", "data", "checkpoint", "source")


class Lab(Protocol):
    """What both ways to the queue can do (`app.client.Client` is one)."""

    def submit(
        self,
        kind: str,
        params: Mapping[str, Any],
        *,
        name: str | None = None,
        needs: Sequence[str] = (),
        priority: int = 0,
        idempotency_key: str | None = None,
    ) -> RunView: ...
    def runs(
        self, *, kind: str | None = None, state: str | None = None, limit: int = 50
    ) -> Page[RunView]: ...
    def run(self, run_id: str) -> RunView: ...
    def log(self, run_id: str, offset: int | None = None) -> LogChunk: ...
    def cancel(self, run_id: str) -> RunView: ...
    def resume(self, run_id: str) -> RunView: ...
    def allow(self, speculator: str) -> SpeculatorView: ...


class LocalLab:
    """The services of this machine. Raises `NotFound` where it has no store yet."""

    def __init__(self) -> None:
        from app.auth import LOCAL_USER
        from app.services import references, resuming, runs, speculators

        if not settings().has_store:
            raise NotFound(
                "there is no lab here yet",
                where=str(settings().home),
                hint="start one: speclab up; or name another: SPECLAB_URL or SPECLAB_HOME",
            )
        self._runs, self._resuming, self._speculators = runs, resuming, speculators
        self._references = references
        self._user = LOCAL_USER

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
        known = self._runs.kind_of(kind)
        given = parse_params(known, _absolute(params)).model_dump(mode="json")
        if not needs:
            self._references.check_names(known, given)
        return self._runs.submit(
            known,
            given,
            owner=self._user,
            name=name,
            needs=needs,
            priority=priority,
            idempotency_key=idempotency_key,
        )

    def runs(
        self, *, kind: str | None = None, state: str | None = None, limit: int = 50
    ) -> Page[RunView]:
        return self._runs.list_runs(kind=kind, state=state, limit=limit)

    def run(self, run_id: str) -> RunView:
        return self._runs.get(run_id)

    def log(self, run_id: str, offset: int | None = None) -> LogChunk:
        self._runs.get(run_id)
        return self._runs.log(run_id, offset=offset)

    def cancel(self, run_id: str) -> RunView:
        return self._runs.cancel(run_id, self._user)

    def resume(self, run_id: str) -> RunView:
        return self._resuming.resume(run_id, self._user)

    def allow(self, speculator: str) -> SpeculatorView:
        if "/" in speculator:  # no name has one
            speculator = self._speculators.adopt(speculator).name
        return self._speculators.allow(speculator, self._user)


@contextmanager
def lab() -> Iterator[Lab]:
    """The lab that the settings name."""
    url = settings().url
    if url is None:
        yield LocalLab()
        return
    from app.client import Client

    with Client(url, settings().token) as client:
        yield client


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    submit = typer.Typer(no_args_is_help=True, help="Queue a run of a kind.")
    for kind, model in PARAMS_OF.items():
        name = kind.value.replace("_", "-")
        submit.command(name, help=model.__doc__)(with_flags(_submitter(kind), model))
    app.add_typer(submit, name="submit")
    app.command("runs")(_list)
    app.command("logs")(_logs)
    app.command("cancel")(_cancel)
    app.command("resume")(_resume)
    app.command("allow")(_allow)


def _submitter(kind: JobKind) -> Callable[..., None]:
    def submit(
        flags: dict[str, Any],
        run_name: Annotated[
            str | None, typer.Option(metavar="NAME", help="Shown on the Runs page.")
        ] = None,
        needs: Annotated[
            list[str] | None,
            typer.Option(metavar="RUN", help="Id of a run that must succeed first."),
        ] = None,
        priority: Annotated[
            int, typer.Option(metavar="INTEGER", help="Higher starts earlier.")
        ] = 0,
        idempotency_key: Annotated[
            str | None, typer.Option(metavar="TEXT", help="The same key again gives the same run.")
        ] = None,
        config: Config = None,
        as_json: Json = False,
    ) -> None:
        given = {**read_config(config, PARAMS_OF[kind]), **flags}
        values = parse(PARAMS_OF[kind], given).model_dump(mode="json")
        with lab() as queue:
            run = queue.submit(
                kind.value,
                values,
                name=run_name,
                needs=needs or (),
                priority=priority,
                idempotency_key=idempotency_key,
            )
        emit(run.model_dump(mode="json"), as_json, [f"{run.id}  {run.state.value}  {run.name}"])

    return submit


def _known_kind(value: str | None) -> str | None:
    return _known(value and value.replace("-", "_"), [kind.value for kind in JobKind])


def _known_state(value: str | None) -> str | None:
    from app.store.models import RunState

    return _known(value, [state.value for state in RunState])


def _known(value: str | None, words: Sequence[str]) -> str | None:
    if value is not None and value not in words:
        raise typer.BadParameter(f"found {value!r}, expected one of {', '.join(words)}")
    return value


def _list(
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", callback=_known_kind, help="Only this kind.")
    ] = None,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", callback=_known_state, help="Only in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most so many.")] = 50,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    with lab() as queue:
        page = queue.runs(kind=kind, state=state, limit=limit)
    rows = [
        (
            run.id,
            run.kind.value,
            run.state.value,
            "" if run.progress is None else f"{run.progress:.0%}",
            run.owner,
            f"{run.created_at:%Y-%m-%d %H:%M}",
            run.name,
        )
        for run in page.items
    ]
    titles = ("id", "kind", "state", "done", "owner", "created (UTC)", "name")
    lines = table(titles, rows) if rows else ["no runs yet: `speclab submit --help`"]
    emit(page.model_dump(mode="json"), as_json, lines)


def _logs(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Show the end of a run's log; with -f, go on as it grows."""
    with lab() as queue:
        chunk = queue.log(run)
        if as_json:
            emit(chunk.model_dump(mode="json"), True)
            return
        typer.echo(chunk.text, nl=False)
        while follow:
            ended = queue.run(run).ended  # asked before the log, so that nothing is missed
            chunk = queue.log(run, chunk.end)
            typer.echo(chunk.text, nl=False)
            if ended and chunk.end == chunk.size:
                say(f"run {run}: {queue.run(run).state.value}")
                return
            if not chunk.text:
                time.sleep(_FOLLOW_S)


def _cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run.")],
    as_json: Json = False,
) -> None:
    """Cancel a queued run, or ask a running one to stop."""
    with lab() as queue:
        seen = queue.cancel(run)
    emit(seen.model_dump(mode="json"), as_json, [f"{seen.id}  {seen.state.value}"])


def _resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run that ended early.")],
    as_json: Json = False,
) -> None:
    """Queue a training or a regeneration again that ended early: it goes on from what it left."""
    with lab() as queue:
        seen = queue.resume(run)
    emit(seen.model_dump(mode="json"), as_json, [f"{seen.id}  {seen.state.value}"])


def _allow(
    speculator: Annotated[
        str, typer.Argument(metavar="SPECULATOR", help="Registered name, or a directory's path.")
    ],
    as_json: Json = False,
) -> None:
    """Decide that a speculator may be deployed in spite of open doubts or failed checks."""
    with lab() as queue:
        seen = queue.allow(speculator)
    despite = "; ".join(seen.allowed_despite or ()) or "nothing: it was deployable"
    emit(seen.model_dump(mode="json"), as_json, [f"{seen.name} may be deployed, despite {despite}"])


def _absolute(params: Mapping[str, Any]) -> dict[str, Any]:
    """A worker has another working directory: paths that exist here become absolute."""
    return {n: _whole(v) if n in _PATHS else v for n, v in params.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, str) and Path(value).expanduser().exists():
        return str(Path(value).expanduser().absolute())
    return value
