"""What is kept only to be quick the next time: its size, its last use, who uses it; and its end.

Hidden states of prepared data sets, what vLLM compiled, and what was done of preparations that were
stopped. Everything here can be made again, so it may be removed at any age, but never under a
living run: a run of the store that reads it (on any host), or a process of this machine that holds
it (`speculators_core.data.occupancy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import Field
from sqlalchemy import select

from app.services import references
from app.services.views import View
from app.settings import settings
from app.store.engine import reading
from app.store.models import ENDED, DataSet, Run, now
from speculators_core.data import occupancy
from speculators_core.data.capacity import Speed
from speculators_core.errors import Conflict, InputError, NotFound, SpeclabError
from speculators_core.params import JobKind

_STATES = ".states-"
_PARTS = ".parts"
_STARTS_VLLM = (JobKind.DEPLOY, JobKind.TRAIN)


class CacheView(View):
    """One cache. `users`: ids of the living runs that need it."""

    name: str
    kind: Literal["states", "vllm", "parts"]
    path: str
    size: int = Field(description="bytes")
    used_at: datetime
    about: str
    in_use: bool
    users: tuple[str, ...]


def list_caches(places: Sequence[str | Path] = ()) -> list[CacheView]:
    """The largest first. `places`: further directories whose hidden states are looked for."""
    living = _living()
    found = [
        *(_of_states(directory, living) for directory in _states_directories(places)),
        *(_of_vllm(directory, living) for directory in _vllm_directories()),
        *(_of_parts(directory) for directory in _parts_directories(places)),
    ]
    return sorted(found, key=lambda cache: (-cache.size, cache.name))


def clean(
    older_than_days: float, places: Sequence[str | Path] = (), *, now_: datetime | None = None
) -> list[CacheView]:
    """Remove what was not used for so many days, and is not in use; what was removed."""
    if older_than_days < 0:
        raise InputError(f"an age can't be {older_than_days:g} days", where="older_than")
    before = (now_ or now()) - timedelta(days=older_than_days)
    old = [c for c in list_caches(places) if not c.in_use and c.used_at <= before]
    return [cache for cache in old if _removed(cache)]


def remove(name: str, places: Sequence[str | Path] = ()) -> CacheView:
    """Remove one. Raises `NotFound`, or `Conflict` where it is in use."""
    cache = next((c for c in list_caches(places) if name in (c.name, c.path)), None)
    if cache is None:
        raise NotFound(f"there is no cache {name!r}", hint="see speclab caches")
    if cache.in_use or not _removed(cache):
        who = ", ".join(cache.users) or "a process of this machine, or was removed meanwhile"
        raise Conflict(f"{name} is in use by {who}", where=cache.path, hint="wait until it ends")
    return cache


def states_speed(verifier: str | Path) -> Speed | None:
    """How fast states of this model (a directory) were computed when last they were here."""
    known = (
        (occupancy.last_used(directory), facts["tokens_per_second"])
        for directory in _states_directories(())
        if (facts := occupancy.facts_of(directory)).get("model") == Path(verifier).name
        and "tokens_per_second" in facts
    )
    newest = max(known, default=None)
    if newest is None:
        return None
    return Speed(tokens_per_second=float(newest[1]), source="as measured on this machine before")


def _removed(cache: CacheView) -> bool:
    directory = Path(cache.path)
    if not (directory / occupancy.MARK).exists():  # of an earlier version
        occupancy.occupy(directory, {}).close()
    return occupancy.remove(directory)


def _living() -> list[Run]:
    """Runs that have not ended, queued ones included."""
    if not settings().has_store:
        return []
    query = select(Run).where(Run.state.not_in(ENDED), Run.kind.in_(_STARTS_VLLM))
    with reading() as session:
        return list(session.scalars(query))


def _states_directories(places: Sequence[str | Path]) -> list[Path]:
    named = {found for parent in _parents(places) for found in parent.glob(f"*{_STATES}*")}
    return sorted(found for found in named if _is_ours(found))


def _parts_directories(places: Sequence[str | Path]) -> list[Path]:
    named = {found for parent in _parents(places) for found in parent.glob(f".*{_PARTS}")}
    return sorted(found for found in named if (found / occupancy.MARK).is_file())


def _parents(places: Sequence[str | Path]) -> set[Path]:
    """Where prepared data sets lie that are known, and `places`."""
    parents = {settings().home / "datasets", *(Path(place).absolute() for place in places)}
    return parents | {Path(path).parent for path in _prepared()}


def _is_ours(directory: Path) -> bool:
    """What only has such a name may be anybody's. Earlier versions left no mark."""
    if (directory / occupancy.MARK).is_file():
        return True
    named = re.fullmatch(rf".+{re.escape(_STATES)}[0-9a-f]{{16}}", directory.name)
    return bool(named) and all(f.suffix == ".safetensors" for f in directory.iterdir())


def _prepared() -> Iterable[str]:
    if not settings().has_store:
        return ()
    with reading() as session:
        return list(session.scalars(select(DataSet.path).where(DataSet.kind == "prepared")))


def _vllm_directories() -> Iterator[Path]:
    directory = settings().home / "cache" / "vllm"
    if directory.is_dir():
        yield directory


def _of_states(directory: Path, living: list[Run]) -> CacheView:
    data, _, _ = directory.name.rpartition(_STATES)
    users = [run.id for run in living if _reads(run, directory.with_name(data))]
    facts = occupancy.facts_of(directory)
    known = f"{facts['model']}, after layers {facts['layers']}, {facts['dtype']}; " if facts else ""
    return CacheView(
        name=directory.name,
        kind="states",
        path=str(directory),
        size=_size(directory),
        used_at=datetime.fromtimestamp(occupancy.last_used(directory), UTC),
        about=f"hidden states: {known}of {data}",
        in_use=bool(users) or occupancy.occupied(directory),
        users=tuple(users),
    )


def _of_vllm(directory: Path, living: list[Run]) -> CacheView:
    users = [
        run.id
        for run in living
        if run.kind is JobKind.DEPLOY or run.params.get("hidden_states") == "vllm"
    ]
    return CacheView(
        name="vllm",
        kind="vllm",
        path=str(directory),
        size=_size(directory),
        used_at=datetime.fromtimestamp(_changed(directory), UTC),
        about="what vLLM compiled and learnt of models; the next start takes longer without",
        in_use=bool(users) or occupancy.occupied(directory),
        users=tuple(users),
    )


def _of_parts(directory: Path) -> CacheView:
    output = occupancy.facts_of(directory).get("output", "data")
    return CacheView(
        name=directory.name,
        kind="parts",
        path=str(directory),
        size=_size(directory),
        used_at=datetime.fromtimestamp(occupancy.last_used(directory), UTC),
        about=f"what was done of {output} before its preparation was stopped; it would go on there",
        in_use=occupancy.occupied(directory),
        users=(),
    )


def _reads(run: Run, data: Path) -> bool:
    """Whether a training reads this prepared data; also where it can't be told."""
    if run.kind is not JobKind.TRAIN:
        return False
    try:
        return Path(references.resolve(str(run.params.get("data")), "data")) == data.resolve()
    except SpeclabError:  # of a run that is not done: what it will read may be here already
        return True


def _size(directory: Path) -> int:
    return sum(_stat_size(file) for file in directory.rglob("*"))


def _stat_size(file: Path) -> int:
    try:
        return file.lstat().st_size if not file.is_dir() else 0
    except FileNotFoundError:  # gone meanwhile
        return 0


def _changed(directory: Path) -> float:
    times = [directory.stat().st_mtime]
    for file in directory.rglob("*"):
        try:
            times.append(file.lstat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times)
