"""Counters from Prometheus text: names with and without `_total`, restarts, several engines."""

from __future__ import annotations

import pytest

from workers.metrics import Counters, parse

TEXT = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 43.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7960744471285372e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 129.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 3.0
vllm:generation_tokens_total{engine="0",model_name="a"} 60.0
vllm:num_requests_running{engine="0",model_name="a"} 2.0
"""


@pytest.mark.parametrize("text", [TEXT, TEXT.replace("_total{", "{")], ids=["_total", "bare"])
def test_counters_are_read_with_and_without_the_suffix(text: str) -> None:
    counters = parse(text)
    assert (counters.steps, counters.drafted, counters.accepted) == (43, 129, 10)
    assert counters.per_position == (4, 3, 3)
    assert (counters.tokens, counters.running) == (60, 2)
    assert counters.acceptance_length == pytest.approx(1.2326, abs=1e-4)
    assert counters.acceptance_rate == pytest.approx(0.0775, abs=1e-4)


def test_engines_of_one_server_are_summed() -> None:
    both = parse(TEXT + TEXT.replace('engine="0"', 'engine="1"'))
    assert (both.steps, both.per_position) == (86, (8, 6, 6))


def test_a_delta_holds_only_what_came_after() -> None:
    earlier = Counters(steps=40, drafted=120, accepted=9, per_position=(4, 3), tokens=50)
    delta = parse(TEXT).since(earlier)
    assert delta is not None
    assert (delta.steps, delta.accepted, delta.per_position) == (3, 1, (0, 0, 3))


def test_a_restart_is_no_delta() -> None:
    assert parse(TEXT).since(Counters(steps=100, drafted=300, accepted=150)) is None


def test_nothing_counted_has_no_acceptance() -> None:
    counters = parse("")
    assert counters == Counters()
    assert counters.acceptance_length is None
    assert counters.acceptance_rate is None
