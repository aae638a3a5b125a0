"""What a conversion would do, before it does it: the shape that every layout's reader fills.

A layout is one module that answers two questions about a `Source`: is it mine, and what would it
become. `inspect` shows the plan, `convert` carries it out. Light: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from speculators_core.config import Eagle3Config
from speculators_core.conversion.source import Source
from speculators_core.errors import InputError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

How = Literal["copied", "derived", "shared", "part", "unused"]
Origin = Literal["checkpoint", "tensors", "verifier", "layout", "parameter"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class DraftConfig(Protocol):
    """What the `config.json` of a result says, whatever its algorithm."""

    @property
    def algorithm(self) -> str:
        """`eagle3`, `dflash`, `mtp` or `eagle`."""

    @property
    def speculative_tokens(self) -> int:
        """The K that the file proposes."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all tensors of such a checkpoint."""

    def tensor_dtype(self, name: str) -> str:
        """The dtype that tensor `name` is written in, in torch's words."""

    def to_json(self) -> str:
        """The text of config.json."""


class TensorRow(_Frozen):
    """One tensor's way, by `how`:

    `copied`    the source's values, cast where dtypes differ
    `derived`   computed from `source`
    `shared`    not written: the verifier's own is used when the draft is loaded
    `part`      several sources make one target: their bytes one after the other, in row order
    `unused`    left out, for the reason

    `shape` and `dtype` are those of the result; of the source where it is unused or a part.
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
    config: DraftConfig

    def files(self, source: Source) -> list[Path]:
        """The files that it takes tensors from: few of a whole model's, where it takes its MTP
        head.
        """
        taken = {row.source for row in self.inspection.tensors}
        return sorted({info.file for name, info in source.tensors.items() if name in taken})

    def warned(self, warning: str) -> Plan:
        """The same plan with one warning more."""
        warnings = [*self.inspection.warnings, warning]
        return replace(self, inspection=self.inspection.model_copy(update={"warnings": warnings}))

    @property
    def eagle3(self) -> Eagle3Config:
        """The config of an EAGLE-3 draft. Raises `InputError` for any other algorithm."""
        if isinstance(self.config, Eagle3Config):
            return self.config
        raise InputError(
            f"the reference engine drafts with eagle3, found {self.config.algorithm}",
            where="speculators_config.algorithm",
            hint="serve this draft with vLLM",
        )


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
