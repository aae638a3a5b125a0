"""What this host offers the lab: its GPUs, or slots on its CPU, each a row that a run can hold.

Claiming and freeing them is `services.claims`; here is what only the host itself can know.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from app.services import claims
from app.settings import settings
from speculators_core.errors import InputError

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class HostSlots:
    """GPUs by the index that nvidia-smi gives them; without any, deployments run on the CPU."""

    gpus: tuple[int, ...]
    jobs: int
    serving: int

    @property
    def total(self) -> int:
        return len(self.gpus) + self.jobs + (0 if self.gpus else self.serving)


def host_name() -> str:
    """This host's name in the lab."""
    return settings().worker_host or socket.gethostname()


@lru_cache(maxsize=1)
def host_slots() -> HostSlots:
    """What the settings and the machine allow; looked up once a process."""
    chosen = settings().gpus
    gpus = _indices(chosen, "SPECLAB_GPUS") if chosen else find_gpus()
    return HostSlots(gpus, settings().job_slots, settings().serving_slots)


def register() -> None:
    """Tell the store what this host offers, and that it is alive."""
    slots = host_slots()
    claims.register_slots(host_name(), slots.gpus, slots.jobs, slots.serving)


def find_gpus() -> tuple[int, ...]:
    """GPUs that this process may use: nvidia-smi's, within CUDA_VISIBLE_DEVICES where set."""
    try:
        told = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()  # no driver, no GPU
    found = _indices(",".join(told.stdout.split()), "nvidia-smi")
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return found
    return tuple(gpu for gpu in found if gpu in _indices(allowed, "CUDA_VISIBLE_DEVICES"))


def device_environment(devices: Sequence[int]) -> dict[str, str]:
    """The variables that show a job its leased GPUs as cuda:0 and on, and no other."""
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order nvidia-smi counts in
    }


def _indices(text: str, where: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise InputError(
            f"GPUs are named by index (0,1), found {text!r}",
            where=where,
            hint="use the indices that nvidia-smi shows",
        )
    return tuple(int(part) for part in parts)
