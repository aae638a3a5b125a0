"""The Convert page over a real lab: inspect, answer a doubt, convert, read, decide, deploy.

A tiny verifier and a tiny draft of the research layout; real worker, real jobs, the reference
engine.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests import tiny
from tests.e2e.browser import opened
from tests.e2e.stage import HOSTILE
from tests.e2e.up import Lab

MINUTE = 60_000
NAME = "someones-head"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with tempfile.TemporaryDirectory(prefix="convert-", dir="/tmp") as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        verifier = tiny.build_verifier(home / "verifiers" / "tiny")
        tiny.build_research(home / "heads" / NAME, verifier, safetensors=True)
        with Lab(home) as lab:
            yield lab


@pytest.fixture(scope="module")
def visitor(lab: Lab, chromium: Browser) -> Iterator[BrowserContext]:
    context = chromium.new_context(base_url=lab.address, accept_downloads=True)
    context.new_page().goto(lab.link)
    yield context
    context.close()


@pytest.fixture
def page(visitor: BrowserContext) -> Iterator[Page]:
    page = visitor.new_page()
    yield page
    assert page.evaluate("typeof window.__xss") == "undefined"
    page.close()


def test_a_checkpoint_is_inspected_converted_read_and_deployed(lab: Lab, page: Page) -> None:
    checkpoint, verifier = lab.home / "heads" / NAME, lab.home / "verifiers" / "tiny"
    (checkpoint / "config.json").write_text(hostile(checkpoint / "config.json"))
    opened(page, "/convert")
    fill(page, "#field-checkpoint", str(checkpoint))
    fill(page, "#field-verifier", str(verifier))
    page.click("#inspect")
    the_table_says_what_every_tensor_becomes(page)
    a_choice_fills_the_form_and_the_command_line(page)
    page.click("#convert")
    queued(page, "#convert-queued")
    the_run_shows_result_card_and_report(page)
    a_person_allows_what_failed_a_check(page)
    page.locator("#run-result").get_by_role("link", name="Deploy").click()
    it_is_deployed(page)


def hostile(config: Path) -> str:
    values = json.loads(config.read_text())
    return json.dumps({**values, "_name_or_path": HOSTILE[1], "comment": HOSTILE[0]})


def the_table_says_what_every_tensor_becomes(page: Page) -> None:
    answer = page.locator("#convert-answer")
    expect(answer).to_contain_text("Layout: eagle3-research")
    row = answer.locator("tr", has_text="midlayer.self_attn.q_proj.weight")
    expect(row).to_contain_text("layers.0.self_attn.q_proj.weight")
    expect(row).to_contain_text("float16")
    expect(answer.locator("tr", has_text="embed_tokens.weight")).to_contain_text("verifier")


def a_choice_fills_the_form_and_the_command_line(page: Page) -> None:
    doubt = page.locator("#convert-answer fieldset", has_text="Which verifier states")
    expect(doubt.locator("input:checked")).to_have_count(1)
    expect(doubt.locator("label", has=page.locator(":checked"))).to_contain_text("Leave it open")
    doubt.locator("label").first.click()
    expect(doubt).to_contain_text("settled")
    expect(page.locator("#convert-command")).to_contain_text("--aux-layers 2,4,5")
    expect(page.locator("#convert-answer")).to_contain_text("parameter")


def the_run_shows_result_card_and_report(page: Page) -> None:
    expect(page.locator("#run-header")).to_contain_text("succeeded", timeout=2 * MINUTE)
    result = page.locator("#run-result")
    expect(result).to_contain_text("First tokens accepted")
    expect(result.get_by_label("Model card")).to_contain_text("Before it is served")
    report = result.get_by_label("Report", exact=True)
    report.locator("summary").click()
    expect(report).to_contain_text("midlayer.self_attn.q_proj.weight")
    with page.expect_download() as download:
        report.get_by_role("link", name="Download").click()
    written = json.loads(Path(download.value.path()).read_text())
    assert written["layout"] == "eagle3-research"


def a_person_allows_what_failed_a_check(page: Page) -> None:
    """The draft is random: it accepts nothing, and that bars it until someone decides."""
    result = page.locator("#run-result")
    expect(result).to_contain_text("first-token acceptance is exactly 0")
    expect(result.get_by_role("link", name="Deploy")).to_have_count(0)
    page.on("dialog", lambda dialog: dialog.accept())
    result.get_by_role("button", name="Allow anyway").click()
    expect(result).to_contain_text("Allowed by")
    [made] = page.request.get("/api/speculators").json()
    assert (made["deployable"], made["allowed_by"]) == (False, "local")
    assert made["allowed_despite"] == made["failed"]


def it_is_deployed(page: Page) -> None:
    expect(page.locator("#field-speculator input")).to_have_value(NAME)
    pick(page, "#field-engine", "reference")
    page.click("#deploy")
    expect(page.locator("#deploy-answer")).to_contain_text("Queued")
    ready = page.locator("#deployments section", has=page.locator(".chip.ready"))
    expect(ready).to_contain_text(NAME, timeout=2 * MINUTE)
    ready.locator("button.stop").click()
    expect(page.locator("#deployments button.stop")).to_have_count(0, timeout=MINUTE)


def test_what_was_left_open_is_chosen_afterwards(lab: Lab, page: Page) -> None:
    params = {
        "checkpoint": str(lab.home / "heads" / NAME),
        "verifier": str(lab.home / "verifiers" / "tiny"),
        "validate_on_verifier": False,
    }
    ours = {"origin": lab.address}
    body = {"kind": "convert", "params": params, "name": "open"}
    run = page.request.post("/api/runs", data=body, headers=ours).json()
    opened(page, f"/runs?run={run['id']}")
    result = page.locator("#run-result")
    expect(result).to_contain_text("It can't be deployed yet", timeout=2 * MINUTE)
    expect(result.get_by_role("button", name="Allow anyway")).to_have_count(0)
    assert page.request.post("/api/speculators/open/allow", headers=ours).status == 409
    rows = result.get_by_label("Left open").locator("tbody tr")
    rows.first.get_by_role("button", name="Convert again with this choice").click()
    queued(page, "#run-answer")
    expect(page.locator("#run-rest")).to_contain_text("2, 4, 5")
    page.get_by_role("button", name="Cancel").click()


def test_a_long_table_starts_with_its_first_rows_and_can_be_searched(lab: Lab, page: Page) -> None:
    verifier = lab.home / "verifiers" / "tiny"
    tiny.build_speculator(
        lab.home / "heads" / "deep", verifier, config=tiny.draft_config("org/tiny", layers=30)
    )
    opened(page, "/convert")
    fill(page, "#field-checkpoint", str(lab.home / "heads" / "deep"))
    page.click("#inspect")
    table = page.locator("#convert-answer .long").first
    shown = table.locator("tbody tr:visible")
    expect(table.locator(".count")).to_have_text(re.compile(r"^the first 20 shown, \d+ in all$"))
    expect(shown).to_have_count(20)
    table.locator("input").fill("layers.29.")
    expect(table.locator(".count")).to_have_text(re.compile(r"^9 of \d+ match$"))
    assert all("layers.29." in text for text in shown.all_inner_texts())
    table.locator("input").fill("")
    table.get_by_role("button", name="Show all").click()
    assert shown.count() > 200


def queued(page: Page, panel: str) -> None:
    """Wait for the word that it is queued, and follow its link."""
    expect(page.locator(panel)).to_contain_text("Queued:")
    page.locator(f"{panel} a").first.click()


def fill(page: Page, field: str, value: str) -> None:
    page.fill(f"{field} input", value)
    page.keyboard.press("Enter")


def pick(page: Page, field: str, value: str) -> None:
    page.click(f"{field} input")
    page.locator(f"{field} input").fill(value)
    page.get_by_role("option", name=value, exact=True).first.click()
