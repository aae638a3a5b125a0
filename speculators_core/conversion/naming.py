"""How EAGLE-3 files call their tensors, and what the result calls them. Light: no torch.

Four ways of naming the first layer are in use: `midlayer.`, `layers.0.`, and both behind `model.`.
"""

from __future__ import annotations

import re

from speculators_core.conversion.header import TensorInfo
from speculators_core.conversion.source import Source
from speculators_core.errors import CheckpointError

_LAYER = re.compile(r"(?P<prefix>(model\.)?(midlayer|layers))\.(?P<rest>.+)")
_FIRST = re.compile(r"(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight")


def is_draft(source: Source) -> bool:
    """Whether the tensors are those of an EAGLE-3 draft: `fc`, and a first layer that norms the
    state beside the embedding.
    """
    names = source.tensors
    return any(_FIRST.fullmatch(name) for name in names) and (
        "fc.weight" in names or "model.fc.weight" in names
    )


def uses_midlayer(source: Source) -> bool:
    """Whether the first layer is called `midlayer`, as the EAGLE authors and SpecForge do."""
    return any("midlayer." in name for name in source.tensors)


def rename(source: Source) -> dict[str, TensorInfo]:
    """Tensors under their target names. One way of naming layers a file: mixtures are refused."""
    prefixes: dict[str, str] = {}
    named: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        target = name.removeprefix("model.")
        match = _LAYER.fullmatch(name)
        if match:
            prefixes.setdefault(match["prefix"], name)
            if match["prefix"].endswith("midlayer"):
                target = f"layers.0.{match['rest']}"
        if target in named:
            raise _mixture(source, named[target].name, name)
        named[target] = info
    if len(prefixes) > 1:
        raise _mixture(source, *list(prefixes.values())[:2])
    return named


def count_layers(named: dict[str, TensorInfo]) -> int:
    """How many draft layers the tensors make: published configs can't be trusted with that."""
    return len({name.split(".")[1] for name in named if name.startswith("layers.")})


def _mixture(source: Source, one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"the file mixes two ways of naming: {one} and {other}",
        where=str(source.directory),
        hint="was it merged from two checkpoints?",
    )
