"""What a conversion would do, before it does it: the shape that every layout's reader fills.

A layout is one module that answers two questions about a `Source`: is it mine, and what would it
become. `inspect` shows the plan, `convert` carries it out. Light: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from speculators_core.config import Eagle3Config
from speculators_core.conversion.source import Source
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

How = Literal["copied", "derived", "shared", "unused"]
Origin = Literal["checkpoint", "tensors", "verifier", "layout", "parameter"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class TensorRow(_Frozen):
    """One tensor's way. `shared`: not written, the verifier's own is used when the draft is
    loaded. `shape` and `dtype` are those of the result, of the source where it is unused.
    """

    source: str | None
    target: str | None
    shape: list[int]
    dtype: str
    reason: str
    how: How


class ConfigValue(_Frozen):
    """A field of the result's config and where its value comes from."""

    value: Any
    origin: Origin


class Choice(_Frozen):
    """One way to settle a doubt: the `ConvertParams` fields to set, and what was measured."""

    params: dict[str, Any]
    meaning: str
    first_token_acceptance: float | None = None


class Doubt(_Frozen):
    """A question that the checkpoint leaves open. Unsettled (`chosen` is None), it keeps the
    result from being deployed; `chosen` is the index of the choice that a rule made.
    """

    about: str
    choices: list[Choice]
    chosen: int | None = None


class Inspection(_Frozen):
    """What `speclab inspect` prints."""

    layout: str
    tensors: list[TensorRow]
    config: dict[str, ConfigValue]
    doubts: list[Doubt]
    warnings: list[str]


@dataclass(frozen=True)
class Plan:
    """An inspection, and the config that the result would have."""

    inspection: Inspection
    config: Eagle3Config


class Layout(Protocol):
    """A source layout. Implementations are modules' worth of functions in one frozen object."""

    @property
    def name(self) -> str: ...

    def recognises(self, source: Source) -> bool:
        """Whether the tensors and config are of this layout. Looks at content, not at names."""

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        """What it would become. Raises `CheckpointError` or `PairingError` naming the tensor or
        field that can't be right.
        """
