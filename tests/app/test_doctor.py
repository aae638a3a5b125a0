"""The doctor: what is there, what is missing, and how to get it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from app.services import doctor
from app.settings import settings


def finding(name: str) -> doctor.Finding:
    return next(found for found in doctor.examine() if found.name == name)


def test_it_looks_at_everything_and_makes_nothing(home: Path) -> None:
    found = {finding.name: finding for finding in doctor.examine()}
    assert {"python", "cpu", "memory", "disk", "gpus", "torch", "vllm", "store"} <= set(found)
    assert found["torch"].value.startswith("torch 2.")
    assert found["store"].state == "warning" and found["store"].fix == "speclab up"
    assert found["workers"].state == "warning"
    assert list(home.iterdir()) == []


def test_a_migrated_store_is_in_order(sqlite_store: str) -> None:
    assert finding("store").state == "ok"


def test_an_older_store_is_to_be_upgraded(home: Path) -> None:
    (home / "speclab.db").touch()
    assert finding("store").fix == "speclab db upgrade"


def test_a_password_is_never_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLAB_DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/lab")
    settings.cache_clear()
    assert "hunter2" not in " ".join(str(found) for found in doctor.examine())


def test_a_missing_package_says_how_to_get_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    assert finding("torch").state == "missing"
    assert "speclab[worker]" in finding("torch").fix
    assert "make up" in finding("vllm").fix


def test_gpus_are_read_from_nvidia_smi(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA A100, 81920 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert finding("gpus").value == "0, NVIDIA A100, 81920 MiB"
    assert finding("vllm").state == "warning"  # here the CPU build is installed
    program.write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    assert finding("gpus").state == "missing"


def test_an_own_broker_needs_no_embedded_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLAB_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.cache_clear()
    assert finding("embedded broker").value.startswith("not needed")
    assert finding("broker").state == "warning"


def test_it_loads_nothing_heavy() -> None:
    code = "import sys; import app.services.doctor as d; d.examine(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm"} & set(said.stdout.split())


def test_the_command_prints_findings_as_json(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "doctor", "--json"], capture_output=True, text=True
    )
    found = json.loads(done.stdout)["findings"]
    assert done.returncode == int(any(one["state"] == "missing" for one in found))
    assert {"name", "state", "value", "fix"} == set(found[0])
