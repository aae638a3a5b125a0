"""The commands that serve a speculator elsewhere: vLLM, vLLM in Red Hat's container, SGLang.

One place for what they must say, used by the command line, the model card and the pages. The
method is always explicit, because vLLM would guess it from the path. Light: no torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from speculators_core.config import read_json
from speculators_core.errors import InputError
from speculators_core.hub.reference import is_hub_id, repository_of
from speculators_core.models.draft_config import read_draft_config, verifier_of
from speculators_core.params import LaunchParams

_METHODS = ("eagle3", "dflash", "eagle")  # vLLM calls them as their algorithms are called
EXPORT_REPORT = "export_report.json"
_SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle": "EAGLE"}
_STITCH = (
    "an MTP head is served inside its verifier: speclab stitch-mtp SPECULATOR --verifier V "
    "--output DIR, then vllm serve DIR --speculative-config "
    '\'{"method": "mtp", "num_speculative_tokens": 1}\''
)
_INSIDE = "/models"
_CACHE = "/opt/app-root/src/.cache"  # where the image's user keeps the hub's downloads
_PORT = 8000  # vLLM's own, inside the container


class Served(BaseModel):
    """What a launch line must know of a draft. `model` and `verifier` are hub ids or directories,
    `layout` is that of the files of `model`.
    """

    model_config = ConfigDict(frozen=True)

    algorithm: str
    model: str
    verifier: str
    speculative_tokens: int
    layout: str = "speculators"
    aux_layers_known: bool = True


class Commands(BaseModel):
    """Launch lines ready for a shell; None where an engine can't serve these files as they are."""

    model_config = ConfigDict(frozen=True)

    vllm: str | None
    podman: str | None
    sglang: str | None
    notes: list[str]


def read_served(params: LaunchParams) -> Served:
    """The facts of a speculator directory: speculators format, or what `speclab export` wrote.

    Raises `CheckpointError` where it is neither, `InputError` where nothing names the verifier.
    """
    directory = Path(params.speculator)
    config = read_json(directory / "config.json")
    if "speculators_model_type" in config or not (directory / EXPORT_REPORT).exists():
        facts = _of_draft(directory)
    else:
        facts = dict(read_json(directory / EXPORT_REPORT).get("serving") or {})
    verifier = params.verifier_name or facts.get("verifier")
    if not verifier:
        raise InputError(
            "nothing names the verifier of this draft",
            where=str(directory / "config.json"),
            hint="name it: --verifier-name ORG/NAME",
        )
    return Served(
        algorithm=str(facts.get("algorithm")),
        model=str(directory),
        verifier=at_hand(str(verifier)),
        speculative_tokens=params.speculative_tokens or facts.get("speculative_tokens", 3),
        layout=facts.get("layout", "speculators"),
        aux_layers_known=facts.get("aux_layers_known", True),
    )


def at_hand(verifier: str) -> str:
    """A verifier as a shell takes it in quotes: a hub id, or a path without `~`."""
    return verifier if is_hub_id(verifier) else str(Path(verifier).expanduser())


def _of_draft(directory: Path) -> dict[str, Any]:
    config = read_draft_config(directory)
    return {
        "algorithm": config.algorithm,
        "verifier": verifier_of(config),
        "speculative_tokens": config.speculative_tokens,
        "aux_layers_known": knows_aux_layers(config),
    }


def knows_aux_layers(config: object) -> bool:
    """Whether a draft that takes aux states says which; True for one of another algorithm."""
    return getattr(config, "eagle_aux_hidden_state_layer_ids", ()) is not None


def commands(params: LaunchParams) -> Commands:
    """The launch lines of a speculator directory."""
    return lines(read_served(params), params)


def lines(served: Served, params: LaunchParams | None = None) -> Commands:
    """The launch lines of a draft; `params` says image, GPUs and port."""
    params = params or LaunchParams(speculator=served.model)
    notes = _notes(served)
    if served.algorithm == "mtp":
        return Commands(vllm=None, podman=None, sglang=None, notes=[*notes, _STITCH])
    if served.layout != "speculators":
        line = _shell(_sglang(served)) if served.layout == "specforge" else None
        return Commands(vllm=None, podman=None, sglang=line, notes=notes)
    return Commands(
        vllm=_shell(["vllm", "serve", *_vllm(served, params)]),
        podman=_shell(_podman(served, params)),
        sglang=None,
        notes=notes,
    )


def _notes(served: Served) -> list[str]:
    notes = []
    if not served.aux_layers_known:
        notes.append(
            "config.json names no aux layers, and servers would take 2, n/2 and n-3 in silence: "
            "convert again with --aux-layers"
        )
    if not is_hub_id(served.verifier):
        notes.append(
            "the verifier is named by a path: on another machine pass its hub id "
            "(--verifier-name ORG/NAME)"
        )
    if served.layout != "speculators":
        readers = {"specforge": "SGLang", "research": "EAGLE's own code"}[served.layout]
        notes.append(f"these files are for {readers}; vLLM serves the speculators format")
    elif served.algorithm in _SGLANG_ALGORITHMS:
        notes.append("SGLang reads another layout: speclab export --format specforge")
    return notes


def speculative_config(method: str, tokens: int, model: str | None = None) -> dict[str, Any]:
    """The value of vLLM's --speculative-config for K = `tokens`, drafted ones alone. The method is
    said, never left to vLLM's guess from the path. `model` is the draft's; an MTP head is among
    the weights of its verifier, and the n-gram drafter (prompt lookup) has none.
    """
    if method not in (*_METHODS, "mtp", "ngram"):
        raise InputError(
            f"vLLM has no method for the algorithm {method!r}",
            where="speculators_config.algorithm",
            hint=f"known: {', '.join(_METHODS)}",
        )
    values: dict[str, Any] = {"method": method}
    if method in _METHODS:
        values["model"] = model
    if method == "ngram":
        values |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {**values, "num_speculative_tokens": tokens}


def _vllm(served: Served, params: LaunchParams) -> list[str]:
    """What follows `vllm serve`. A draft runs on as many GPUs as its verifier by default."""
    config = speculative_config(served.algorithm, served.speculative_tokens, served.model)
    words = [served.verifier, "--speculative-config", json.dumps(config)]
    gpus = [] if params.gpus == "all" else params.gpus.split(",")
    return [*words, "--tensor-parallel-size", str(len(gpus))] if len(gpus) > 1 else words


def _podman(served: Served, params: LaunchParams) -> list[str]:
    """Rootless, GPUs through the Container Device Interface; directories are mounted read-only.

    The hub's token is taken over from the caller's environment by name, so that its value stands
    in no command line.
    """
    inside, mounts = {}, []
    for what in ("model", "verifier"):
        place = getattr(served, what)
        inside[what] = place
        if _is_directory(place):
            inside[what] = f"{_INSIDE}/{what}"
            mounts += ["-v", f"{place}:{inside[what]}:ro"]
    words = ["podman", "run", "--rm"]
    words += [f"--device=nvidia.com/gpu={gpu}" for gpu in params.gpus.split(",")]
    words += ["--security-opt=label=disable", "--shm-size=4g", "--userns=keep-id:uid=1001"]
    words += ["-p", f"{params.port}:{_PORT}", *mounts]
    if not all(map(_is_directory, (served.model, served.verifier))):
        words += ["--env", "HF_TOKEN", "-v", f"speclab-hub:{_CACHE}:U"]
    words += ["--entrypoint", "vllm", params.image, "serve"]
    return words + _vllm(served.model_copy(update=inside), params)


def _sglang(served: Served) -> list[str]:
    """A chain of K: SGLang's number of draft tokens counts the root as well."""
    if served.algorithm not in _SGLANG_ALGORITHMS:
        raise InputError(
            f"SGLang serves no {served.algorithm!r} drafts from files like these",
            where="serving.algorithm",
            hint=f"it serves {', '.join(_SGLANG_ALGORITHMS)}",
        )
    k = served.speculative_tokens
    return [
        *("python3", "-m", "sglang.launch_server", "--model-path", served.verifier),
        *("--speculative-algorithm", _SGLANG_ALGORITHMS[served.algorithm]),
        *("--speculative-draft-model-path", served.model),
        *("--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(k + 1)),
    ]


def _is_directory(place: str) -> bool:
    """Whether it stands for files of the machine rather than for a repository of the hub."""
    return not is_hub_id(place)


def _shell(words: Sequence[str]) -> str:
    return shlex.join(words)


def portable_name(verifier: str) -> str:
    """How to name a verifier to other people: its hub id where that is known, else its folder's
    name, never a path.
    """
    if is_hub_id(verifier):
        return verifier
    known = repository_of(verifier)
    return known.repository if known else Path(verifier).name
