"""A checkpoint on the hub, looked at without downloading its weights.

What a plan needs is small: the JSON files, and the headers at the start of the safetensors files,
which HTTP ranges bring. They are laid out in a directory that lives as long as the look does, each
weight file as its header followed by a hole of the right size: whatever reads headers reads it as
the file itself. Light: no torch.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from speculators_core.errors import CheckpointError, InputError, SpeclabError
from speculators_core.hub.client import asking, speaking
from speculators_core.hub.download import Listing, RemoteFile, cached, fetch, listing
from speculators_core.hub.reference import HubId, parse_hub_id
from speculators_core.models.hub import here
from speculators_core.untrusted import JSON_BYTES

SMALL = ("*.json", "*.model", "*.txt", "*.jinja")
"""Configuration and tokenizer."""
_WEIGHTS = ("*.safetensors", "*.bin")
_SMALL_BYTES = 64_000_000
_FIRST_BYTES = 100_000  # holds the whole header of nearly every draft


@contextmanager
def looking_at(checkpoint: str | Path) -> Iterator[Path]:
    """A directory to read config and tensor headers from: the checkpoint's own, or for a hub id
    one that is gone afterwards. Never for reading weights.

    Raises as `download.fetch`; `InputError` where the weights are pickled, which can't be looked
    at from afar.
    """
    if directory := here(checkpoint):
        yield directory
        return
    hub_id = parse_hub_id(str(checkpoint))
    if directory := cached(hub_id, (*SMALL, *_WEIGHTS)):
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="speclab-look-") as folder:
        place = Path(folder) / hub_id.repository.replace("/", "--")
        found = listing(hub_id, (*SMALL, *_WEIGHTS))
        with _named(place, found.hub_id):
            _lay_out(found, place)
            yield place


def small_files(verifier: str) -> Path:
    """The directory of a verifier given by path or hub id, of which only configuration and
    tokenizer are sure to be there. Raises as `download.fetch`.
    """
    if found := here(verifier):
        return found
    hub_id = parse_hub_id(verifier)
    return cached(hub_id, SMALL) or fetch(hub_id, SMALL).directory


def _lay_out(found: Listing, place: Path) -> None:
    place.mkdir()
    weights = [file for file in found.files if _is_weights(file.name)]
    if not any(file.name.endswith(".safetensors") for file in weights):
        raise _unseen(found.hub_id, weights)
    small = [f.name for f in found.files if not _is_weights(f.name) and f.size <= _SMALL_BYTES]
    fetched = fetch(found.hub_id, [name for name in small if "/" not in name])
    for name in (n for n in small if "/" not in n):
        shutil.copyfile(fetched.directory / name, place / name)
    for file in weights:
        if file.name.endswith(".safetensors") and "/" not in file.name:
            _lay_header(found.hub_id, file, place / file.name)


def _unseen(hub_id: HubId, weights: Sequence[RemoteFile]) -> SpeclabError:
    if not weights:
        return CheckpointError(
            "the repository holds no weights, expected *.safetensors or *.bin",
            where=str(hub_id),
            hint="check the id and the revision",
        )
    return InputError(
        f"the weights are pickled ({weights[0].name}): they must be here to be looked at",
        where=str(hub_id),
        hint=f"download them first: speclab pull {hub_id.repository}",
    )


def _lay_header(hub_id: HubId, file: RemoteFile, place: Path) -> None:
    start = _range(hub_id, file.name, 0, _FIRST_BYTES)
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 0 < length <= min(JSON_BYTES, file.size - 8):
        raise CheckpointError(
            f"{file.name} is no safetensors file: its header should be {length} bytes long, "
            f"the file has {file.size}, and no header is over {JSON_BYTES}",
            where=str(hub_id),
            hint="ask its author for a good file",
        )
    if len(start) < 8 + length:
        start += _range(hub_id, file.name, len(start), 8 + length - len(start))
    with place.open("wb") as out:
        out.write(start[: 8 + length])
        out.truncate(file.size)


def _range(hub_id: HubId, name: str, start: int, count: int) -> bytes:
    """`count` bytes of a file, fewer at its end; a server that sends all of it is cut short."""
    got = bytearray()
    with speaking(hub_id), asking(hub_id, name, start, start + count - 1) as response:
        skip = start if response.status_code != 206 else 0
        for chunk in response.iter_bytes():
            got += chunk
            if len(got) >= skip + count:
                break
    return bytes(got[skip : skip + count])


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


@contextmanager
def _named(place: Path, hub_id: HubId) -> Iterator[None]:
    """Errors name the repository instead of the directory that stands for it."""
    try:
        yield
    except SpeclabError as error:
        error.where = error.where.replace(str(place), str(hub_id)) if error.where else None
        error.message = error.message.replace(str(place), str(hub_id))
        raise
