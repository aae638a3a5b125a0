"""The job process: what it leaves behind for its supervisor, and that workers need no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from app.services import claims, runs, verifiers
from app.settings import settings
from speculators_core.errors import NotFound
from speculators_core.params import JobKind
from tests import tiny
from tests.conftest import ROOT
from tests.workers.lab import wait_for
from workers import job, leases, outcome


@pytest.fixture
def claimed(home):
    """Submits a run and claims it, as a supervisor would before it starts the job."""
    leases.host_slots.cache_clear()
    leases.register()

    def make(kind: str, params: dict, **options):
        run = runs.submit(kind, params, owner="ada", **options)
        assert claims.claim("here").run_id == run.id
        return run

    return make


def _job(run_id: str, module: str = "workers.job", **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, run_id],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_importing_the_worker_costs_no_torch():
    code = (
        "import sys, workers.tasks, workers.celery_app, workers.reaper;"
        "bad = {'torch', 'transformers', 'vllm', 'gradio'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_real_job_resolves_names_registers_its_product_and_leaves_its_result(claimed, tmp_path):
    path = tiny.build_verifier(tmp_path / "tiny")
    run = claimed("verifier", {"source": str(path), "name": "tiny"})
    done = _job(run.id)
    printed = done.communicate(timeout=240)[0]
    assert done.returncode == outcome.DONE, printed
    assert outcome.read_outcome(run.id).result == {"output": str(path), "name": "tiny"}
    assert verifiers.get("tiny").hidden_size == tiny.HIDDEN
    claims.finish(run.id, "succeeded")

    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2, clearly."}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))
    run = claimed("prepare", {"data": [str(chats)], "verifier": "tiny", "draft_vocab_size": 64})
    done = _job(run.id)
    printed = done.communicate(timeout=240)[0]
    assert done.returncode == outcome.DONE, printed
    written = json.loads((settings().run_dir(run.id) / "params.json").read_text())
    assert written["verifier"] == str(path)
    result = outcome.read_outcome(run.id).result
    assert result["samples"] == 8
    assert result["draft_vocab_size"] == 64
    assert os.path.commonpath([result["output"], settings().home]) == str(settings().home)


def test_a_bad_input_is_an_error_in_words_and_the_traceback_stays_in_the_log(claimed, tmp_path):
    run = claimed("verifier", {"source": str(tmp_path), "name": "empty"})
    done = _job(run.id)
    printed = done.communicate(timeout=240)[0]
    assert done.returncode == outcome.FAILED
    error = outcome.read_outcome(run.id).error
    assert error["kind"] == "checkpoint"
    assert "config.json" in f"{error['message']} {error['where']}"
    assert "Traceback" in printed
    assert "Traceback" not in json.dumps(error)


def test_work_that_an_earlier_attempt_finished_is_not_done_again(claimed, home):
    run = claimed("verifier", {"source": "fail:never", "name": "x"})
    outcome.write_result(run.id, {"output": str(home), "name": "x"})
    done = _job(run.id, "tests.workers.stand_in_job")
    printed = done.communicate(timeout=240)[0]
    assert done.returncode == outcome.DONE
    assert "an earlier attempt finished this work" in printed


def test_a_result_whose_output_is_gone_is_worked_for_again(claimed, home):
    run = claimed("verifier", {"source": "sleep:0", "name": "x"})
    outcome.write_result(run.id, {"output": str(home / "gone"), "name": "x"})
    done = _job(run.id, "tests.workers.stand_in_job")
    done.communicate(timeout=240)
    assert (home / "starts" / run.id).exists()


def test_term_lets_the_work_save_and_leave_with_status_3(claimed, home):
    run = claimed("verifier", {"source": "sleep:60", "name": "x"})
    done = _job(run.id, "tests.workers.stand_in_job")
    wait_for((home / "starts" / run.id).exists, 60, "the job's start")
    done.send_signal(signal.SIGTERM)
    assert "saving" in done.communicate(timeout=60)[0]
    assert done.returncode == outcome.STOPPED
    assert outcome.read_outcome(run.id) == outcome.Outcome()


def test_a_job_whose_supervisor_has_gone_ends_at_once(claimed):
    run = claimed("verifier", {"source": "sleep:60", "name": "x"})
    orphan = _job(
        run.id, "tests.workers.stand_in_job", env={**os.environ, job.SUPERVISOR: str(1 << 30)}
    )
    orphan.communicate(timeout=60)
    assert orphan.returncode == -signal.SIGKILL


def test_parameters_keep_what_is_no_reference_and_refuse_unknown_names(home):
    params = job.resolved(JobKind.CONVERT, {"checkpoint": "org/name", "verifier": str(home)})
    assert (params.checkpoint, params.verifier) == ("org/name", str(home))
    with pytest.raises(NotFound):
        job.resolved(JobKind.SELF_WRITE, {"verifier": "nobody"})


def test_every_kind_has_a_job():
    from workers.jobs import job_of

    for kind in JobKind:
        assert callable(job_of(kind)), kind


@pytest.mark.parametrize(
    ("told", "visible", "found"),
    [("0\n1\n2\n3\n", None, (0, 1, 2, 3)), ("0\n1\n2\n3\n", "3,1", (1, 3)), ("", None, ())],
)
def test_gpus_are_those_of_nvidia_smi_that_this_process_may_use(
    tmp_path, monkeypatch, told, visible, found
):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nprintf '{told}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert leases.find_gpus() == found


def test_a_job_sees_its_leased_gpu_once_and_none_without_a_lease():
    assert leases.device_environment([3])["CUDA_VISIBLE_DEVICES"] == "3"
    assert leases.device_environment([0, 3])["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert leases.device_environment([])["CUDA_VISIBLE_DEVICES"] == ""
