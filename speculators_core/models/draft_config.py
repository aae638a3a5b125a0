"""The config of a draft directory, whatever its algorithm. Light: no torch."""

from __future__ import annotations

from pathlib import Path

from speculators_core.config import Eagle3Config, read_json
from speculators_core.errors import CheckpointError
from speculators_core.models.dflash_config import DFlashConfig
from speculators_core.models.eagle_config import EagleConfig
from speculators_core.models.mtp_config import MTPConfig

Draft = Eagle3Config | DFlashConfig | MTPConfig | EagleConfig
_TYPES: dict[str, type[Eagle3Config] | type[DFlashConfig] | type[MTPConfig]] = {
    "eagle3": Eagle3Config,
    "dflash": DFlashConfig,
    "mtp": MTPConfig,
}


def read_draft_config(directory: Path) -> Draft:
    """Read DIR/config.json: speculators format, or the plain one of EAGLE heads.

    Raises `CheckpointError` that names the first bad field.
    """
    values, where = read_json(directory / "config.json"), str(directory / "config.json")
    kind = values.get("speculators_model_type")
    if kind in _TYPES:
        return _TYPES[kind].parse(values, where=where)
    if kind is None and values.get("architectures") == ["EagleLlamaForCausalLM"]:
        return EagleConfig.parse(values, where=where)
    if kind is None:
        return Eagle3Config.load(directory)  # raises, and says what to do
    raise CheckpointError(
        f"speculators_model_type is {kind!r}; what can be served: {', '.join(_TYPES)}",
        where=where,
        hint="convert or train a draft of one of these",
    )


def verifier_of(config: Draft) -> str:
    """The verifier that the config names; empty where it names none."""
    if isinstance(config, EagleConfig):
        return ""
    return config.speculators_config.verifier.name_or_path
