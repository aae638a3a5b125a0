"""Which options of a conversion a draft of some algorithm takes; one that it would ignore is
refused. Light: no torch.
"""

from __future__ import annotations

from speculators_core.conversion.source import Source
from speculators_core.conversion.target import Fields
from speculators_core.errors import InputError
from speculators_core.model_config import positive
from speculators_core.params import ConvertParams, InspectParams

_ANY = frozenset({"checkpoint", "verifier", "verifier_name", "dtype", "speculative_tokens"})
_TAKEN = {
    "eagle3": frozenset(InspectParams.model_fields),
    "dflash": _ANY | {"aux_layers", "aux_convention", "rope_theta"},
    "mtp": _ANY,
    "eagle": _ANY | {"rope_theta"},
}
_SILENT_K = 3  # tokens drafted a step, where neither a person nor the file says how many


def refuse_ignored(params: ConvertParams, algorithm: str) -> None:
    """Raise `InputError` for an option that a draft of this algorithm has no use for."""
    for name in sorted(InspectParams.model_fields.keys() - _TAKEN[algorithm]):
        value = getattr(params, name)
        if value != InspectParams.model_fields[name].default:
            raise InputError(
                f"{name} is {value!r}, which means nothing for a draft of algorithm {algorithm}",
                where=name,
                hint="leave it out",
            )


def stated_drafted(source: Source) -> int | None:
    """K as a file in speculators format says it."""
    block = source.config.get("speculators_config") or {}
    methods = block.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    stated = first.get("speculative_tokens") if isinstance(first, dict) else None
    return None if stated is None else positive(first, "speculative_tokens", source.directory)


def put_drafted(fields: Fields, params: ConvertParams, stated: int | None = None) -> None:
    """K: a person's word, else the file's, else the usual one."""
    if params.speculative_tokens is not None:
        fields.put("speculative_tokens", params.speculative_tokens, "parameter")
    elif stated is not None:
        fields.put("speculative_tokens", stated, "checkpoint")
    else:
        fields.put("speculative_tokens", _SILENT_K, "layout")
