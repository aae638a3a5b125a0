"""Where and in which number formats a run computes, and why.

The draft's parameters, its optimiser and its losses are always float32. Autocast runs the matrix
products in bfloat16, whose range is float32's: no loss scaling is needed. float16 is not offered:
several verifiers have activations above its largest value, 65504, and no draft learns from
infinity.
"""

from __future__ import annotations

import resource
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from speculators_core.models.verifier import fastest
from speculators_core.params import TrainParams


@dataclass(frozen=True)
class Machine:
    """Device, the verifier's number format, and the draft's matrix products'."""

    device: torch.device
    dtype: torch.dtype
    products: torch.dtype
    told: str

    def autocast(self) -> AbstractContextManager[None]:
        """While open, matrix products are in `products`."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.products is torch.bfloat16
        )

    def memory_mb(self) -> float:
        """The most that was in use so far: of the GPU, or of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e6
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def find_machine(params: TrainParams) -> Machine:
    """What the parameters and this machine allow."""
    device, dtype = fastest()
    why = "as asked"
    if params.dtype == "auto":
        why = "auto: " + ("a GPU" if device.type == "cuda" else "a CPU computes float32 fastest")
    else:
        dtype = getattr(torch, params.dtype)
    products, because = _products(params, device)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    told = (
        f"device {device.type} ({name}), verifier in {_word(dtype)} ({why}), draft in float32, "
        f"its matrix products in {_word(products)} ({because}), torch {torch.__version__}"
    )
    return Machine(device, dtype, products, told)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The number format that matrix products of `x` have here: autocast's, where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _products(params: TrainParams, device: torch.device) -> tuple[torch.dtype, str]:
    if params.autocast != "auto":
        chosen = torch.bfloat16 if params.autocast == "bfloat16" else torch.float32
        return chosen, "as asked"
    if device.type != "cuda":
        return torch.float32, "auto: no GPU"
    if not torch.cuda.is_bf16_supported():
        return torch.float32, "auto: this GPU has no bfloat16"
    return torch.bfloat16, "auto: a GPU"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
