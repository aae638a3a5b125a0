"""A stand-in for a vLLM server that shows hidden states: it computes them with a verifier that is
loaded here, and writes them a little after its answer, under a lock, as vLLM does.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculators_core.data.vllm_states import Extraction, Extractor
from speculators_core.models.verifier import Verifier
from speculators_core.progress import Progress

Change = Callable[[int, dict[str, Tensor]], dict[str, Tensor]]
"""What is done to the tensors of the n-th answer before they are written."""


class StandIn:
    """`started`, `asked`: how often; `largest`: bytes that lay in the directory at once. Set `says`
    for another next token, `path` for another file, to misbehave."""

    model = "stand-in"

    def __init__(self, verifier: Verifier, change: Change = lambda n, tensors: tensors) -> None:
        self.verifier = verifier
        self.change = change
        self.started = self.asked = self.largest = 0
        self.says: int | None = None
        self.path: Path | None = None
        self.writes_after = 0.02
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def check(self) -> None:
        """It never ends."""

    @contextmanager
    def start(self, asked: Extraction, progress: Progress) -> Iterator[Extractor]:
        self.extraction = asked
        self.started += 1
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                answer = json.dumps(stand_in.answer(json.loads(self.rfile.read(length)))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor(body["prompt"])
        with self._lock:
            number = self.asked
            self.asked += 1
            seen = self.verifier.states(ids[None], self.extraction.layers)
            says = int(self.verifier.logits(seen[max(seen)][0, -1]).argmax())
        rows = torch.stack([seen[k][0] for k in self.extraction.layers], dim=1)
        tensors = self.change(number, {"hidden_states": rows, "token_ids": ids})
        path = self.path or self.extraction.staging / f"cmpl-{number}.safetensors"
        lock = path.with_name(f"{path.name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(tensors, path, lock)).start()
        return {
            "choices": [{"token_ids": [says if self.says is None else self.says]}],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _write(self, tensors: dict[str, Tensor], path: Path, lock: Any) -> None:
        time.sleep(self.writes_after)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        with self._lock:
            lying = path.parent.glob("*.safetensors")
            self.largest = max(self.largest, sum(_size(file) for file in lying))
        lock.close()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
