"""What a server needs to start: one argument list, its environment, and what was decided.

`plan` turns a deployment's parameters, already resolved to paths, into a `Launch`. No shell is
ever involved, and nothing that a person typed becomes a flag of its own.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.settings import settings
from app.store.models import TraceMode
from speculators_core.errors import Unavailable
from speculators_core.params import DeployParams
from speculators_core.trace import SOCKET_VARIABLE
from workers import vllm_server
from workers.preflight import Examined, examine

HOST = "127.0.0.1"
_OURS = "SPECLAB_"  # our settings may hold passwords: a server gets only our home,
_MARK = "SPECLAB_HOME"  # by which its processes are known to be ours
_KEEP_MARK = {"SPT_NOENV": "1"}  # vLLM's processes rename themselves: not over their environment
_UNSAFE = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION")


@dataclass(frozen=True)
class Launch:
    """A server that can be started. `notes` tell a person what was decided and why."""

    engine: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    port: int
    served_name: str
    speculative_tokens: int
    drafts_always: bool
    """The drafter proposes at every step; the n-gram drafter only where it finds a match."""
    trace_mode: TraceMode
    notes: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        """Base URL, without /v1."""
        return f"http://{HOST}:{self.port}"


def plan(params: DeployParams, trace_socket: Path | None = None) -> Launch:
    """Examine the inputs and decide everything. Raises before any process exists.

    `params.verifier` and `params.speculator` are directories. `trace_socket` is where somebody
    listens to the trace, if somebody does.
    """
    examined = examine(params)
    params = _absolute(params)
    port = choose_port(params.port)
    name = f"{Path(params.verifier).name}-{secrets.token_hex(3)}"
    build = _reference if params.engine == "reference" else _vllm
    return build(params, examined, port, name, trace_socket if params.trace else None)


def _absolute(params: DeployParams) -> DeployParams:
    """The server has a working directory of its own."""
    given = {"verifier": params.verifier, "speculator": params.speculator}
    paths = {name: str(Path(path).absolute()) for name, path in given.items() if path}
    return params.model_copy(update=paths)


def choose_port(wanted: int | None) -> int:
    """`wanted` when it is free, or any free port; whoever listens already is left alone."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            raise Unavailable(
                f"port {wanted} can't be used: {error.strerror}",
                where=f"{HOST}:{wanted}",
                hint="choose another port, or leave it empty for a free one",
            ) from error
        return int(probe.getsockname()[1])


def _vllm(
    params: DeployParams, examined: Examined, port: int, name: str, trace_socket: Path | None
) -> Launch:
    machine = vllm_server.machine()
    dtype, notes = vllm_server.choose_dtype(params.dtype, machine)
    command = vllm_server.arguments(params, examined, machine, dtype, port, name, trace_socket)
    environment = inherited() | vllm_server.environment(machine, vllm_cache())
    if trace_socket:
        environment[SOCKET_VARIABLE] = str(trace_socket)
    return Launch(
        engine="vllm",
        command=(sys.executable, "-m", *command),
        environment=environment,
        port=port,
        served_name=name,
        speculative_tokens=examined.speculative_tokens,
        drafts_always=params.speculator is not None,
        trace_mode=TraceMode.IDS if trace_socket else TraceMode.OFF,
        notes=(*examined.notes, *notes),
    )


def _reference(
    params: DeployParams, examined: Examined, port: int, name: str, trace_socket: Path | None
) -> Launch:
    command = [sys.executable, "-m", "workers.reference_server", "--verifier", params.verifier]
    if params.speculator:
        command += ["--speculator", params.speculator]
    command += ["--speculative-tokens", str(examined.speculative_tokens)]
    command += ["--port", str(port), "--served-name", name, "--dtype", params.dtype]
    environment = inherited()
    if trace_socket:
        environment[SOCKET_VARIABLE] = str(trace_socket)
    return Launch(
        engine="reference",
        command=tuple(command),
        environment=environment,
        port=port,
        served_name=name,
        speculative_tokens=examined.speculative_tokens,
        drafts_always=params.speculator is not None,
        trace_mode=TraceMode.IDS if trace_socket else TraceMode.OFF,
        notes=(*examined.notes, "the reference engine is for looking closely, not for speed"),
    )


def vllm_cache() -> Path:
    """What vLLM compiles and learns of models is kept here."""
    return settings().home / "cache" / "vllm"


def inherited() -> dict[str, str]:
    """This process's environment without our other settings and vLLM's unsafe switches."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == _MARK or not (name.startswith(_OURS) or name in _UNSAFE)
    }
    return kept | _KEEP_MARK
