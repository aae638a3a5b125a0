"""The whole journey in a real browser: demo, chat, reload, convert, deploy, playground, stop.

Everything is real: SmolLM2, Celery, Valkey, the reference engine and vLLM. Only the demo is
reduced (a few dozen chats, a minute of training), so its speculator accepts little.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests import tiny
from tests.e2e.agreement import QUESTIONS, Reference, assert_same_steps
from tests.e2e.browser import CHROMIUM, FLAGS, opened
from tests.e2e.up import Lab

QUESTION = "Tom has 3 bags with 4 apples each. How many apples does Tom have?"
MINUTE = 60_000
K = 3

pytestmark = [pytest.mark.browser, pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def lab(smollm2: Path) -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="journey-", dir="/tmp") as folder:
        home = Path(folder) / "home"
        verifier = home / "verifiers" / "smollm2-135m-instruct"
        verifier.parent.mkdir(parents=True)
        home.chmod(0o700)
        # The demo's first stage finds its work done; unpacking the wheel is what `smollm2` did.
        shutil.copytree(smollm2, verifier, copy_function=os.link)
        with Lab(home, demo_scale="small") as lab:
            yield lab


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(base_url=lab.address).new_page()
        page.goto(lab.link)
        yield page
        browser.close()


def stage(page: Page, title: str) -> Any:
    return page.locator("#demo .stages li", has_text=title)


def api(page: Page, path: str) -> Any:
    """What REST says, with the browser's own session."""
    answer = page.request.get(path)
    assert answer.ok, answer.text()
    return answer.json()


def chat(page: Page, deployment_id: str, text: str, temperature: float = 0.0) -> None:
    opened(page, f"/playground?deployment={deployment_id}")
    expect(page.locator("#deployment-state")).to_contain_text("ready", timeout=MINUTE)
    page.fill("#message textarea", text)
    page.locator("#field-temperature input[type=number]").fill(str(temperature))
    page.locator("#field-max-tokens input[type=number]").fill("48")
    page.click("#send")
    expect(page.locator("#tokens .tv-title")).to_contain_text("done", timeout=3 * MINUTE)
    expect(page.locator("#tokens .tv-step").first).to_be_visible()


def last_generation(page: Page) -> dict[str, Any]:
    found: list[dict[str, Any]] = api(page, "/api/generations")
    return found[0]


def test_from_the_demo_to_coloured_tokens_of_an_own_speculator(
    lab: Lab, page: Page, tmp_path: Path
) -> None:
    the_demo_starts_and_a_person_chats_meanwhile(page)
    progress_survives_a_reload_in_the_middle_of_training(page)
    converted = a_research_checkpoint_is_converted(page, tmp_path)
    the_demo_ends_with_real_vllm(page)
    tokens_are_coloured_as_the_server_counted(page)
    the_reference_engine_takes_the_same_steps(page)
    stop_ends_the_server(lab, page)
    a_converted_speculator_is_deployed_on_the_reference_engine(page, converted)
    down_leaves_no_process(lab)


def the_demo_starts_and_a_person_chats_meanwhile(page: Page) -> None:
    opened(page, "/")
    page.click("text=Try the demo")
    expect(stage(page, "Unpack the verifier")).to_contain_text("succeeded", timeout=MINUTE)
    expect(stage(page, "Chat meanwhile")).to_contain_text("ready", timeout=3 * MINUTE)
    deployment = api(page, "/api/demo")["deployment_id"]
    chat(page, deployment, "Repeat these words three times: red green blue red green blue")
    expect(page.locator("#tokens .tok.own, #tokens .tok.plain").first).to_be_visible()
    expect(page.locator("#tokens .tok.accepted").first).to_be_visible()


def progress_survives_a_reload_in_the_middle_of_training(page: Page) -> None:
    opened(page, "/")
    training = stage(page, "Train the speculator")
    expect(training).to_contain_text("running", timeout=6 * MINUTE)
    page.goto(training.locator("a").get_attribute("href") or "")
    expect(page.locator("#run-header")).to_contain_text("running", timeout=MINUTE)
    expect(page.locator("#run-header progress")).to_be_visible(timeout=MINUTE)
    page.reload()
    expect(page.locator("#run-header progress")).to_be_visible(timeout=MINUTE)
    expect(page.locator("#run-chart .plot svg").first).to_be_visible(timeout=2 * MINUTE)


def a_research_checkpoint_is_converted(page: Page, folder: Path) -> str:
    verifier = next(v for v in api(page, "/api/verifiers") if v["name"].startswith("smollm2"))
    checkpoint = tiny.build_research(
        Path(verifier["path"]).parent.parent / "someones-head",
        Path(verifier["path"]),
        hidden=576,
        draft_vocab=256,
    )
    opened(page, "/convert")
    page.fill("#field-checkpoint input, #field-checkpoint textarea", "/nowhere/at/all")
    page.click("#inspect")
    expect(page.locator("#convert-answer .notice")).to_be_visible(timeout=MINUTE)
    assert "Traceback" not in page.content()
    page.fill("#field-checkpoint input, #field-checkpoint textarea", str(checkpoint))
    page.fill("#field-aux-layers input, #field-aux-layers textarea", "2,15,27")
    page.click("#inspect")
    expect(page.locator("#convert-answer")).to_contain_text("midlayer.", timeout=MINUTE)
    page.click("#convert")
    page.click("#convert-queued a")
    expect(page.locator("#run-header")).to_contain_text("succeeded", timeout=6 * MINUTE)
    run = api(page, f"/api/runs/{page.url.split('run=')[1]}")
    assert run["result"]["validation"]["first_token_acceptance"] is not None
    if not run["result"]["deployable"]:  # random weights: it accepts nothing
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Allow anyway").click()
        expect(page.locator("#run-result")).to_contain_text("Allowed by", timeout=MINUTE)
    return str(run["result"]["name"])


def the_demo_ends_with_real_vllm(page: Page) -> None:
    opened(page, "/")
    expect(stage(page, "Evaluate it")).to_contain_text("succeeded", timeout=6 * MINUTE)
    expect(page.locator("#demo")).to_contain_text("Acceptance length")
    expect(stage(page, "Serve it with vLLM")).to_contain_text("ready", timeout=6 * MINUTE)


def tokens_are_coloured_as_the_server_counted(page: Page) -> None:
    deployment = api(page, "/api/demo")["deployment_id"]
    served = next(d for d in api(page, "/api/deployments") if d["id"] == deployment)
    assert served["engine"] == "vllm"
    chat(page, deployment, QUESTION)
    counted = metrics(served["endpoint"])
    generation = last_generation(page)
    numbers, server = generation["numbers"], generation["numbers"]["server"]
    assert numbers["drafted"] == server["num_draft_tokens"] > 0
    assert numbers["accepted"] == server["num_accepted_draft_tokens"]
    assert counted["vllm:spec_decode_num_draft_tokens_total"] >= server["num_draft_tokens"]
    assert page.locator("#tokens .tok.accepted").count() == shown(generation, "draft")
    assert page.locator("#tokens del").count() == numbers["drafted"] - numbers["accepted"]
    assert page.locator("#tokens .tok.own").count() == shown(generation, "verifier")
    chat(page, deployment, QUESTION, temperature=0.8)
    sampled = last_generation(page)["numbers"]
    assert sampled["drafted"] == sampled["server"]["num_draft_tokens"] > 0
    assert sampled["tokens"] > 0


def the_reference_engine_takes_the_same_steps(page: Page) -> None:
    served = api(page, "/api/demo")["deployment_id"]
    deployment = next(d for d in api(page, "/api/deployments") if d["id"] == served)
    speculator = named(page, "/api/speculators", deployment["speculator"])
    verifier = named(page, "/api/verifiers", deployment["verifier"])
    reference = Reference(Path(verifier["path"]), Path(speculator["path"]), K)
    endpoint, model = deployment["endpoint"], deployment["served_name"]
    assert assert_same_steps(reference, endpoint, model, QUESTIONS, tokens=24) > 0


def named(page: Page, path: str, wanted: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in api(page, path) if wanted in (r["name"], r["path"]))
    return found


def shown(generation: dict[str, Any], source: str) -> int:
    emitted = [token for step in generation["steps"] for token in step["emitted"]]
    return sum(token["source"] == source for token in emitted)


def metrics(endpoint: str) -> dict[str, float]:
    """The server's own counters."""
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:spec_decode_num_draft")
    }


def stop_ends_the_server(lab: Lab, page: Page) -> None:
    opened(page, "/deploy")
    page.locator("#deployments section", has_text="vllm").locator("button.stop").click()
    expect(page.locator("#deployments button.stop")).to_have_count(0, timeout=MINUTE)
    gone = time.monotonic() + 30
    while left := [p for p in lab.processes() if "vllm" in p.lower()]:
        assert time.monotonic() < gone, left
        time.sleep(1)


def a_converted_speculator_is_deployed_on_the_reference_engine(page: Page, name: str) -> None:
    opened(page, "/deploy")
    pick(page, "#field-speculator", name)
    pick(page, "#field-verifier", "smollm2-135m-instruct")
    pick(page, "#field-engine", "reference")
    page.click("#deploy")
    expect(page.locator("#deploy-answer a")).to_be_visible(timeout=MINUTE)
    ready = page.locator("#deployments section", has=page.locator(".chip.ready"))
    expect(ready).to_be_visible(timeout=3 * MINUTE)
    expect(ready).to_contain_text("curl ")
    deployment = next(d["id"] for d in api(page, "/api/deployments") if d["phase"] == "ready")
    chat(page, deployment, QUESTION)
    numbers = last_generation(page)["numbers"]
    assert numbers["drafted"] == numbers["server"]["num_draft_tokens"] > 0


def pick(page: Page, field: str, value: str) -> None:
    page.click(f"{field} input")
    page.locator(f"{field} input").fill(value)
    page.get_by_role("option", name=value, exact=True).first.click()


def down_leaves_no_process(lab: Lab) -> None:
    assert lab.processes()
    answer = lab.command("down", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)
    assert lab.processes() == []
