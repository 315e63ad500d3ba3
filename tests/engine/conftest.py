"""Fixtures for tests of engines and sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.tiny_gguf import whole_blocks
from tests.support.tiny_models import ENDLESS, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers do not end before they are stopped."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(folder, "mixtral", max_position_embeddings=ENDLESS, eos_token_id=None)


@pytest.fixture
def sources(tiny_model: Callable[..., Path]) -> Callable[[str], Path]:
    """The tiny model of a family, whose rows are whole blocks of any number format. Not to be changed."""
    return lambda family: tiny_model(family, **whole_blocks(family))


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of torch's kernels runs is a setting of the process, which ranks that are threads would take from each
    other."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
