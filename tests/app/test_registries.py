"""Registered verifiers, speculators, data sets and evaluations; acceptance of traffic."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from app.services import acceptance, data_sets, evaluations, runs, speculators, verifiers
from app.services.acceptance import RequestAcceptance
from speculators_core.config import Eagle3Config
from speculators_core.errors import CheckpointError, DataError, InputError, NotFound
from speculators_core.params import EvaluateParams

LAYER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def verifier_directory(place: Path) -> Path:
    place.mkdir(parents=True)
    config = {**LAYER, "num_hidden_layers": 8, "architectures": ["LlamaForCausalLM"]}
    (place / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (place / "tokenizer.json").write_text("{}")
    return place


def speculator_directory(place: Path) -> Path:
    place.mkdir(parents=True)
    config = Eagle3Config(
        draft_vocab_size=64,
        norm_before_residual=False,
        dtype="float32",
        speculators_config={
            "proposal_methods": [{"speculative_tokens": 4}],
            "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
        },
        transformer_layer_config=LAYER,
    )
    (place / "config.json").write_text(config.to_json())
    return place


def test_a_verifier_is_registered_with_the_facts_of_its_config(store, tmp_path):
    place = verifier_directory(tmp_path / "v")
    made = verifiers.register(place, "tiny", source="wheel:tiny")
    assert (made.name, made.hidden_size, made.num_layers, made.vocab_size) == ("tiny", 64, 8, 256)
    assert made.architecture == "LlamaForCausalLM" and made.source == "wheel:tiny"
    assert verifiers.get("tiny") == verifiers.get(made.id) == made
    assert verifiers.list_verifiers() == [made]


def test_a_taken_name_gets_a_number_and_the_same_directory_keeps_its_row(store, tmp_path):
    places = [verifier_directory(tmp_path / f"v{n}") for n in range(3)]
    names = [verifiers.register(place, "tiny").name for place in places]
    assert names == ["tiny", "tiny-2", "tiny-3"]
    assert verifiers.register(places[1], "tiny", source="again").name == "tiny-2"
    assert len(verifiers.list_verifiers()) == 3 and verifiers.get("tiny-2").source == "again"


def test_registrations_of_one_name_at_once_all_succeed(store, tmp_path):
    places = [speculator_directory(tmp_path / f"s{n}") for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        names = set(pool.map(lambda place: speculators.register(place, "draft").name, places))
    assert names == {"draft", *(f"draft-{n}" for n in range(2, 7))}


def test_a_speculator_is_registered_with_the_facts_of_its_config(store, tmp_path):
    place = speculator_directory(tmp_path / "s")
    made = speculators.register(place, "mine", doubts=["aux ids are unknown"], deployable=False)
    assert (made.verifier, made.draft_vocab_size, made.speculative_tokens) == ("org/model", 64, 4)
    assert made.doubts == ["aux ids are unknown"] and not made.deployable
    assert speculators.list_speculators(deployable_only=True) == []
    better = speculators.register(place, "mine", verifier="tiny")
    assert better.id == made.id and better.verifier == "tiny" and better.deployable
    assert speculators.list_speculators(deployable_only=True) == [better]


def test_a_directory_of_the_wrong_kind_or_a_name_that_is_none_is_refused(store, tmp_path):
    verifier = verifier_directory(tmp_path / "v")
    draft = speculator_directory(tmp_path / "s")
    with pytest.raises(CheckpointError, match="draft"):
        verifiers.register(draft, "x")
    with pytest.raises(CheckpointError, match="not a speculators-format"):
        speculators.register(verifier, "x")
    for name in ("", "../x", "a b", "a/b", ".hidden", "x" * 101):
        with pytest.raises(InputError, match="can't be a name"):
            speculators.register(draft, name)
    assert speculators.list_speculators() == [] and verifiers.list_verifiers() == []


def test_a_data_set_knows_its_content(store, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": []}\n')
    first = data_sets.register(chats, "chats", "chats", samples=1, facts={"tokens": 9})
    chats.write_text('{"messages": [1]}\n')
    second = data_sets.register(chats, "chats", "chats", samples=1)
    assert first.id == second.id and first.digest != second.digest
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / "x").write_text("1")
    data_sets.register(tmp_path / "prepared", "prepared", "prepared", samples=1)
    assert [one.name for one in data_sets.list_data_sets("chats")] == ["chats"]
    assert len(data_sets.list_data_sets()) == 2
    with pytest.raises(DataError):
        data_sets.register(tmp_path / "nothing", "x", "chats", samples=0)
    with pytest.raises(InputError, match="pictures"):
        data_sets.register(chats, "x", "pictures", samples=0)


@pytest.mark.parametrize("registry", [verifiers, speculators, data_sets, evaluations])
def test_what_is_not_registered_is_not_found(store, registry):
    with pytest.raises(NotFound, match="nothing-of-that-name"):
        registry.get("nothing-of-that-name")


def test_an_evaluation_keeps_its_report_and_a_run_has_one(store):
    run = runs.submit("prepare", {"data": ["d"], "verifier": "v"}, owner="ada")
    params = EvaluateParams(speculator="mine", verifier="tiny", data="held", temperature=0.5)
    report = {
        "acceptance_length": 1.75,
        "acceptance_rate": 0.25,
        "tokens_per_second": 30.0,
        "per_position": [0.5, 0.2, 0.05],
        "interval": [1.7, 1.8],
    }
    first = evaluations.register(params, report, run_id=run.id)
    again = evaluations.register(params, {**report, "acceptance_length": 1.8}, run_id=run.id)
    assert first.id == again.id and again.acceptance_length == 1.8
    assert again.tokens_per_second_plain is None and again.report["interval"] == [1.7, 1.8]
    assert evaluations.get(first.id) == again
    evaluations.register(params.model_copy(update={"speculator": "other"}), report)
    assert [one.id for one in evaluations.list_evaluations("mine")] == [first.id]
    assert len(evaluations.list_evaluations()) == 2


def test_acceptance_of_traffic_is_summed_over_steps_not_over_requests(store):
    deployment = runs.submit("deploy", {"verifier": "v"}, owner="ada").id
    assert acceptance.totals(deployment).acceptance_length is None
    requests = [(3,), (0,) * 98 + (1,)]
    acceptance.record(
        deployment,
        [
            RequestAcceptance(
                request_id=f"r{n}",
                accepted_per_step=steps,
                drafted=3 * len(steps),
                tokens=sum(steps) + len(steps),
                context_len=10,
                speculative_tokens=3,
            )
            for n, steps in enumerate(requests)
        ],
    )
    total = acceptance.totals(deployment)
    assert (total.requests, total.steps, total.drafted, total.accepted) == (2, 100, 300, 4)
    assert total.acceptance_length == 1.04 and total.acceptance_rate == 4 / 300
    assert total.per_position == (0.02, 0.01, 0.01)
    assert acceptance.totals(deployment, last=1).requests == 1
