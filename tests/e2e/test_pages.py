"""The pages in a real Chromium over a seeded store: what they show, and what can't break them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from app.ui.page import POLL_SECONDS
from tests.e2e.browser import Stage, opened
from tests.e2e.stage import HOSTILE, decoded, numbers, story_of

pytestmark = pytest.mark.browser
MAIN = {
    "/": "Demo: a speculator",
    "/playground": "Deployment",
    "/runs": "prepare",
    "/data": "shop-talk",
    "/convert": "Inspect",
    "/train": "Preset",
    "/deploy": "Endpoint",
    "/models": "smollm2-maths",
}


@pytest.mark.parametrize("path", MAIN)
def test_every_page_renders_its_own_content_and_marks_itself(page: Page, path: str):
    opened(page, path)
    expect(page.locator("body")).to_contain_text(MAIN[path])
    expect(page.locator("#nav a[aria-current]")).to_have_count(1)


def test_home_lists_the_stages_of_the_demo_with_progress_and_links(page: Page):
    opened(page, "/")
    stages = page.locator("#demo .stages li")
    expect(stages).to_have_count(7)
    training = stages.filter(has_text="Train the speculator")
    expect(training).to_contain_text("42%")
    expect(training).to_contain_text("about 14 min left")
    expect(page.get_by_role("link", name="Open the playground")).to_have_attribute(
        "href", re.compile(r"^/playground\?deployment=")
    )


def test_a_reload_and_a_second_browser_show_the_same_progress(
    page: Page, chromium: Browser, stage: Stage, visitor: BrowserContext
):
    address = _run_address(page, "train")
    opened(page, address)
    _expect_training(page)
    page.reload()
    _expect_training(page)
    other = chromium.new_context(base_url=stage.address, storage_state=visitor.storage_state())
    second = other.new_page()
    opened(second, address)
    _expect_training(second)
    other.close()


def test_charts_draw_all_points_and_the_log_ends_at_its_end(page: Page):
    opened(page, _run_address(page, "train"))
    expect(page.locator("#run-chart .plot svg.main-svg").first).to_be_visible()
    points = page.evaluate("document.querySelectorAll('#run-chart .plot')[0].data[0].x.length")
    assert points == 60
    log = page.locator("#run-log pre")
    expect(log).to_contain_text("step 600 loss")
    assert log.evaluate("pane => pane.scrollHeight - pane.scrollTop - pane.clientHeight") < 40


def test_the_whole_log_can_be_downloaded(page: Page):
    opened(page, _run_address(page, "convert", "failed"))
    with page.expect_download() as download:
        page.locator("#run-log a", has_text="Download").click()
    text = Path(download.value.path()).read_text()
    assert text.splitlines() == ["convert starts", *HOSTILE]


def test_hostile_names_errors_and_log_lines_are_only_text(page: Page):
    opened(page, _run_address(page, "convert", "failed"))
    expect(page.locator("#run-header h1")).to_have_text(HOSTILE[0])
    error = page.locator("#run-header .notice.error")
    for text in HOSTILE[:3]:
        expect(error).to_contain_text(text)
    for text in HOSTILE:
        expect(page.locator("#run-log pre")).to_contain_text(text)
    assert page.locator("#run-header img, #run-log img, #run-log script").count() == 0
    opened(page, "/models")
    expect(page.locator("#models")).to_contain_text(HOSTILE[0])
    expect(page.locator("#models")).to_contain_text(HOSTILE[1])


def test_filters_and_pages_of_runs_are_kept_in_the_address(page: Page):
    opened(page, "/runs?kind=prepare")
    rows = page.locator("#runs tbody tr")
    expect(rows).to_have_count(25)
    page.get_by_role("button", name="Older").click()
    expect(page.locator("#runs")).to_contain_text("26–")
    assert "kind=prepare" in page.url and "offset=25" in page.url
    page.reload()
    expect(page.locator("#runs")).to_contain_text("26–")


def test_an_unknown_run_is_a_sentence(page: Page):
    opened(page, "/runs?run=nothing-here")
    expect(page.locator("#run-header")).to_contain_text("there is no run 'nothing-here'")


def test_cancel_is_there_while_there_is_something_to_stop_and_retry_after(page: Page):
    opened(page, "/runs?state=queued&kind=prepare")
    page.goto(page.locator("#runs tbody a").first.get_attribute("href") or "")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#run-header .chip")).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_an_answer_shows_each_token_by_its_origin_and_the_numbers_of_its_steps(page: Page):
    _ask(page, "How much do 7 pens cost?")
    expected = list(decoded(story_of(""), speculative=True))
    told = numbers(expected)
    view = page.locator("#tokens")
    expect(view.locator(".tv-step")).to_have_count(len(expected))
    expect(view.locator(".tok.accepted")).to_have_count(told["accepted"])
    unused = view.locator(".tok.rejected, .tok.unverified")
    expect(unused).to_have_count(told["drafted"] - told["accepted"])
    expect(view.locator(".tok.own")).to_have_count(len(expected))
    expect(view.locator(".tv-summary")).to_have_text(
        f"Accepted {told['accepted']} of {told['drafted']} draft tokens."
    )
    answer = view.locator(".tv-flow").evaluate(
        "flow => [...flow.querySelectorAll('span.tok')].map(t => t.textContent).join('')"
    )
    assert answer == "".join(story_of(""))


def test_arrow_keys_walk_the_steps_and_tell_what_was_drafted(page: Page):
    _ask(page, "How much do 7 pens cost?")
    detail = page.locator("#tokens .tv-detail")
    page.locator("#tokens .tv-flow").focus()
    page.keyboard.press("Home")
    expect(detail).to_contain_text("Step 1 of")
    expect(detail).to_contain_text("accepted (draft 71 %, verifier 64 %)")
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("Step 2 of")
    expect(detail).to_contain_text("rejected")
    expect(page.locator("#tokens .tv-step.chosen")).to_be_focused()


def test_hostile_tokens_are_only_text(page: Page):
    _ask(page, "hostile, please")
    flow = page.locator("#tokens .tv-flow")
    for text in HOSTILE:
        expect(flow).to_contain_text(text)
    assert flow.locator("img, script").count() == 0


def test_comparing_with_plain_says_whether_the_texts_are_identical(page: Page):
    _ask(page, "How much do 7 pens cost?", compare=True)
    expect(page.locator("#verdict")).to_contain_text("Both texts are identical")
    expect(page.locator("#tokens-plain .tv-step").first).to_be_visible()
    expect(page.locator("#tokens-plain .tok.accepted")).to_have_count(0)


def test_stop_ends_the_answer_and_gives_send_back(page: Page):
    _ask(page, "an endless answer, please", wait=False)
    expect(page.locator("#tokens .tv-step").nth(3)).to_be_attached()
    page.locator("#stop").click()
    expect(page.locator("#tokens .chip")).to_have_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    count = page.locator("#tokens .tv-step").count()
    page.wait_for_timeout(600)
    assert page.locator("#tokens .tv-step").count() == count


def test_a_long_answer_arrives_whole(page: Page):
    _ask(page, "a long answer, please")
    steps = list(decoded(story_of("long"), speculative=True))
    expect(page.locator("#tokens .tv-step")).to_have_count(len(steps))
    assert len(story_of("long")) > 3000


def test_a_message_sent_before_the_deployments_are_listed_is_answered(page: Page):
    page.goto("/playground")
    page.locator("#message textarea").fill("How much?")
    page.locator("#send").click()
    expect(page.locator("#tokens .chip")).to_have_text("done")


def test_an_empty_message_is_refused_in_words(page: Page):
    opened(page, "/playground")
    expect(page.locator("#deployment input")).not_to_have_value("")
    expect(page.locator("#tokens input[type=range]")).to_be_hidden()
    page.locator("#send").click()
    expect(page.locator("#verdict")).to_contain_text("the message is empty")
    expect(page.locator("#send")).to_be_visible()


@pytest.mark.parametrize(
    ("address", "button", "field", "entered", "sentence"),
    [
        ("/convert", "inspect", "field-aux-layers", "2,x", "Must be a whole number, found 'x'."),
        ("/convert", "convert", "field-checkpoint", "", "This is needed."),
        ("/train", "train", "field-lr", "fast", "Must be a number, found 'fast'."),
        ("/deploy", "deploy", "field-port", "0", "Must be at least 1, found '0'."),
        ("/data?form=prepare", "prepare", "prepare-verifier", "nope", "is no registered name"),
        ("/data?form=self-write", "self-write", "self-write-samples", "0", "Must be at least 1"),
        ("/data?form=regenerate", "regenerate", "regenerate-endpoint", "there", "Must be: "),
        ("/data?form=add", "add", "add-path", "/nowhere", "is not in a directory that pages"),
        ("/models?form=pull", "pull", "pull-repository", "a/b/c", "Is no repository of the hub"),
        ("/models?form=bring", "bring", "bring-source", "~/nowhere", "There is no '~/nowhere'."),
        ("/models?form=evaluate", "evaluate", "evaluate-engine", "banana", "Must be: reference"),
        ("/models?form=export", "export", "export-speculator", "nope", "is no registered name"),
    ],
)
def test_a_wrong_field_is_told_beside_the_button_and_beside_itself(
    page: Page, address: str, button: str, field: str, entered: str, sentence: str
):
    opened(page, address)
    page.wait_for_timeout(1000 * POLL_SECONDS)  # what fills the form when the page opens is there
    _enter(page, field, entered)
    page.locator(f"#{button}").click()
    answer = page.locator(".notice.error").filter(has_text="Correct th")
    mark = page.locator(f"#{field} .sl-wrong")
    expect(answer).to_contain_text(sentence)
    expect(mark).to_contain_text(sentence)
    page.wait_for_timeout(1000 * POLL_SECONDS)  # the page has been kept current meanwhile
    expect(mark).to_contain_text(sentence, timeout=1000)
    _enter(page, field, "something else")
    expect(mark).to_have_count(0)


def test_after_an_answer_a_wrong_field_takes_its_place(page: Page):
    opened(page, "/models?form=evaluate&speculator=smollm2-maths")
    expect(page.locator("#evaluate-data input")).not_to_have_value("")
    page.locator("#evaluate").click()
    answer = page.locator("#evaluate-answer")
    expect(answer).to_contain_text("Queued:")
    _enter(page, "evaluate-samples", "none")
    page.locator("#evaluate").click()
    expect(answer).to_contain_text("Samples: Must be a whole number, found 'none'.")
    expect(answer).not_to_contain_text("Queued:")
    _enter(page, "evaluate-samples", "3")
    page.locator("#evaluate").click()
    expect(answer).to_contain_text("Queued:")
    expect(page.locator(".sl-wrong")).to_have_count(0)


def test_the_way_to_a_wrong_field_opens_the_fold_it_lies_in(page: Page):
    opened(page, "/deploy?max_model_len=many")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    page.locator("#deploy").click()
    expect(page.locator("#field-max-model-len")).to_have_count(0)
    page.locator("#deploy-answer").get_by_role("button", name="Longest context").click()
    field = page.locator("#field-max-model-len")
    expect(field.locator("input, textarea")).to_be_focused()
    expect(field).to_contain_text("Must be a whole number, found 'many'.")


def test_data_registered_since_the_app_started_can_be_trained_on(page: Page, stage: Stage):
    file = Path(stage.home, "mine", "late.jsonl")
    file.parent.mkdir()
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    opened(page, "/data?form=add")
    _enter(page, "add-path", str(file))
    page.locator("#add").click()
    expect(page.locator("#add-answer")).to_contain_text("are kept as")
    opened(page, "/train?data=late")
    expect(page.locator("#data-set input")).to_have_value("late")
    page.locator("#train").click()
    expect(page.locator("#train-answer")).to_contain_text("Queued:")


def test_a_path_that_is_not_there_is_a_sentence(page: Page):
    opened(page, "/convert")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    page.locator("#field-checkpoint input").fill("~/no-such-${checkpoint}")
    page.keyboard.press("Enter")
    page.locator("#inspect").click()
    answer = page.locator("#convert-answer .notice.error")
    expect(answer).to_contain_text("no-such-${checkpoint}")
    expect(answer).not_to_contain_text("Traceback")


def test_a_double_click_on_deploy_makes_one_deployment(page: Page):
    opened(page, "/deploy")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    cards = page.locator("#deployments .card")
    expect(cards).not_to_have_count(0)
    before = cards.count()
    page.locator("#deploy").dblclick()
    expect(page.locator("#deploy-answer")).to_contain_text("Queued")
    expect(cards).to_have_count(before + 1)
    expect(page.locator("#deploy-command")).to_contain_text("speclab submit deploy")


def test_an_uploaded_file_becomes_a_chain_of_runs_and_a_bad_one_a_sentence(
    page: Page, tmp_path: Path
):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    bad.write_text('{"nothing": "of a chat"}\n')
    opened(page, "/train")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    page.get_by_label("Upload a file").check()
    for file, words in ((bad, "no known layout"), (good, "Queued:")):
        page.locator("#upload input[type=file]").set_input_files(file)
        name = re.compile(rf"{file.stem}\s*\{file.suffix}")  # Gradio may draw them apart
        expect(page.locator("#upload")).to_contain_text(name)
        page.locator("#train").click()
        expect(page.locator("#train-answer")).to_contain_text(words)
        page.locator("#upload").get_by_role("button", name="Clear").click()
        expect(page.locator("#upload input[type=file]")).to_be_attached()
    links = page.locator("#train-answer .notice a")
    expect(links).to_have_count(2)


def test_a_sample_is_looked_at_token_by_token_and_stays_in_the_address(page: Page):
    opened(page, "/data")
    page.locator("#data-sets a", has_text="shop-talk").click()
    sample = page.locator("#sample")
    expect(sample.locator("h2")).to_have_text("Sample 1 of 384")
    trained = sample.locator("[aria-label=trained] .st")
    expect(trained).to_have_count(len(story_of("")) + 1)  # the answer, and what ends its turn
    line = trained.first.evaluate("token => getComputedStyle(token).textDecorationLine")
    assert line == "underline"  # not colour alone
    for text in HOSTILE:
        expect(sample).to_contain_text(text)
    assert sample.locator("img, script").count() == 0
    sample.get_by_role("button", name="Next").click()
    expect(sample.locator("h2")).to_have_text("Sample 2 of 384")
    page.locator("#only-validation input").check()
    expect(sample.locator("h2")).to_have_text("Validation sample 1 of 24 (sample 16 of 384)")
    page.locator("#sample-number input").fill("40")
    page.keyboard.press("Enter")
    expect(sample.locator("h2")).to_have_text("Validation sample 3 of 24 (sample 48 of 384)")
    page.wait_for_url(re.compile("set=shop-talk.*sample=40.*only=validation"))
    page.reload()
    expect(sample.locator("h2")).to_have_text("Validation sample 3 of 24 (sample 48 of 384)")


def test_a_sample_number_beyond_any_shows_the_last(page: Page):
    opened(page, "/data?set=shop-talk&sample=99999999999999999999")
    expect(page.locator("#data-set-facts")).to_contain_text("30,720")
    expect(page.locator("#sample h2")).to_have_text("Sample 384 of 384")


@pytest.mark.parametrize(("name", "share"), [("all-trained", "100 %"), ("none-trained", "0 %")])
def test_a_degenerate_mask_is_flagged_on_the_data_page(page: Page, name: str, share: str):
    """B3"""
    opened(page, f"/data?set={name}")
    flag = page.locator("#data-set-facts .notice")
    expect(flag).to_contain_text(f"{share} of the tokens are trained")
    expect(page.locator("#sample .notice")).to_contain_text(f"({share})")


def test_a_training_above_the_free_space_is_refused_before_anything_starts(page: Page):
    """B12"""
    opened(page, "/train")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    estimate = page.locator("#train-estimate")
    expect(estimate).to_contain_text("x 4 states x 576 x 4 bytes")
    expect(estimate.locator(".notice")).to_have_count(0)
    page.locator("#write-samples textarea, #write-samples input").fill("900000000")
    page.keyboard.press("Tab")
    expect(estimate.locator(".notice.error")).to_contain_text("TB, and")
    page.locator("#train").click()
    expect(page.locator("#train-answer .notice.error")).to_contain_text("hidden states need")
    opened(page, "/runs?kind=self_write&state=queued")
    expect(page.locator("#runs")).to_contain_text("No run is here")


def test_the_train_page_as_it_opens_becomes_three_runs(page: Page):
    opened(page, "/train")
    expect(page.locator("#field-verifier input")).to_have_value("smollm2-135m-instruct")
    page.locator("#train").click()
    expect(page.locator("#train-answer")).to_contain_text("Queued:")
    expect(page.locator("#train-answer .notice a")).to_have_count(3)


def test_a_preset_fills_the_fields_and_says_what_to_expect(page: Page):
    """C10"""
    opened(page, "/train")
    lr = page.locator("#field-lr textarea, #field-lr input")
    expect(lr).to_have_value("0.002")
    page.get_by_label("Quick look").check()
    expect(lr).to_have_value("0.0003")
    expect(page.locator("#write-samples textarea, #write-samples input")).to_have_value("5000")
    expect(page.locator("#expectation")).to_contain_text("about 0.40 of first tokens")
    expect(page.locator("#train-command")).to_contain_text("--lr 0.0003")
    page.locator("#train-command summary").click()
    expect(page.locator("#train-command pre")).to_contain_text("lr: 0.0003  # peak learning rate")


def test_a_push_is_a_form_of_the_speculators_row_that_queues_a_run(page: Page):
    opened(page, "/models")
    row = page.locator("#models tr", has_text="smollm2-maths").first
    row.get_by_role("link", name="Push").click()
    expect(page.locator("#push-speculator input")).to_have_value("smollm2-maths")
    page.locator("#push").click()
    repository = page.locator("#push-repository")
    expect(repository).to_contain_text("This is needed.")
    repository.locator("textarea, input").fill("ada/maths")
    page.keyboard.press("Tab")
    expect(page.locator("#push-command")).to_contain_text("--repository ada/maths")
    page.locator("#push").click()
    expect(page.locator("#push-answer")).to_contain_text("Queued:")
    expect(repository).not_to_contain_text("This is needed.")


def test_launch_commands_follow_the_image_and_the_port(page: Page):
    opened(page, "/models?form=launch&speculator=smollm2-maths")
    lines = page.locator("#launch-lines")
    expect(lines).to_contain_text("podman run")
    page.locator("#launch-image textarea, #launch-image input").fill("example.org/vllm:1")
    page.keyboard.press("Tab")
    expect(lines).to_contain_text("example.org/vllm:1 serve")
    expect(lines.get_by_role("button", name="Copy")).to_have_count(2)


def test_a_training_that_failed_is_resumed_and_one_that_ended_is_trained_further(page: Page):
    opened(page, "/runs?search=smollm2-maths&kind=train")
    page.goto(page.locator("#runs tbody a").first.get_attribute("href") or "")
    result = page.locator("#run-result")
    expect(result).to_contain_text("Ended early at step 700")
    expect(result).to_contain_text("Frozen: 1 tensor")
    result.get_by_role("link", name="Train further").click()
    expect(page.locator("#field-start-from input")).to_have_value("smollm2-maths")
    command = page.locator("#train-command")
    expect(command).to_contain_text("--start-from smollm2-maths --patience 3 --data shop-talk")
    opened(page, "/runs?search=no-space")
    page.goto(page.locator("#runs tbody a").first.get_attribute("href") or "")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#run-header .chip")).to_have_text("queued")


def _enter(page: Page, field: str, text: str) -> None:
    page.locator(f"#{field} textarea, #{field} input").first.fill(text)
    page.keyboard.press("Enter" if page.locator(f"#{field} [role=combobox]").count() else "Tab")


def _run_address(page: Page, kind: str, state: str = "") -> str:
    opened(page, f"/runs?kind={kind}&state={state or 'all'}")
    return page.locator("#runs tbody a").first.get_attribute("href") or ""


def _expect_training(page: Page) -> None:
    header = page.locator("#run-header")
    expect(header.locator(".chip")).to_have_text("running")
    expect(header).to_contain_text("42%")
    expect(header).to_contain_text("about 14 min left")
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()


def _ask(page: Page, question: str, *, compare: bool = False, wait: bool = True) -> None:
    opened(page, "/playground")
    expect(page.locator("#deployment input")).not_to_have_value("")
    page.locator("#message textarea").fill(question)
    if compare:
        page.locator("#compare input").check()
    page.locator("#send").click()
    if wait:
        expect(page.locator("#tokens .chip")).to_have_text("done")
