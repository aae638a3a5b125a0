"""How vLLM is called: its command line and environment, fit for the machine (PLATFORM facts).

The module entry point is used, not the `vllm` command: the CPU build's command looks for a
distribution of another name and fails. The speculative method is always passed explicitly,
because vLLM would otherwise guess it from the path.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from speculators_core.errors import Unavailable
from speculators_core.launch import speculative_config
from speculators_core.params import DeployParams
from workers import vllm_cpu_repair
from workers.preflight import Examined

ENTRY_POINT = "vllm.entrypoints.openai.api_server"
SCHEDULER = "speculators_core.vllm_trace.make_scheduler"
DRAIN_S = 5  # vLLM's own wait for open answers when it is asked to stop
_FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Machine:
    """What vLLM finds here. Its build decides the device, so no driver has to be asked."""

    cpu: bool
    cores: int
    fast_bfloat16: bool
    openmp: Path | None
    """Intel's OpenMP, 15 to 25 % faster than the one that torch brings (measured)."""


def machine() -> Machine:
    """Raises `Unavailable` where vLLM is not installed."""
    flags = Path("/proc/cpuinfo").read_text(errors="replace")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return Machine(
        cpu=_cpu_build(),
        cores=len(os.sched_getaffinity(0)),
        fast_bfloat16=any(flag in flags for flag in _FAST_BFLOAT16),
        openmp=openmp if openmp.exists() else None,
    )


def choose_dtype(wanted: str, machine: Machine) -> tuple[str, list[str]]:
    """The value of --dtype, and what a person should know about the choice."""
    repaired = ["vLLM's CPU sampling is repaired (#55005)"] if vllm_cpu_repair.needed() else []
    if not machine.cpu or machine.fast_bfloat16:
        return wanted, repaired
    if wanted == "auto":
        return "float32", ["float32: this CPU computes bfloat16 about 100 times slower", *repaired]
    slow = [] if wanted == "float32" else [f"{wanted} is very slow on this CPU: float32 is not"]
    return wanted, [*slow, *repaired]


def arguments(
    params: DeployParams,
    examined: Examined,
    machine: Machine,
    dtype: str,
    port: int,
    served_name: str,
    trace_socket: Path | None,
) -> list[str]:
    """Everything after `python -m`."""
    drafting = speculative_config(examined.method, examined.speculative_tokens, params.speculator)
    values: dict[str, Any] = {
        "--model": params.verifier,
        "--served-model-name": served_name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": params.max_model_len,
        "--max-num-seqs": params.max_num_seqs,
        "--speculative-config": json.dumps(drafting),
        "--per-request-spec-decode-metrics": "detailed",
        "--scheduler-cls": SCHEDULER,
        "--shutdown-timeout": DRAIN_S,
    }
    switches = ["--disable-uvicorn-access-log"]
    if machine.cpu:
        values |= {
            "--kv-cache-memory-bytes": examined.kv_cache_bytes,
            "--distributed-executor-backend": "uni",
        }
        switches.append("--enforce-eager")
    if trace_socket:
        switches.append("--no-async-scheduling")
    flat = [str(part) for pair in values.items() for part in pair]
    return [ENTRY_POINT, *flat, *switches]


def environment(machine: Machine, cache: Path) -> dict[str, str]:
    """What is set for the server beside what it inherits."""
    values = {
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # verifier and speculator are directories
        # model runner V2 never shows the scheduler which ids were drafted
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if machine.cpu:
        values |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # permits an executor inside the engine
            "OMP_NUM_THREADS": str(machine.cores),
        }
        if machine.openmp:
            values["LD_PRELOAD"] = str(machine.openmp)
    return values


def _cpu_build() -> bool:
    try:
        version("vllm-cpu")
        return True
    except PackageNotFoundError:
        pass
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        raise Unavailable(
            "vLLM is not installed on this machine",
            hint="run `make up` here once, or deploy with the reference engine",
        ) from None
