"""Do draft and verifier belong together, and how is the verifier named? Light: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculators_core.config import Eagle3Config, read_json
from speculators_core.conversion.aux_layers import IDS
from speculators_core.conversion.source import Source
from speculators_core.conversion.target import REPORT, TRAINING_REPORT
from speculators_core.errors import PairingError
from speculators_core.hub.reference import is_hub_id, repository_of
from speculators_core.models.verifier_config import VerifierFacts, tokenizer_fingerprint
from speculators_core.params import ConvertParams

_CONTEXT = "max_position_embeddings"
_IDS = "eagle_aux_hidden_state_layer_ids"


def check_pairing(config: Eagle3Config, verifier: VerifierFacts) -> None:
    """Raise `PairingError` unless width, vocabulary and layer numbers fit the verifier."""
    check_sizes(config.vocab_size, config.verifier_hidden_size, None, verifier)
    check_layers(config.eagle_aux_hidden_state_layer_ids or (), verifier, IDS)


def check_sizes(
    vocab_size: int, hidden_size: int, num_layers: int | None, verifier: VerifierFacts
) -> None:
    """Raise `PairingError` unless the verifier has these sizes (None: the draft does not say)."""
    for what, draft, theirs in (
        ("vocabulary", vocab_size, verifier.vocab_size),
        ("hidden size", hidden_size, verifier.hidden_size),
        ("number of layers", num_layers, verifier.num_hidden_layers),
    ):
        if draft is not None and draft != theirs:
            raise PairingError(
                f"the draft was made for a verifier with {what} {draft}, this one has {theirs}",
                where=verifier.path,
                hint="choose the verifier that the draft was trained for",
            )


def check_layers(ids: Sequence[int], verifier: VerifierFacts, where: str) -> None:
    """Raise `PairingError` unless the verifier has the states after these layers (ascending)."""
    last = verifier.num_hidden_layers
    if ids and ids[-1] > last:
        raise PairingError(
            f"aux layer {ids[-1]} is out of range: the verifier has {last} layers",
            where=where,
            hint=f"name the layers the draft was trained on, counted after k layers: 0 to {last}",
        )


def pairing_warnings(
    stated: Mapping[str, Any], source: Source, verifier: VerifierFacts | None
) -> list[str]:
    """What does not forbid the pair, but should be seen. `stated` is the draft's config as the
    file has it.
    """
    if verifier is None:
        return []
    warnings = []
    own = stated.get(_CONTEXT)
    if own is not None and own < verifier.max_position_embeddings:
        warnings.append(
            f"the draft was made for {own} positions, its verifier for "
            f"{verifier.max_position_embeddings}: the verifier's are written, so that vLLM serves "
            f"them all, but beyond {own} the draft is untried"
        )
    warnings += tokenizer_warnings(source.directory, verifier)
    return warnings


def tokenizer_warnings(draft: Path, verifier: VerifierFacts | None) -> list[str]:
    """That draft and verifier may read tokens differently, where the draft brings a tokenizer or
    the report of its conversion or training names one.
    """
    own = tokenizer_fingerprint(draft) or _recorded_fingerprint(draft)
    theirs = verifier.tokenizer_fingerprint if verifier else None
    if own is None or theirs is None or own == theirs:
        return []
    return [
        "the draft was made for another tokenizer than the verifier's: the same vocabulary size, "
        "but maybe not the same tokens"
    ]


def _recorded_fingerprint(draft: Path) -> str | None:
    for report in (draft / REPORT, draft / TRAINING_REPORT):
        if report.exists():
            verifier = read_json(report).get("verifier")
            found = verifier.get("tokenizer_fingerprint") if isinstance(verifier, dict) else None
            return found if isinstance(found, str) else None
    return None


def verifier_block(
    verifier: VerifierFacts | None, params: ConvertParams, source: Source
) -> tuple[dict[str, Any], list[str]]:
    """`speculators_config.verifier`, and a warning where it names a place of this machine. Without
    a verifier it says what the checkpoint says, or nothing.
    """
    if verifier is None:
        said = _said_by(source)
        return {"name_or_path": said or "", "architectures": []}, []
    name, warnings = written_name(verifier, params.verifier_name, _said_by(source))
    return {"name_or_path": name, "architectures": verifier.architectures}, warnings


def written_name(
    verifier: VerifierFacts, given: str | None, said: str | None = None
) -> tuple[str, list[str]]:
    """How a config names the verifier, and warnings: a hub id where one is given or certain, else
    the path; never with the user's home in it. `said`: how another config names it.
    """
    cached = repository_of(verifier.path)
    certain = given or (cached.repository if cached else None)
    if certain:
        return certain, []
    known = said or _said_in(Path(verifier.path) / "config.json")
    offer = f" {known}, if that is it" if known and is_hub_id(known) else " ORG/NAME"
    warning = (
        "config.json names the verifier by a path of this machine, which breaks the checkpoint on "
        f"any other: give its hub id (--verifier-name{offer})"
    )
    return without_home(verifier.path), [warning]


def without_home(path: str) -> str:
    """The path, `~` in place of the user's home."""
    home = Path.home()
    for candidate, root in ((Path(path), home), (Path(path), home.resolve())):
        if candidate.is_relative_to(root) and root != Path("/"):
            return str(Path("~") / candidate.relative_to(root))
    return path


def _said_by(source: Source) -> str | None:
    """The verifier that a speculators config names."""
    verifier = (source.config.get("speculators_config") or {}).get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None


def _said_in(config: Path) -> str | None:
    """Where a verifier's own config says it came from: a trace that may be of another machine."""
    name = read_json(config).get("_name_or_path")
    return name if isinstance(name, str) else None
