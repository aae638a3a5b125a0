"""A vLLM server of a training's own, which shows the verifier's hidden states.

Started as a deployment's server is, in a process group of its own that is ended with everything in
it. Whoever runs it for the lab has the group recorded (`on_start`), so that the reaper finds it
when the job dies.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from app.store.models import DeploymentPhase, TraceMode
from speculators_core.data import occupancy
from speculators_core.data.vllm_states import AT_ONCE, Extraction, Extractor, StartVllm
from speculators_core.errors import InputError, Unavailable
from speculators_core.models.verifier_config import VerifierFacts, read_verifier
from speculators_core.progress import Progress
from workers import vllm_server
from workers.launch import HOST, Launch, choose_port, inherited, vllm_cache
from workers.preflight import PROCESS_BYTES, gib, weight_bytes
from workers.server import Server
from workers.vllm_server import Machine

CONNECTOR = "CPUHiddenStatesConnector"
CONNECTOR_MODULE = "speculators_core.vllm_extraction"
STOCK_CONNECTOR = "ExampleHiddenStatesConnector"  # needs a GPU
_BEYOND = 2  # the token that is asked for, and the one that vLLM thinks it drafts
_BATCHED_TOKENS = 2048  # on a CPU; a GPU's is vLLM's own choice
_DRAIN_S = 2.0
_ITEM_BYTES = 4
_MOST_KV_BYTES = 2 * 2**30  # beyond one prompt, on a CPU

OnStart = Callable[[int, float], None]
"""Hears the process group and its start time before the server answers."""


class _Running:
    """An `Extractor`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def url(self) -> str:
        return self._server.launch.endpoint

    @property
    def model(self) -> str:
        return self._server.launch.served_name

    def check(self) -> None:
        if not self._server.running:
            raise self._server.failure()


def starter(output: BinaryIO, on_start: OnStart = lambda pgid, started: None) -> StartVllm:
    """What training needs to start servers; what they say goes to `output`."""

    @contextmanager
    def start(asked: Extraction, progress: Progress) -> Iterator[Extractor]:
        launch = plan(asked)
        for note in launch.notes:
            progress.note(note)
        with occupancy.occupy(vllm_cache(), {}):  # a training outside the store has no run
            server = Server(launch, output)
            try:
                on_start(server.pgid, server.started)
                server.wait_ready(_tell(progress), progress.stopping, warm_up=False)
                yield _Running(server)
            finally:
                if not server.stop(_DRAIN_S):
                    progress.note(f"something of vLLM's process group {server.pgid} still runs")

    return start


def plan(asked: Extraction) -> Launch:
    """Everything that is decided before a process exists. Raises what stands in the way."""
    facts = read_verifier(asked.verifier)
    if asked.longest + _BEYOND > facts.max_position_embeddings:
        raise InputError(
            f"the longest sample has {asked.longest} tokens; vLLM needs {_BEYOND} positions more, "
            f"the verifier has {facts.max_position_embeddings}",
            where="hidden_states",
            hint="prepare the chats with a smaller seq_length, or set hidden_states to cached",
        )
    machine = vllm_server.machine()
    dtype, notes = vllm_server.choose_dtype(asked.dtype, machine)
    if machine.cpu:
        _check_memory(asked, facts)
    name = f"states-{secrets.token_hex(3)}"
    port = choose_port(None)
    command = arguments(asked, facts, machine, dtype, port, name)
    return Launch(
        engine="vllm",
        command=(sys.executable, "-m", *command),
        environment=inherited() | vllm_server.environment(machine, vllm_cache()),
        port=port,
        served_name=name,
        speculative_tokens=1,
        drafts_always=False,
        trace_mode=TraceMode.OFF,
        notes=(*notes, f"vLLM on {HOST}:{port} computes the hidden states"),
    )


def arguments(
    asked: Extraction,
    facts: VerifierFacts,
    machine: Machine,
    dtype: str,
    port: int,
    served_name: str,
) -> list[str]:
    """Everything after `python -m`. No prefix cache: its rows would be shown to nobody."""
    values: dict[str, Any] = {
        "--model": str(Path(asked.verifier).absolute()),
        "--served-model-name": served_name,
        "--host": HOST,
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": asked.longest + _BEYOND,
        "--max-num-seqs": AT_ONCE,
        "--speculative-config": json.dumps(_speculative(asked)),
        "--kv-transfer-config": json.dumps(_transfer(asked, machine)),
        "--scheduler-cls": vllm_server.SCHEDULER,
        "--shutdown-timeout": 0,
    }
    switches = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if machine.cpu:
        values |= {
            "--kv-cache-memory-bytes": kv_cache_bytes(asked, facts),
            "--distributed-executor-backend": "uni",
            "--max-num-batched-tokens": max(_BATCHED_TOKENS, asked.longest + _BEYOND),
        }
        switches.append("--enforce-eager")
    flat = [str(part) for pair in values.items() for part in pair]
    return [vllm_server.ENTRY_POINT, *flat, *switches]


def kv_cache_bytes(asked: Extraction, facts: VerifierFacts) -> int:
    """Room in float32 for keys, values and shown states of `AT_ONCE` prompts, or of one and 2 GiB;
    twice, as groups of layers share pages of one size, and some of each is wasted."""
    keys = 2 * facts.num_hidden_layers * facts.num_key_value_heads * facts.head_dim
    token = (keys + len(asked.layers) * facts.hidden_size) * _ITEM_BYTES
    prompt = 2 * token * (asked.longest + 256)
    return min(prompt * AT_ONCE, prompt + _MOST_KV_BYTES)


def _speculative(asked: Extraction) -> dict[str, Any]:
    shown = {"eagle_aux_hidden_state_layer_ids": list(asked.layers)}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": shown},
    }


def _transfer(asked: Extraction, machine: Machine) -> dict[str, Any]:
    ours = {"kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE}
    return {
        **(ours if machine.cpu else {"kv_connector": STOCK_CONNECTOR}),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(asked.staging)},
    }


def _check_memory(asked: Extraction, facts: VerifierFacts) -> None:
    weights = weight_bytes(Path(asked.verifier), "verifier")
    needed = weights + kv_cache_bytes(asked, facts) + PROCESS_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise Unavailable(
            f"vLLM needs about {gib(needed)} GiB of memory beside the training, "
            f"{gib(available)} are free",
            hint="set hidden_states to cached: the verifier then runs in the training itself",
        )


def _tell(progress: Progress) -> Callable[[DeploymentPhase], None]:
    def tell(phase: DeploymentPhase) -> None:
        progress.update(None, f"vLLM for hidden states: {phase.value}")

    return tell
