"""A model whose pages can be counted, and a look at what is left after each test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.models.folders.prepare import prepare
from tests.support.progress import quiet


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "residency"]


@pytest.fixture
def large(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A bank whose slabs are of many pages."""
    prepare(tiny_model("mixtral", hidden_size=192, intermediate_size=384), tmp_path / "bank", quiet)
    return tmp_path / "bank"
