"""Who may import whom (docs/architecture.md), read from the source and seen in real processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("app", "workers", "speculators_core", "migrations")
LIGHT_CORE = (
    "speculators_core.errors",
    "speculators_core.params",
    "speculators_core.config",
    "speculators_core.progress",
    "speculators_core.untrusted",
    "speculators_core.launch",
    "speculators_core.hub",
    "speculators_core.hub.reference",
    "speculators_core.conversion",
    "speculators_core.conversion.export",
    "speculators_core.conversion.inspect",
    "speculators_core.conversion.losses",
    "speculators_core.models",
    "speculators_core.models.draft_config",
    "speculators_core.models.verifier_config",
    "speculators_core.training",
    "speculators_core.training.presets",
    "speculators_core.data",
    "speculators_core.data.capacity",
    "speculators_core.data.chats",
    "speculators_core.data.layouts",
    "speculators_core.data.occupancy",
    "speculators_core.data.rows",
    "speculators_core.data.samples",
)
"""What `app` may know of the core; that none of it loads torch is seen below."""
HEAVY = ("torch", "transformers", "vllm")
FRONT = ("app.ui", "app.api", "app.cli", "app.commands")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, with what it takes from packages."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: a relative import"
            yield node.module
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if is_module(f"{node.module}.{alias.name}")
            )


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(package: str, forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{name_of(file)} imports {imported}"
        for file in modules(package)
        for imported in imports(file)
        if within(imported, forbidden)
    ]


def test_the_core_knows_nothing_of_ours() -> None:
    assert offences("speculators_core", ("app", "workers", "migrations")) == []


def test_the_core_knows_no_web_database_or_queue() -> None:
    assert (
        offences("speculators_core", ("fastapi", "gradio", "celery", "sqlalchemy", "redis")) == []
    )


def test_app_never_imports_workers_or_heavy_packages() -> None:
    assert offences("app", ("workers", *HEAVY)) == []


def test_app_knows_only_the_light_modules_of_the_core() -> None:
    found = [
        f"{name_of(file)} imports {imported}"
        for file in modules("app")
        for imported in imports(file)
        if within(imported, ("speculators_core",))
        and imported not in (*LIGHT_CORE, "speculators_core")
        and is_module(imported)
    ]
    assert found == []


@pytest.mark.parametrize("package", ["app/services", "app/store"])
def test_services_and_store_do_not_know_their_callers(package: str) -> None:
    assert offences(package, (*FRONT, "app.main", "app.client", "app.auth", "gradio")) == []
    if package == "app/store":
        assert offences(package, ("app.services",)) == []


def test_pages_routes_and_commands_reach_the_store_through_services() -> None:
    found = [
        f"{name_of(file)} imports {imported}"
        for file in modules("app")
        for imported in imports(file)
        if within(name_of(file), FRONT)
        and within(imported, ("app.store", "sqlalchemy"))
        and imported not in ("app.store", "app.store.models")  # its enumerations are vocabulary
    ]
    assert found == []


def test_workers_know_no_pages_routes_or_commands() -> None:
    assert offences("workers", (*FRONT, "app.main", "app.auth", "fastapi.security", "gradio")) == []


def loaded(code: str, home: Path) -> set[str]:
    """Top-level packages in `sys.modules` after running `code` in a fresh process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SPECLAB_")}
    said = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"],
        env={**clean, "SPECLAB_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return {name.partition(".")[0] for name in json.loads(said.stdout.splitlines()[-1])}


def test_the_web_process_holds_nothing_heavy_and_no_worker_code(tmp_path: Path) -> None:
    code = """
import migrations
from app.settings import settings
migrations.upgrade(settings().store_url)
from fastapi.testclient import TestClient
from app.auth import Gate
from app.main import create_app
with TestClient(create_app(), base_url="http://127.0.0.1:7860") as client:
    assert client.get(Gate.of(settings()).issue_link("http://127.0.0.1:7860")).status_code == 200
    for page in ("playground", "runs", "convert", "train", "deploy", "models", "api/demo"):
        assert client.get(f"/{page}").status_code == 200, page
    schema = client.get("/api/openapi.json").json()
    assert "/api/runs" in schema["paths"]
"""
    seen = loaded(code, tmp_path / "home")
    assert "gradio" in seen
    assert seen & {*HEAVY, "workers"} == set()


def test_light_modules_of_the_core_load_no_torch(tmp_path: Path) -> None:
    existing = [name for name in LIGHT_CORE if is_module(name)]
    assert loaded(f"import {', '.join(existing)}", tmp_path) & set(HEAVY) == set()


def test_the_worker_process_holds_nothing_heavy(tmp_path: Path) -> None:
    code = "import workers.celery_app, workers.tasks, workers.leases, workers.reaper"
    assert loaded(code, tmp_path) & {*HEAVY, "gradio"} == set()
