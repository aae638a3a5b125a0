"""What tracing and the gateway cost a real vLLM server, as throughput ratios in one run.

Two deployments of the same verifier with the n-gram drafter run side by side, one traced and one
not, both by the real deploy job with a real broker. Rounds of equal requests go to one and then to
the other, in alternating order; a round's ratio is its tokens a second over the other's. The same
between the untraced server asked directly and through the application's gateway. Each figure is
the median over rounds with a 95 % bootstrap interval.

    python benchmarks/serve.py [--quick] [--json] [--verifier DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

CONCURRENCY = 4
PROMPTS = (
    "Count from one to thirty in words.",
    "Repeat this five times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
)
READY_S = 300


class Deployment:
    """A deploy job of its own, as a worker would start it."""

    def __init__(self, home: Path, verifier: Path, *, traced: bool) -> None:
        from app.services import claims, runs

        params = {"verifier": str(verifier), "trace": traced, "max_model_len": 1024}
        self.id = runs.submit("deploy", params, owner="bench", name=f"traced {traced}").id
        claims.claim("bench")
        self.log = home / f"{self.id}.log"
        with self.log.open("wb") as out:
            command = [sys.executable, "-m", "workers.job", self.id]
            self.job = subprocess.Popen(command, stdout=out, stderr=out)

    def wait(self) -> None:
        """Until it answers."""
        from app.services import deployments

        until = time.monotonic() + READY_S
        while not deployments.get(self.id).ready:
            if self.job.poll() is not None or time.monotonic() > until:
                sys.exit(f"the deployment did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.5)
        view = deployments.get(self.id)
        self.endpoint, self.model = f"{view.endpoint}/v1", view.served_name

    def close(self) -> None:
        self.job.terminate()
        self.job.wait(60)


@contextmanager
def lab() -> Iterator[Path]:
    """An empty SPECLAB_HOME with a store and a broker."""
    home = Path(tempfile.mkdtemp(prefix="speclab-bench-", dir="/tmp"))
    os.environ["SPECLAB_HOME"] = str(home)
    import migrations
    from app import embedded_broker
    from app.services import claims
    from app.settings import settings

    settings.cache_clear()
    migrations.upgrade(settings().store_url)
    claims.register_slots("bench", [], job_slots=1, serving_slots=2)
    embedded_broker.prepare(settings())
    broker = subprocess.Popen(embedded_broker.command(settings()), stdout=subprocess.DEVNULL)
    try:
        yield home
    finally:
        broker.terminate()
        broker.wait()
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def gateway(home: Path) -> Iterator[str]:
    """The application without its pages, in a process of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = (
        "import uvicorn; from app.main import create_app; "
        f"uvicorn.run(create_app(pages=False), port={port}, log_level='warning')"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                httpx.get(f"{address}/healthz")
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def api_token() -> str:
    from app.auth import Gate
    from app.settings import settings

    return Gate.of(settings()).api_token


def throughput(url: str, model: str, tokens: int, headers: dict[str, str] | None = None) -> float:
    """Tokens a second over streamed answers of exactly `tokens` tokens, four at once."""

    def ask(prompt: str) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        route = f"{url}/chat/completions"
        with httpx.stream("POST", route, json=body, headers=headers, timeout=300) as reply:
            reply.raise_for_status()
            for _ in reply.iter_raw():
                pass

    began = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(ask, PROMPTS))
    return len(PROMPTS) * tokens / (time.monotonic() - began)


def ratios(ours: Callable[[], float], theirs: Callable[[], float], rounds: int) -> list[float]:
    """One ratio a round, after one round that is not counted; who is first alternates."""
    found = []
    for i in range(rounds + 1):
        first, second = (ours, theirs) if i % 2 else (theirs, ours)
        speeds = {first: first(), second: second()}
        found.append(speeds[ours] / speeds[theirs])
    return found[1:]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def measure(verifier: Path, rounds: int, tokens: int) -> dict[str, Any]:
    with ExitStack() as stack:
        home = stack.enter_context(lab())
        found = {}
        for name in ("traced", "plain"):
            found[name] = Deployment(home, verifier, traced=name == "traced")
            stack.callback(found[name].close)
        for deployment in found.values():
            deployment.wait()
        traced, plain = found["traced"], found["plain"]

        def direct() -> float:
            return throughput(plain.endpoint, plain.model, tokens)

        tracing = ratios(lambda: throughput(traced.endpoint, traced.model, tokens), direct, rounds)
        address = stack.enter_context(gateway(home))
        token = api_token()
        route = f"{address}/deployments/{plain.id}/v1"

        def through() -> float:
            return throughput(route, plain.model, tokens, {"authorization": f"Bearer {token}"})

        passing = ratios(through, direct, rounds)
    return {
        "tracing_throughput_ratio": statistics.median(tracing),
        "tracing_interval": interval(tracing),
        "gateway_throughput_ratio": statistics.median(passing),
        "gateway_interval": interval(passing),
        "rounds": rounds,
        "tokens_per_round": len(PROMPTS) * tokens,
    }


def demo_verifier() -> Path:
    from app.settings import settings
    from speculators_core.models.demo import unpack_demo_verifier

    return unpack_demo_verifier(settings().home / "models" / "smollm2-135m-instruct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds, under five minutes")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--verifier", type=Path, help="default: the demo verifier")
    options = parser.parse_args()
    verifier = options.verifier or demo_verifier()
    rounds, tokens = (10, 16) if options.quick else (20, 64)
    report = measure(verifier, rounds, tokens)
    if options.json:
        print(json.dumps(report))
        return
    for name in ("tracing", "gateway"):
        low, high = report[f"{name}_interval"]
        ratio = report[f"{name}_throughput_ratio"]
        print(f"{name}: {ratio:.3f} of the throughput without it (95 %: {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
