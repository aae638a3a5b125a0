"""Pictures of every page, light and dark, at 1280 and 400 pixels: `make screenshots`.

    python -m tests.e2e.screenshots [FOLDER] [ADDRESS LINK]

Default folder: out/screenshots. Without the address of a lab that runs, and a one-time link into
it, they show a seeded one (`tests.e2e.stage`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.conftest import ROOT
from tests.e2e.browser import CHROMIUM, FLAGS, Stage, opened

WIDTHS = (1280, 400)
THEMES = ("light", "dark")


def ask(page: Page) -> None:
    """The playground with an answer, compared with plain decoding, at one step."""
    page.fill("#message textarea", "A shop sells pens at 3 dollars each. How much do 7 pens cost?")
    page.click("#compare label")
    page.click("#send")
    page.wait_for_selector("#verdict .notice", timeout=60_000)
    page.locator("#tokens .tv-step").nth(5).click()


def nothing(page: Page) -> None:
    """The page as it opens."""


def first_run(page: Page) -> None:
    """The run that is training."""
    theme = "dark" if "theme=dark" in page.url else "light"
    run = page.locator("#runs a", has_text="train").first.get_attribute("href")
    page.goto(f"{run}&__theme={theme}")
    page.wait_for_selector("#run-chart .plot svg", timeout=30_000)


def filled(selector: str) -> Callable[[Page], None]:
    """Until this is there."""

    def wait(page: Page) -> None:
        page.wait_for_selector(selector, timeout=30_000)

    return wait


def train(page: Page) -> None:
    """The Train page on prepared data, a group of fields and the YAML unfolded."""
    page.wait_for_selector("#train-estimate .card", timeout=30_000)
    page.get_by_role("button", name="Draft: layers").click()
    page.locator("#train-command summary").click()


def inspect(page: Page) -> None:
    """The Convert page with someone's draft inspected, doubts open."""
    home = page.locator("#conversions code").first.get_attribute("title") or ""
    page.locator("#field-checkpoint input").fill(home)
    page.keyboard.press("Enter")
    page.click("#inspect")
    page.wait_for_selector("#convert-answer fieldset", timeout=60_000)


def run_of(kind: str, name: str, selector: str) -> tuple[str, Callable[[Page], None]]:
    """The page of the newest run of this name."""

    def go(page: Page) -> None:
        theme = "dark" if "theme=dark" in page.url else "light"
        link = page.locator("#runs a", has_text=name).first.get_attribute("href")
        page.goto(f"{link}&__theme={theme}")
        page.wait_for_selector(selector, timeout=30_000)

    return f"/runs?kind={kind}", go


SHOTS: dict[str, tuple[str, Callable[[Page], None]]] = {
    "home": ("/", nothing),
    "playground": ("/playground", ask),
    "runs": ("/runs", nothing),
    "run": ("/runs?kind=train", first_run),
    "data": ("/data?form=prepare&data=gsm8k", filled("#prepare-needs .card")),
    "data-set": ("/data?set=shop-talk&sample=16", filled("#sample .trained")),
    "run-trained": run_of("train", "train smollm2-maths", "#run-result .facts"),
    "run-push": run_of("push", "push", "#run-result .facts"),
    "run-export": run_of("export", "export", "#run-result .command"),
    "convert": ("/convert", inspect),
    "conversion": run_of("convert", "someones-head", "#run-result .card-text"),
    "train": ("/train?data=shop-talk", train),
    "deploy": ("/deploy", nothing),
    "models": ("/models?form=launch&speculator=smollm2-maths", filled("#launch-lines code")),
    "models-push": ("/models?form=push&speculator=smollm2-maths", nothing),
}


def shoot(address: str, link: str, folder: Path, names: list[str]) -> None:
    """Write `NAME-THEME-WIDTH.png` for each page into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(base_url=address)
        page = context.new_page()
        page.goto(link)
        for name in names:
            path, prepare = SHOTS[name]
            for theme in THEMES:
                for width in WIDTHS:
                    page.set_viewport_size({"width": width, "height": 900})
                    joint = "&" if "?" in path else "?"
                    opened(page, f"{path}{joint}__theme={theme}")
                    prepare(page)
                    page.wait_for_timeout(900)
                    page.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=True)
        browser.close()


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out" / "screenshots"
    if len(sys.argv) > 3:
        shoot(sys.argv[2], sys.argv[3], folder, list(SHOTS))
        return
    with tempfile.TemporaryDirectory(prefix="speclab-", dir="/tmp") as home, Stage(home) as stage:
        shoot(stage.address, stage.link, folder, list(SHOTS))


if __name__ == "__main__":
    main()
