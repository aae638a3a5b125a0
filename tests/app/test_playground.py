"""The playground service against a real vLLM server, and against small stand-ins that misbehave."""

from __future__ import annotations

import pytest

from app.services import playground
from app.services.views import DeploymentView
from speculators_core.params import SamplingParams
from workers.metrics import scrape

ASK = [{"role": "user", "content": "Count with me: one two three one two three"}]


def answer(deployment: DeploymentView, *, plain: bool = False, **sampling):
    sampling = SamplingParams(**{"max_tokens": 60, **sampling})
    return list(playground.generate(deployment.id, ASK, sampling, user="ada", plain=plain))


@pytest.mark.vllm
def test_steps_tell_the_answer_and_the_server_counts_the_same(vllm: DeploymentView) -> None:
    before = scrape(vllm.endpoint)
    updates = answer(vllm)
    last = updates[-1]
    assert last.state == "done", last.message
    assert last.message == ""
    steps = [step for update in updates for step in update.steps]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    emitted = [token["id"] for step in steps for token in step["emitted"]]
    assert len(emitted) == last.numbers["tokens"] == 60
    counted = scrape(vllm.endpoint).since(before)
    assert counted is not None
    assert (counted.steps, counted.drafted, counted.accepted) == (
        last.numbers["steps"],
        last.numbers["drafted"],
        last.numbers["accepted"],
    )
    assert last.numbers["acceptance_length"] == pytest.approx(counted.acceptance_length)
    text = "".join(token["text"] for step in steps for token in step["emitted"])
    assert text == last.text
