"""The rate at which a disk is read, measured where experts exceed the memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.calibration import reading_rates
from engine.calibration.reading_rates import notice_beyond_memory, read_rate
from engine.models.formats.byte_map import FileMapping
from engine.models.formats.model_files import Experts
from tests.support.opened_experts import experts_of
from tests.support.tiny_models import write_tiny_model


def test_experts_that_fit_are_no_news(tmp_path: Path) -> None:
    experts = experts_of(write_tiny_model(tmp_path, "mixtral"))
    assert notice_beyond_memory("experts", experts.nbytes, (), experts.nbytes) is None


def _files(experts: Experts) -> Sequence[FileMapping]:
    found: Sequence[FileMapping] = getattr(experts, "mapped_files", ())
    assert found
    return found


def test_experts_that_do_not_fit_are_said_with_the_rate(tmp_path: Path) -> None:
    experts = experts_of(write_tiny_model(tmp_path, "mixtral", hidden_size=480, intermediate_size=1120))
    line = notice_beyond_memory(
        "experts", experts.nbytes, _files(experts), experts.nbytes - 1, measure=lambda path: 1.234e9
    )
    size = f"{experts.nbytes / 1e9:.1f} GB"
    assert line == (
        f"The model's {size} of experts do not fit in the {size} of memory that are free for it, so some are "
        "read from disk each time they are used: at 1.23 GB/s, as measured just now."
    )
    line = notice_beyond_memory("experts", experts.nbytes, _files(experts), 0, measure=lambda path: None)
    assert line is not None and line.endswith("each time they are used, which is slow.")


@pytest.fixture
def on_disk(tmp_path: Path) -> Callable[[int], Path]:
    """``on_disk(nbytes)``: a file whose pages can be dropped, which those that are still to be written cannot."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    if kind.strip() in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here")

    def written(nbytes: int) -> Path:
        file = tmp_path / "weights"
        file.write_bytes(os.urandom(nbytes))
        with file.open("rb") as opened:
            os.fdatasync(opened.fileno())
        return file

    return written


@pytest.mark.parametrize("nbytes", [20 * 2**20 + 13, 2**20, 3])
def test_a_rate_is_measured_on_the_file_itself(on_disk: Callable[[int], Path], nbytes: int) -> None:
    """It is in memory as it was just written, and is dropped from it."""
    rate = read_rate(on_disk(nbytes))
    assert rate is not None and rate > 0


def test_of_what_cannot_be_read_there_is_no_rate(tmp_path: Path) -> None:
    assert read_rate(tmp_path / "absent") is None
    (tmp_path / "empty").touch()
    assert read_rate(tmp_path / "empty") is None


def test_of_a_file_of_somebody_else_there_is_a_rate(
    on_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux then says of every page that it is in memory."""
    monkeypatch.setattr(os, "geteuid", lambda: 65_534)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(reading_rates._PagesInMemory, "any", lambda self, start: True)
    rate = read_rate(on_disk(2**20))
    assert rate is not None and rate > 0


def test_a_file_that_shrinks_meanwhile_ends_nothing(
    on_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = reading_rates._absent

    def shrinking(file: int, *arguments: Any) -> list[int]:
        found = absent(file, *arguments)
        os.truncate(f"/proc/self/fd/{file}", 0)
        return found

    monkeypatch.setattr(reading_rates, "_absent", shrinking)
    assert read_rate(on_disk(2**22)) is None


def test_what_is_cached_is_no_rate_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where nothing drops what is cached."""
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(3 * 2**20))
    file.read_bytes()
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert read_rate(file) is None
