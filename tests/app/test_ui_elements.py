"""Element trees and what pages share: only data, only allowed names, the same words everywhere."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest

from app.ui.components import elements, state
from app.ui.components.elements import el, text_of
from app.ui.components.live import encode, script
from app.ui.components.panel import Panel, notice, payload

HOSTILE = "${Object.assign(window,{__xss:7})}<img src=x onerror=alert(1)>`"


def test_text_stays_text_whatever_it_contains():
    tree = el("p", HOSTILE, title=HOSTILE)
    assert tree == ["p", {"title": HOSTILE}, [HOSTILE]]
    assert json.loads(encode(tree)) == tree


@pytest.mark.parametrize("tag", ["script", "img", "iframe", "style", "svg", "form"])
def test_an_element_that_could_run_or_fetch_is_refused(tag: str):
    with pytest.raises(ValueError, match=f"<{tag}>"):
        el(tag)


@pytest.mark.parametrize("name", ["onclick", "style", "src", "srcdoc", "formaction"])
def test_an_attribute_that_could_run_or_fetch_is_refused(name: str):
    with pytest.raises(ValueError, match=name):
        el("p", **{name: "x"})


@pytest.mark.parametrize("href", ["javascript:alert(1)", "//evil.example", "data:text/html,x"])
def test_a_link_to_code_or_to_another_scheme_loses_its_address(href: str):
    assert el("a", "x", href=href) == ["a", {}, ["x"]]


def test_children_may_be_nested_lists_and_nothing():
    tree = el("ul", None, [el("li", "a"), (el("li", part) for part in "bc")])
    assert text_of(tree) == "a b c"


def test_the_browser_allows_the_same_tags_and_attributes():
    source = script("panel.js")
    tags, attributes = re.findall(r'new Set\(\(?("[^;]*?")\)?\.split', source)
    assert set(_words(tags)) == elements.TAGS
    assert set(_words(attributes)) == elements.ATTRIBUTES


def test_no_script_of_ours_parses_html():
    for name in ("panel.js", "token_view.js", "log_view.js", "chart.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|Function\(", script(name)
        )


def test_a_component_interpolates_nothing_into_its_template():
    panel = Panel(el("p", HOSTILE))
    assert panel.html_template == '<div class="sl-panel"></div>'
    assert panel.css_template == ""
    assert json.loads(panel.value)["tree"][2][0][2] == [HOSTILE]


def test_a_payload_carries_the_servers_clock():
    assert abs(payload(el("p"))["now"] - datetime.now(UTC).timestamp()) < 5


def test_an_error_is_announced_and_other_notices_wait_their_turn():
    assert notice("error", "no")[1]["role"] == "alert"
    assert notice("info", "yes")[1]["role"] == "status"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (250, "4 min 10 s"),
        (7500, "2 h 5 min"),
        (262_800, "3 d 1 h"),
    ],
)
def test_durations_read_in_two_units(seconds: float | None, text: str):
    assert state.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (2, "about 5 s left"), (840, "about 14 min left"), (9000, "about 2.5 h left")],
)
def test_what_is_left_is_rounded_to_what_it_is_worth(seconds: float | None, text: str):
    assert state.eta(seconds) == text


def test_progress_is_cut_to_its_range_and_unknown_progress_has_no_value():
    bar = state.progress(1.7, "step 3")[2][0]
    assert bar[1]["value"] == "1.0000"
    assert "value" not in state.progress(None, "")[2][0][1]


def test_an_age_is_left_to_the_browser_to_count():
    moment = datetime.now(UTC) - timedelta(minutes=3)
    tag, attributes, children = state.ago(moment)
    assert (tag, children) == ("time", [])
    assert float(attributes["data-since"]) == moment.timestamp()


def test_a_table_names_the_column_in_each_cell_for_narrow_screens():
    table = state.table(["Name", "#Count"], [("a", "1")], label="T")
    cells = table[2][0][2][1][2][0][2]
    assert [cell[1]["data-label"] for cell in cells] == ["Name", "Count"]
    assert [cell[1].get("class") for cell in cells] == [None, "number"]


def _words(quoted: str) -> list[str]:
    return " ".join(re.findall(r'"([^"]*)"', quoted)).split()
