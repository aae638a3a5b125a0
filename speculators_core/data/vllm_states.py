"""States from a vLLM server: its hidden-state extraction writes a file a prompt, we take it away.

The core knows how to ask such a server, not how to start one: whoever trains hands in `StartVllm`.
The server is started when the first document is missing from the cache, and ends with the
producer. It writes into a staging directory of ours; what lies there and what is on its way never
exceeds a quota: a request waits until there is room.

Each answer is checked before it counts: tokens, one row a token, the number of layers, no row that
was never written (a prefix cache would leave such), and once a run that the last state leads to the
token which the server itself says next.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from speculators_core.data.states import States, Tokens, first_choices
from speculators_core.errors import DataError, InputError, PairingError, Stopped, Unavailable
from speculators_core.models.verifier import Verifier
from speculators_core.progress import Progress

STAGING_BYTES = 1 << 30
AT_ONCE = 16  # requests; the server batches them
_ANSWER_S = 600.0
_FILE_S = 120.0  # between an answer and its file
_POLL_S = 0.005
_LIKELY = 5  # the server's next token is among so many of ours: near-ties may turn in bfloat16


@dataclass(frozen=True)
class Extraction:
    """What a server is started for. `layers` are all that it shows, ascending; the last is n."""

    verifier: str
    layers: tuple[int, ...]
    dtype: str
    longest: int
    """Tokens of the longest prompt."""
    staging: Path


class Extractor(Protocol):
    """A server that is ready for requests."""

    @property
    def url(self) -> str:
        """Without /v1."""

    @property
    def model(self) -> str: ...

    def check(self) -> None:
        """Raise why it ended, if it did."""


StartVllm = Callable[[Extraction, Progress], AbstractContextManager[Extractor]]


class Quota:
    """Bytes that may lie in the staging directory; who finds no room waits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, size: int, given_up: Callable[[], bool]) -> Iterator[None]:
        """Hold `size` bytes, once they are free; more than the whole quota is let in alone."""
        with self._changed:
            while self._taken and self._taken + size > self._size:
                if given_up():
                    raise Stopped("stopped while hidden states waited for room")
                self._changed.wait(0.2)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


class VllmStates:
    """A `StateProducer`. Use it as a context manager: leaving it ends the server."""

    made_by = "vllm"

    def __init__(
        self,
        verifier: Verifier,
        layers: Sequence[int],
        longest: int,
        beside: Path,
        start: StartVllm,
        progress: Progress,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """`verifier`: its ends are enough. The staging directory is made beside `beside`."""
        self.verifier = verifier
        self.layers = sorted(layers)
        self._longest = longest
        self._beside = beside
        self._start = start
        self._progress = progress
        self._quota = Quota(staging_bytes)
        self._stack = ExitStack()
        self._server: Extractor | None = None
        self._staging = Path()
        self._proved = False
        self._given_up = threading.Event()

    def __enter__(self) -> VllmStates:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()

    def states(
        self, documents: Sequence[Tokens], stopping: Callable[[], bool] = lambda: False
    ) -> list[States]:
        """Raises `Unavailable` where the server fails, `DataError` where an answer is not whole,
        `PairingError` where its states are not those of this verifier."""
        server = self._server or self._started()
        self._given_up.clear()
        with (
            httpx.Client(base_url=server.url, timeout=_ANSWER_S, trust_env=False) as client,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            waiting = [pool.submit(self._one, client, server, d, stopping) for d in documents]
            try:
                found = [one.result() for one in waiting]
            except BaseException:
                self._given_up.set()
                pool.shutdown(cancel_futures=True)
                if stopping():
                    raise Stopped("stopped while vLLM computed hidden states") from None
                raise
        if not self._proved:
            self._prove(*found[0][1:])
            self._proved = True
        return [states for states, _, _ in found]

    def _started(self) -> Extractor:
        made = tempfile.mkdtemp(
            prefix=f".{self._beside.name}.", suffix=".partial", dir=self._beside.parent
        )
        self._staging = Path(made).resolve()
        self._stack.callback(shutil.rmtree, self._staging, ignore_errors=True)
        asked = Extraction(
            verifier=self.verifier.facts.path,
            layers=tuple(self._all_layers),
            dtype=str(self.verifier.model.dtype).removeprefix("torch."),
            longest=self._longest,
            staging=self._staging,
        )
        self._server = self._stack.enter_context(self._start(asked, self._progress))
        return self._server

    @property
    def _all_layers(self) -> list[int]:
        """With the last, which gives the final state; once, where it is an aux layer too."""
        return sorted({*self.layers, self.verifier.facts.num_hidden_layers})

    def _one(
        self,
        client: httpx.Client,
        server: Extractor,
        document: Tokens,
        stopping: Callable[[], bool],
    ) -> tuple[States, Tensor, int]:
        """States of one document, the last one again, and the token that the server says next."""

        def given_up() -> bool:
            return self._given_up.is_set() or stopping()

        ids, mask = document
        facts = self.verifier.facts
        size = len(ids) * len(self._all_layers) * facts.hidden_size
        with self._quota.room(size * self.verifier.model.dtype.itemsize, given_up):
            if given_up():
                raise Stopped("stopped while vLLM computed hidden states")
            reply = _asked(client, server, ids)
            with _taken(self._within(reply), server, given_up) as tensors:
                rows = self._checked(tensors, ids)
        columns = {k: rows[:, i] for i, k in enumerate(self._all_layers)}
        final = columns[facts.num_hidden_layers].contiguous()
        aux = torch.cat([columns[k] for k in self.layers], dim=-1)
        final = final.to(self.verifier.device)
        states = States(aux, final, first_choices(self.verifier, final, mask))
        return states, final[-1], int(reply["choices"][0]["token_ids"][0])

    def _within(self, reply: dict[str, Any]) -> Path:
        """The file that an answer names. It will be deleted: it must be in our directory."""
        named = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        path = Path(str(named))
        if not named or path.resolve().parent != self._staging:
            raise InputError(
                f"vLLM says that its hidden states are at {named!r}",
                where=str(self._staging),
                hint="was it started with the connector that extracts them?",
            )
        return path

    def _checked(self, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
        """[S, layers, H], whole and of these tokens."""
        facts = self.verifier.facts
        rows, tokens = tensors.get("hidden_states"), tensors.get("token_ids")
        if rows is None or tokens is None:
            raise DataError(f"vLLM's file of hidden states holds {', '.join(tensors)}")
        if not torch.equal(tokens.long(), ids.long()):
            raise DataError("vLLM gave hidden states of other tokens than it was asked for")
        expected = (len(ids), len(self._all_layers), facts.hidden_size)
        if rows.shape != expected:
            raise DataError(
                f"vLLM gave states of shape {list(rows.shape)}, expected {list(expected)} "
                "(tokens, layers, width)",
                hint="its prefix cache must be off, or it shows new tokens only",
            )
        if unwritten := int((rows == 0).all(-1).sum()):
            raise DataError(
                f"{unwritten} of the states that vLLM gave were never written",
                hint="its prefix cache must be off, or it shows new tokens only",
            )
        return rows

    def _prove(self, last: Tensor, said: int) -> None:
        likely = self.verifier.logits(last[None])[0].topk(_LIKELY).indices.tolist()
        if said not in likely:
            raise PairingError(
                f"vLLM says token {said} next, its last state leads to {likely}",
                where=self.verifier.facts.path,
                hint="it does not show the state after the last layer, before the final norm",
            )


def _asked(client: httpx.Client, server: Extractor, ids: Tensor) -> dict[str, Any]:
    body = {
        "model": server.model,
        "prompt": ids.tolist(),
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    try:
        reply = client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        server.check()
        raise Unavailable(
            f"vLLM does not answer: {type(error).__name__} {error}", where=server.url
        ) from error
    if reply.status_code != 200:
        server.check()
        raise Unavailable(
            f"vLLM refused {len(ids)} tokens: {reply.status_code} {reply.text[:300]}",
            where=server.url,
        )
    found: dict[str, Any] = reply.json()
    return found


@contextmanager
def _taken(
    path: Path, server: Extractor, given_up: Callable[[], bool]
) -> Iterator[dict[str, Tensor]]:
    """What the server writes at `path`, once it is whole; the file is gone afterwards."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        _await_writer(lock, server, given_up)
        yield load_file(path)
    except (OSError, SafetensorError) as error:
        server.check()
        raise DataError(
            f"vLLM's file of hidden states can't be read: {error}", where=str(path)
        ) from error
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)


def _await_writer(lock: Path, server: Extractor, given_up: Callable[[], bool]) -> None:
    """The server holds the lock from before its answer until the file is written."""
    until = time.monotonic() + _FILE_S
    with lock.open("rb") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                server.check()
            if given_up():
                raise Stopped("stopped while vLLM wrote hidden states")
            if time.monotonic() > until:
                raise Unavailable(
                    f"vLLM did not write its hidden states within {_FILE_S:.0f} s", where=str(lock)
                )
            time.sleep(_POLL_S)
