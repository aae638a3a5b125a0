"""When two runs would do the same work: equal fingerprints.

A fingerprint hashes the kind and the complete parameters; a reference to a run counts as the
fingerprint of that run, so equal chains have equal fingerprints whatever their ids are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from speculators_core.params import JobKind

_RUN_REFERENCE = re.compile(r"^run:(?P<run>[^/]+)(?P<rest>(/.+)?)$")


def fingerprint(kind: JobKind, params: Mapping[str, Any], of_run: Callable[[str], str]) -> str:
    """The hash; `of_run` gives the fingerprint of the run that a reference names."""
    plain = _map_strings(dict(params), lambda text: _by_content(text, of_run))
    text = json.dumps([kind.value, plain], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def run_references(params: Mapping[str, Any]) -> list[str]:
    """Ids of the runs that the parameters refer to, each once, in order of appearance."""
    found: dict[str, None] = {}

    def collect(text: str) -> str:
        if match := _RUN_REFERENCE.match(text):
            found[match["run"]] = None
        return text

    _map_strings(dict(params), collect)
    return list(found)


def split_reference(reference: str) -> tuple[str, str] | None:
    """`run:<id>/<name>` as (id, name), name `output` when absent; None if it is not of a run."""
    match = _RUN_REFERENCE.match(reference)
    return (match["run"], match["rest"].removeprefix("/") or "output") if match else None


def _by_content(text: str, of_run: Callable[[str], str]) -> str:
    match = _RUN_REFERENCE.match(text)
    return f"run:{of_run(match['run'])}{match['rest']}" if match else text


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
