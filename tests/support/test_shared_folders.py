"""Folders that one process of a run writes for all of its workers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.shared_folders import written_once
from tests.support.tiny_models import write_tiny_model


def test_who_comes_first_writes_and_the_others_wait(tmp_path: Path) -> None:
    begun, may_end, written = threading.Event(), threading.Event(), []

    def write(folder: Path) -> None:
        begun.set()
        assert may_end.wait(60)
        folder.mkdir()
        (folder / "file").write_text("whole")
        written.append(folder)

    found: list[str] = []
    asked = [
        threading.Thread(target=lambda: found.append((written_once(tmp_path / "a", write) / "file").read_text()))
        for _ in range(3)
    ]
    for one in asked:
        one.start()
    assert begun.wait(60)
    may_end.set()
    for one in asked:
        one.join(60)
    assert found == ["whole"] * 3 and len(written) == 1


def test_what_was_left_half_done_is_written_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        written_once(tmp_path / "a", fail)
    written_once(tmp_path / "a", lambda folder: folder.mkdir())
    assert not list((tmp_path / "a").iterdir())


def test_a_tiny_model_may_be_changed_where_it_was_asked_for(tmp_path: Path) -> None:
    one, other = (write_tiny_model(tmp_path / name, "llama") for name in ("one", "other"))
    (one / "config.json").write_text("{}")
    assert (other / "config.json").read_text() != "{}"
    third = write_tiny_model(tmp_path / "third", "llama")
    assert (third / "config.json").read_text() == (other / "config.json").read_text()
