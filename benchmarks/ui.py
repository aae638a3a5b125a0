"""What pages cost as the lab's history grows, and how fast the token view takes updates.

    python benchmarks/ui.py [--quick] [--json]

`page_time_ratio`: the slowest page's time over 10,000 runs and 1,000,000 acceptance rows, over its
time over 100 runs and 10,000 rows (promise: at most 2; `--quick` uses 100,000 rows). Timed is what
a page reads and builds, in turns on both stores. `view_updates_per_second`: updates of one
decoding step each, sent as fast as possible through the real application to a real Chromium, in
which none may be missed (promise: at least 30).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import migrations
from app.services import acceptance, demo, deployments, evaluations, playground, runs
from app.settings import settings
from app.store import engine
from app.store.models import AcceptanceSample, Deployment, Run, now

KINDS = ("train", "prepare", "evaluate", "convert", "deploy")
ROUNDS = 15


def pages(deployment_id: str) -> dict[str, Callable[[], Any]]:
    """Each page's reading and building, as its handlers do it."""
    from app.ui import deploy, home
    from app.ui import runs as runs_page

    def show_home() -> None:
        home.demo_card(demo.status())
        running = runs.list_runs(state=home.ACTIVE, limit=8).items
        home.lab_tree(running, 0, evaluations.list_evaluations(limit=6))

    return {
        "home": show_home,
        "runs": lambda: runs_page.list_tree(runs_page.find("all", "all", "", 0)),
        "runs of a kind": lambda: runs_page.list_tree(runs_page.find("train", "all", "", 0)),
        "deploy": lambda: deploy.list_tree(deployments.list_deployments(limit=30), ""),
        "playground": lambda: playground.list_generations("local", limit=6),
        "acceptance": lambda: acceptance.totals(deployment_id),
    }


def fill(run_count: int, rows: int) -> str:
    """A history; the id of the deployment that has all the acceptance rows."""
    started = now() - timedelta(days=30)
    made = [_run(i, KINDS[i % len(KINDS)], started) for i in range(run_count)]
    serving = [run["id"] for run in made if run["kind"] == "deploy"]
    with engine.writing() as session:
        session.bulk_insert_mappings(Run, made)
        session.bulk_insert_mappings(Deployment, [_deployment(run_id) for run_id in serving])
    for start in range(0, rows, 50_000):
        batch = [_sample(serving[0], i, started) for i in range(start, min(start + 50_000, rows))]
        with engine.writing() as session:
            session.bulk_insert_mappings(AcceptanceSample, batch)
    return serving[0]


def _run(number: int, kind: str, started: Any) -> dict[str, Any]:
    moment = started + timedelta(seconds=number)
    return {
        "id": f"run{number:07d}",
        "kind": kind,
        "name": f"{kind} number {number}",
        "state": "succeeded",
        "params": {"verifier": "v"},
        "fingerprint": f"{number:032x}",
        "owner": "ada",
        "created_at": moment,
        "started_at": moment,
        "finished_at": moment + timedelta(seconds=50),
        "progress_text": "done",
    }


def _deployment(run_id: str) -> dict[str, Any]:
    facts = {"engine": "vllm", "verifier": "v", "speculative_tokens": 3, "served_name": "v"}
    return {"run_id": run_id, "notes": [], **facts}


def _sample(deployment_id: str, number: int, started: Any) -> dict[str, Any]:
    return {
        "deployment_id": deployment_id,
        "request_id": f"r{number}",
        "at": started + timedelta(seconds=number),
        "steps": 4,
        "drafted": 12,
        "accepted": 5,
        "per_position": [3, 2, 0],
        "accepted_per_step": b"\x02\x00\x03\x00",
        "context_len": 100,
        "tokens": 9,
    }


def use(home: Path) -> None:
    """Make `home` this process's lab."""
    engine.dispose()
    os.environ["SPECLAB_HOME"] = str(home)
    settings.cache_clear()


def page_times(folder: Path, rows: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each page over the small and the large history."""
    homes = {}
    for name, run_count, row_count in (("small", 100, 10_000), ("large", 10_000, rows)):
        (folder / name).mkdir()
        use(folder / name)
        migrations.upgrade(settings().store_url)
        homes[name] = fill(run_count, row_count)
    spent: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS):
        for name, deployment_id in homes.items():
            use(folder / name)
            for page, show in pages(deployment_id).items():
                show()  # the first call opens the store anew
                begun = time.perf_counter()
                show()
                spent.setdefault(page, {}).setdefault(name, []).append(time.perf_counter() - begun)
    return {
        page: (statistics.median(times["small"]), statistics.median(times["large"]))
        for page, times in spent.items()
    }


def updates_per_second() -> float:
    """Updates a second that the browser draws, of an answer that comes in a burst."""
    from playwright.sync_api import sync_playwright

    from tests.e2e.browser import CHROMIUM, FLAGS, Stage, opened
    from tests.e2e.stage import decoded, story_of

    sent = len(list(decoded(story_of("burst"), speculative=True)))
    with (
        tempfile.TemporaryDirectory(prefix="speclab-", dir="/tmp") as home,
        Stage(home) as stage,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(base_url=stage.address)
        page.goto(stage.link)
        opened(page, "/playground")
        page.wait_for_function("document.querySelector('#deployment input')?.value")
        page.fill("#message textarea", "a burst, please")
        page.evaluate(_WATCH)
        page.click("#send")
        page.wait_for_selector("#tokens .chip.done", timeout=120_000)
        seen = page.evaluate("window.seen")
        drawn = page.locator("#tokens .tv-step").count()
        browser.close()
    if drawn != sent:
        raise RuntimeError(f"{sent} steps were sent, {drawn} were drawn")
    return float(seen["updates"] / (seen["last"] - seen["first"]) * 1000)


_WATCH = """() => {
  const flow = document.querySelector("#tokens .tv-flow");
  window.seen = { updates: 0, first: 0, last: 0 };
  new MutationObserver(() => {
    window.seen.last = performance.now();
    window.seen.first ||= window.seen.last;
    window.seen.updates += 1;
  }).observe(flow, { childList: true });
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the acceptance rows")
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="speclab-ui-") as folder:
        times = page_times(Path(folder), 100_000 if asked.quick else 1_000_000)
        engine.dispose()
    for page, (small, large) in times.items():
        print(f"{page:16} {1000 * small:8.1f} ms {1000 * large:8.1f} ms  {large / small:5.2f}")
    result = {
        "page_time_ratio": max(large / small for small, large in times.values()),
        "view_updates_per_second": updates_per_second(),
    }
    print(json.dumps(result) if asked.json else result)


if __name__ == "__main__":
    main()
