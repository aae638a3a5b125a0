"""An output directory is complete, or absent."""

from __future__ import annotations

import errno
import os

import pytest

from speculators_core.errors import Conflict, Unavailable
from speculators_core.output import complete_or_absent


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), complete_or_absent(tmp_path / "out") as partial:
        (partial / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept_unless_told_otherwise(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(Conflict), complete_or_absent(tmp_path / "out"):
        pass
    with pytest.raises(RuntimeError), complete_or_absent(tmp_path / "out", overwrite=True):
        raise RuntimeError
    assert (tmp_path / "out" / "old").exists()
    with complete_or_absent(tmp_path / "out", overwrite=True) as partial:
        (partial / "new").write_text("new")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "new"]


def test_an_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    with pytest.raises(Conflict, match="appeared"), complete_or_absent(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file" / "out", tmp_path / ("n" * 300)):
        with pytest.raises(Unavailable), complete_or_absent(place):
            pass


def test_folders_made_for_an_output_go_with_it(tmp_path):
    place = tmp_path / "a" / "b" / "out"
    with pytest.raises(RuntimeError), complete_or_absent(place):
        raise RuntimeError("the work failed")
    with pytest.raises(Unavailable), complete_or_absent(tmp_path / "a" / "b" / ("n" * 300)):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(RuntimeError), complete_or_absent(place):
        (tmp_path / "a" / "b" / "theirs").write_text("x")
        raise RuntimeError("the work failed")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["theirs"]
    with complete_or_absent(tmp_path / "c" / "out"):
        pass
    assert (tmp_path / "c" / "out").is_dir()


def test_a_full_disk_is_an_error_of_ours_and_leaves_nothing(tmp_path):
    with pytest.raises(Unavailable, match="No space left"), complete_or_absent(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(PermissionError), complete_or_absent(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "not about the output")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_nowhere_is_not_replaced(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "absent")
    with pytest.raises(Conflict, match="exists already"), complete_or_absent(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_symlink()
