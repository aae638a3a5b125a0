"""The process that reads pickled weights for us (`pickled.py`), seen from outside. No torch here.

Its time is limited: one that is silent for too long is killed. It ends when nobody holds this
object any more.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from speculators_core.conversion.header import TensorInfo, damaged
from speculators_core.errors import CheckpointError
from speculators_core.precision import Raw

_SILENCE_SECONDS = 120.0
_LISTING_BYTES = 64_000_000
_PIECE = 4 << 20
_LARGEST_BYTES = 32 * 10**9  # the drafts of the largest verifiers take a few


class PickledWeights:
    """The tensors of some pickles: listed, and their bytes on request."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises `CheckpointError` where a file is damaged, would have to run code, or where they
        are too large to be read into memory."""
        self._files = files
        _check_size(files)
        command = [sys.executable, "-P", "-m", "speculators_core.conversion.pickled"]
        self._child = subprocess.Popen(
            [*command, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # its threads' stacks count as memory
        )
        self._end = weakref.finalize(self, _end, self._child)
        try:
            self.infos = self._listing()
        except CheckpointError:
            self._end()
            raise

    def pieces(self, info: TensorInfo) -> Iterator[Raw]:
        """The bytes of one tensor in order; each piece is overwritten by the next."""
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(json.dumps(info.name).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        buffer, left = np.empty(min(_PIECE, info.nbytes), np.uint8), info.nbytes
        while left:
            piece = buffer[:left]
            filled = 0
            while filled < piece.size:
                self._wait(_SILENCE_SECONDS)
                got = os.readv(self._child.stdout.fileno(), [piece.data[filled:]])
                if not got:
                    raise self._died()
                filled += got
            left -= filled
            yield piece

    def _listing(self) -> list[TensorInfo]:
        assert self._child.stdout
        text, until = bytearray(), time.monotonic() + _SILENCE_SECONDS
        while not text.endswith(b"\n"):
            self._wait(until - time.monotonic())
            chunk = os.read(self._child.stdout.fileno(), 1 << 16)
            text += chunk
            if not chunk or len(text) > _LISTING_BYTES:
                raise self._died()
        reply = json.loads(text)
        if "error" in reply:
            raise CheckpointError(reply["error"], where=reply["where"], hint=reply["hint"])
        return [TensorInfo(n, d, tuple(s), Path(file)) for file, n, d, s in reply["tensors"]]

    def _wait(self, seconds: float) -> None:
        assert self._child.stdout
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN)
        if not poll.poll(max(seconds, 0) * 1000):
            raise damaged(self._files[0], f"reading it took over {_SILENCE_SECONDS:g} s")

    def _died(self) -> CheckpointError:
        self._end()
        return damaged(self._files[0], f"reading it failed (exit {self._child.returncode})")


def _check_size(files: Sequence[Path]) -> None:
    size = sum(file.stat().st_size for file in files)
    if size > _LARGEST_BYTES:
        raise CheckpointError(
            f"{size / 1e9:.0f} GB of pickled weights: above {_LARGEST_BYTES / 1e9:.0f} GB none are "
            "read, for a pickle can't be read in pieces",
            where=str(files[0].parent),
            hint="ask its author for safetensors files, which may be of any size",
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe:
            pipe.close()
