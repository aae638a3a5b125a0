"""What vLLM is started with, and what is refused before; the real server at the end."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import httpx
import pytest

from app.services.views import DeploymentView
from app.store.models import TraceMode
from speculators_core.errors import CheckpointError, PairingError, SpeclabError, Unavailable
from speculators_core.params import DeployParams
from tests import tiny
from workers import launch, preflight, vllm_server
from workers.vllm_server import Machine, choose_dtype

OLD_CPU = Machine(cpu=True, cores=2, fast_bfloat16=False, openmp=Path("/lib/libiomp5.so"))
GPU = Machine(cpu=False, cores=16, fast_bfloat16=True, openmp=None)


@pytest.fixture(scope="module")
def pair(served_models: tuple[Path, Path]) -> tuple[Path, Path]:
    return served_models


def params(pair: tuple[Path, Path], **values) -> DeployParams:
    verifier, speculator = pair
    given = {"verifier": str(verifier), "speculator": str(speculator), "max_model_len": 512}
    return DeployParams(**{**given, **values})


def command(params: DeployParams, machine: Machine, *, traced: bool) -> dict[str, str]:
    """Flags and their values; a switch has the value of itself."""
    examined = preflight.examine(params)
    words = vllm_server.arguments(
        params, examined, machine, "float32", 8123, "name", Path("/t/s") if traced else None
    )
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {flag: flag if v.startswith("--") else v for flag, v in pairs if flag.startswith("--")}


def test_the_method_is_explicit_and_k_is_the_checkpoints_own(pair) -> None:
    """A24"""
    flags = command(params(pair), OLD_CPU, traced=True)
    assert json.loads(flags["--speculative-config"]) == {
        "method": "eagle3",
        "model": str(pair[1]),
        "num_speculative_tokens": 3,
    }
    assert flags["--host"] == "127.0.0.1"
    assert flags["--served-model-name"] == "name"
    assert flags["--scheduler-cls"] == vllm_server.SCHEDULER


@pytest.mark.parametrize("made", ["float32", "bfloat16", "float16"])
def test_float16_is_warned_of_where_the_verifier_was_made_in_another_format(
    pair, tmp_path: Path, made: str
) -> None:
    """C7"""
    verifier = shutil.copytree(pair[0], tmp_path / "verifier")
    config = json.loads((verifier / "config.json").read_text())
    (verifier / "config.json").write_text(json.dumps({**config, "dtype": made}))

    def notes(dtype: str) -> list[str]:
        told = preflight.examine(params(pair, verifier=str(verifier), dtype=dtype)).notes
        return [note for note in told if "65504" in note]

    assert bool(notes("float16")) == (made != "float16")
    assert not notes("auto") and not notes("bfloat16")


def test_the_form_decides_over_the_checkpoint(pair) -> None:
    flags = command(params(pair, speculative_tokens=2, max_num_seqs=3), OLD_CPU, traced=False)
    assert json.loads(flags["--speculative-config"])["num_speculative_tokens"] == 2
    assert flags["--max-num-seqs"] == "3"


def test_without_a_speculator_the_prompt_is_looked_up(pair) -> None:
    flags = command(params(pair, speculator=None), OLD_CPU, traced=True)
    config = json.loads(flags["--speculative-config"])
    assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 3)
    assert "model" not in config


def test_a_gpu_schedules_asynchronously_unless_ids_are_wanted(pair) -> None:
    assert "--no-async-scheduling" in command(params(pair), GPU, traced=True)
    assert "--no-async-scheduling" not in command(params(pair), GPU, traced=False)
    assert "--enforce-eager" not in command(params(pair), GPU, traced=True)
    assert "--enforce-eager" in command(params(pair), OLD_CPU, traced=True)


@pytest.mark.parametrize(
    ("wanted", "machine", "dtype"),
    [("auto", OLD_CPU, "float32"), ("auto", GPU, "auto"), ("bfloat16", OLD_CPU, "bfloat16")],
)
def test_the_number_format_fits_the_machine(wanted: str, machine: Machine, dtype: str) -> None:
    chosen, notes = choose_dtype(wanted, machine)
    assert chosen == dtype
    assert any("bfloat16" in note for note in notes) is (machine is OLD_CPU)


def test_the_environment_has_no_settings_of_ours(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLAB_DATABASE_URL", "postgresql://user:secret@host/db")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    planned = launch.plan(params(pair), Path("/tmp/trace"))
    assert "secret" not in str(planned.environment)
    assert "VLLM_SERVER_DEV_MODE" not in planned.environment
    assert planned.environment["SPECLAB_TRACE_SOCKET"] == "/tmp/trace"
    assert planned.environment["VLLM_NO_USAGE_STATS"] == "1"
    assert planned.trace_mode is TraceMode.IDS


def test_tracing_switched_off_leaves_no_socket(pair) -> None:
    planned = launch.plan(params(pair, trace=False), Path("/tmp/trace"))
    assert "SPECLAB_TRACE_SOCKET" not in planned.environment
    assert planned.trace_mode is TraceMode.OFF


def test_relative_paths_reach_the_server_whole(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pair[0].parent)
    given = DeployParams(verifier=pair[0].name, speculator=pair[1].name, max_model_len=512)
    command = launch.plan(given).command
    assert str(pair[0]) in command
    assert any(f'"model": "{pair[1]}"' in word for word in command)


def test_the_reference_engine_is_called_with_the_same_choices(pair) -> None:
    planned = launch.plan(params(pair, engine="reference", port=None, dtype="bfloat16"))
    words = planned.command
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert words[1:3] == ("-m", "workers.reference_server")
    assert words[words.index("--speculator") + 1] == str(pair[1])
    assert words[words.index("--speculative-tokens") + 1] == "3"
    assert words[words.index("--served-name") + 1] == planned.served_name


def test_a_busy_port_is_refused_and_its_listener_lives(pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Unavailable, match=f"port {port} can't be used"):
            launch.plan(params(pair, port=port))
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass


def test_a_missing_verifier_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a directory"):
        preflight.examine(DeployParams(verifier=str(tmp_path / "none")))


def test_the_verifier_taken_for_its_draft_is_refused(pair) -> None:
    with pytest.raises(CheckpointError, match="the same model"):
        preflight.examine(params(pair, speculator=str(pair[0])))


def test_a_verifier_without_weights_is_refused(pair, tmp_path: Path) -> None:
    shutil.copytree(pair[0], tmp_path / "v", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(CheckpointError, match="no weight files"):
        preflight.examine(DeployParams(verifier=str(tmp_path / "v"), max_model_len=512))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "not all within 0..8"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "does not say which verifier states"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            "reads 2 verifier states, vLLM would count 3",
        ),
        ({"target_hidden_size": 96}, "hidden size 96, this one's is 64"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(pair, tmp_path, changes, message) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(pair[1], wrong)
    config = json.loads((wrong / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (wrong / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairingError, match=message):
        preflight.examine(params(pair, speculator=str(wrong)))


def test_a_draft_for_another_vocabulary_is_refused(pair, tmp_path: Path) -> None:
    other = tiny.build_speculator(
        tmp_path / "other", pair[0], config=tiny.draft_config(pair[0], vocab=260)
    )
    with pytest.raises(PairingError, match="vocabulary 260, this one's is 256"):
        preflight.examine(params(pair, speculator=str(other)))


def test_a_draft_with_a_damaged_file_is_refused(pair, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(pair[1], cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(SpeclabError, match="can't be read"):
        preflight.examine(params(pair, speculator=str(cut)))


def test_a_context_longer_than_the_verifiers_is_refused(pair) -> None:
    with pytest.raises(PairingError, match="longer than the verifier's 2048"):
        preflight.examine(params(pair, max_model_len=4096))


def test_more_memory_than_is_free_is_refused(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 2**20

    monkeypatch.setattr(preflight.psutil, "virtual_memory", Memory)
    with pytest.raises(Unavailable, match=r"GiB of memory, 0\.1 are free"):
        preflight.examine(params(pair))


def test_more_tokens_than_were_trained_is_noted(pair) -> None:
    assert "never trained" in preflight.examine(params(pair, speculative_tokens=5)).notes[0]


def chat(vllm: DeploymentView, **body) -> dict:
    messages = [{"role": "user", "content": "abc abc abc"}]
    body = {"model": vllm.served_name, "messages": messages, "max_tokens": 48, **body}
    reply = httpx.post(f"{vllm.endpoint}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.vllm
def test_a_plain_request_drafts_nothing_and_says_the_same(vllm: DeploymentView) -> None:
    speculated = chat(vllm, temperature=0)
    plain = chat(vllm, temperature=0, vllm_xargs={"speculate": "0"})
    assert speculated["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    same = [reply["choices"][0]["message"]["content"] for reply in (speculated, plain)]
    assert same[0] == same[1]


@pytest.mark.vllm
def test_a_cpu_samples_as_it_is_told(vllm: DeploymentView) -> None:
    """With the upstream faults this text is arbitrary, or top-k alone ends the engine."""
    greedy = chat(vllm, temperature=0, max_tokens=24)
    for narrow in ({"temperature": 0.01}, {"top_p": 0.001}, {"top_k": 1}):
        sampled = chat(vllm, max_tokens=24, seed=1, **{"temperature": 1.0, **narrow})
        assert sampled["choices"] == greedy["choices"], narrow
