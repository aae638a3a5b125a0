"""The vLLM server that a training starts for hidden states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.services import runs
from speculators_core.data.prepare import load_prepared
from speculators_core.data.states import InProcess
from speculators_core.data.vllm_states import Extraction, StartVllm
from speculators_core.errors import InputError, Unavailable
from speculators_core.models.verifier import load_verifier
from speculators_core.models.verifier_config import read_verifier
from speculators_core.params import TrainParams
from speculators_core.training.sources import open_source
from tests.conftest import CACHE
from tests.core.listening import Listener
from tests.core.small_data import prepare_chats
from tests.core.stand_in_vllm import StandIn
from tests.workers.lab import Lab
from workers import leftovers, preflight, states_server
from workers.jobs import train
from workers.reporter import Reporter
from workers.states_server import OnStart, plan
from workers.vllm_server import SCHEDULER, Machine

CPU = Machine(cpu=True, cores=2, fast_bfloat16=False, openmp=None)
GPU = Machine(cpu=False, cores=16, fast_bfloat16=True, openmp=None)


@pytest.fixture
def asked(served_models: tuple[Path, Path], tmp_path: Path) -> Extraction:
    return Extraction(str(served_models[0]), (2, 4, 5, 8), "float32", 300, tmp_path)


def flags(asked: Extraction, machine: Machine) -> dict[str, str]:
    facts = read_verifier(asked.verifier)
    words = states_server.arguments(asked, facts, machine, "float32", 8123, "name")
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {flag: flag if v.startswith("--") else v for flag, v in pairs if flag.startswith("--")}


def test_it_shows_the_layers_that_are_asked_for_and_keeps_no_prefix(asked: Extraction) -> None:
    """B20"""
    found = flags(asked, CPU)
    config = json.loads(found["--speculative-config"])
    shown = config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["method"] == "extract_hidden_states" and shown == [2, 4, 5, 8]
    assert "--no-enable-prefix-caching" in found
    assert found["--host"] == "127.0.0.1" and found["--max-model-len"] == "302"
    assert found["--scheduler-cls"] == SCHEDULER  # its engine dies with it


def test_a_cpu_needs_our_connector_and_a_gpu_has_vllms(asked: Extraction) -> None:
    transfer = {m: json.loads(flags(asked, m)["--kv-transfer-config"]) for m in (CPU, GPU)}
    assert transfer[CPU]["kv_connector"] == "CPUHiddenStatesConnector"
    assert transfer[CPU]["kv_connector_module_path"] == "speculators_core.vllm_extraction"
    assert transfer[GPU]["kv_connector"] == "ExampleHiddenStatesConnector"
    for found in transfer.values():
        assert found["kv_connector_extra_config"] == {"shared_storage_path": str(asked.staging)}
    assert "--enforce-eager" not in flags(asked, GPU)


def test_a_sample_that_fills_all_positions_is_refused(asked: Extraction) -> None:
    """vLLM wants room for the token that it says next."""
    longest = Extraction(asked.verifier, asked.layers, "float32", 2048, asked.staging)
    with pytest.raises(InputError, match="vLLM needs 2 positions more, the verifier has 2048"):
        plan(longest)


def test_more_memory_than_is_free_is_refused(
    asked: Extraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 2**20

    monkeypatch.setattr(preflight.psutil, "virtual_memory", Memory)
    with pytest.raises(Unavailable, match="GiB of memory beside the training"):
        plan(asked)


def test_a_run_has_its_server_recorded_and_trains_on_its_states(
    home: Path, served_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for vLLM."""
    stand_in = StandIn(load_verifier(served_models[0]))

    def starter(output: object, on_start: OnStart) -> StartVllm:
        on_start(2**22 + 1, 1.0)
        return stand_in.start

    monkeypatch.setattr(train, "starter", starter)
    data = prepare_chats(tmp_path, served_models[0], count=12)
    params = TrainParams(
        data=str(data), verifier=str(served_models[0]), hidden_states="vllm", epochs=1
    )
    run = runs.submit("train", params.model_dump(mode="json"), owner="ada")
    with Reporter(run.id) as reporter:
        result = train.run(runs.get(run.id), params, reporter)
    assert Path(result["output"]).is_dir()
    assert stand_in.asked == 12
    assert leftovers.remembers_server(run.id)


@pytest.mark.prove
def test_training_on_the_states_of_a_real_vllm_is_training_on_those_of_transformers(
    home: Path, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """From the command line, on a CPU in float32: every state of every document; then nothing is
    left of the server or its files, and a second training starts none."""
    (home / "cache").mkdir()
    (CACHE / "vllm").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "vllm").symlink_to(CACHE / "vllm")
    data = prepare_chats(tmp_path, served_models[0], count=40)
    params = TrainParams(
        data=str(data), verifier=str(served_models[0]), hidden_states="vllm", epochs=1
    )
    told = [_trained(params, tmp_path / name) for name in ("first", "second")]
    assert ["computes the hidden states" in one for one in told] == [True, False]
    prepared, verifier = load_prepared(data), load_verifier(served_models[0])
    layers = [2, 4, 5]
    source, quarantined = open_source(params, prepared, verifier, layers, Listener())
    assert quarantined.documents == set()
    here = InProcess(verifier, layers)
    for number in range(len(prepared.lengths)):
        (found,) = source([number])
        (same,) = here.states([prepared.document(number)])
        torch.testing.assert_close(found.states.aux, same.aux, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(found.states.final, same.final, atol=1e-3, rtol=1e-4)
        assert torch.equal(found.states.best, same.best)
    assert Lab(home).processes() == []
    assert not list(tmp_path.glob(".*.partial"))


def _trained(params: TrainParams, output: Path) -> str:
    """What `speclab train` says on stderr."""
    values = params.model_dump(include={"data", "verifier", "hidden_states", "epochs"})
    flags = [w for name, v in values.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    said = subprocess.run(
        [sys.executable, "-m", "app.cli", "train", *flags, "--output", str(output), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr[-6000:]
    assert json.loads(said.stdout)["output"] == str(output)
    return said.stderr
