"""Optimisers over the draft's parameters: AdamW, or Muon for the layers' matrices beside it.

Muon (torch.optim.Muon) orthogonalises the update of a matrix; its step is scaled as AdamW's would
be (`match_rms_adamw`), so one learning rate serves both. Embedding, head, norms and biases stay
with AdamW, as is usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speculators_core.params import TrainParams
from speculators_core.training.world import placed_like, whole

State = dict[str, dict[str, Any]]
"""By parameter name, what its optimiser remembers; whole tensors, however they are sharded."""


class Optimization:
    """The optimisers of one run, as one."""

    def __init__(self, params: TrainParams, trainable: Mapping[str, nn.Parameter]) -> None:
        self.trainable = dict(trainable)
        self.limit = params.grad_clip
        decay = params.weight_decay
        muon = params.optimizer == "muon"
        matrices = [p for name, p in trainable.items() if muon and _is_inner(name, p)]
        inner = {id(p) for p in matrices}
        rest = [p for p in trainable.values() if id(p) not in inner]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=params.lr, betas=(0.9, 0.95), weight_decay=decay)
        ]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=params.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def clip(self) -> float:
        """Shorten the gradient to the limit; its norm before, over all processes."""
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.limit)
        return float(whole(norm))

    def step(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def state(self) -> State:
        """For a checkpoint. Every process must ask."""
        return {
            name: {key: _kept(value) for key, value in self._remembered(parameter).items()}
            for name, parameter in self.trainable.items()
        }

    def load(self, state: State) -> None:
        for optimizer in self.optimizers:
            of = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.trainable.items():
                if id(parameter) in of and state[name]:
                    optimizer.state[parameter] = {
                        key: _placed(value, parameter) for key, value in state[name].items()
                    }

    def _remembered(self, parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                found: dict[str, Any] = optimizer.state[parameter]
                return found
        return {}


def _is_inner(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and name.startswith(("layers.", "fc."))


def _kept(value: Any) -> Any:
    return whole(value).detach().cpu() if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    """Counts of steps stay where they are; what has the parameter's shape lies as it does."""
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return placed_like(value, parameter)
    return value
