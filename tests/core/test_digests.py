from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from speculators_core import digests
from speculators_core.models.verifier import load_verifier


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_WORTH_KEEPING", 1)
    return tmp_path / "cache" / "speclab" / "digests"


def test_a_large_file_is_read_once(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 100)
    first = digests.of_file(file)
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(digests, "_read", lambda file: pytest.fail("read again"))
    assert digests.of_file(file) == first


def test_other_bytes_of_the_same_size_and_time_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 100)
    before, first = file.stat(), digests.of_file(file)
    file.write_bytes(b"b" * 100)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests.of_file(file) != first


def test_one_changed_byte_of_the_weights_makes_another_verifier(
    tmp_path: Path, tiny_verifier: Path
) -> None:
    """B17: states of weights that were changed in place are not those of the verifier."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_verifier, copy)
    before = load_verifier(copy).fingerprint
    assert before == load_verifier(tiny_verifier).fingerprint
    for file in copy.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[len(content) * 3 // 4 - 1] ^= 1
        file.write_bytes(content)
    assert load_verifier(copy).fingerprint != before
