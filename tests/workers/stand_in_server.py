"""A small OpenAI-like server for tests of starting, watching and ending one.

`python -m tests.workers.stand_in_server MODE PORT NAME`: `good`; `sick` (health never answers 200);
`stranger` (serves another name); `refuses` and `dies_on_first` (at the first completion); `dies`
(at once, with a traceback); `stubborn` (good, ignores TERM, and so does its child).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE, PORT, NAME = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if MODE == "sick" else 200, {})
        elif self.path == "/v1/models":
            name = "somebody-else" if MODE == "stranger" else NAME
            self.reply(200, {"data": [{"id": name}]})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if MODE == "refuses":
            self.reply(400, {"error": {"message": "no chat template"}})
        elif MODE == "dies_on_first":
            print("IndexError: index 300 is out of bounds", flush=True)
            os._exit(0)
        else:
            steps = {"num_spec_steps": 0 if MODE == "idle" else 2}
            self.reply(200, {"choices": [], "metrics": {"speculative_decoding": steps}})

    def reply(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    print("Loading weights took 0.1 seconds", flush=True)
    if MODE == "dies":
        raise ValueError("the weights are wrong")
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(1)  # several looks of whoever waits for it
    ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()


if __name__ == "__main__":
    main()
