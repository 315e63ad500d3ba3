"""Puts the helpers of the other folders on the import path: faults are tested through the runtime and the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

for folder in ("session", "runtimes"):
    sys.path.append(str(Path(__file__).parent.parent / folder))

if TYPE_CHECKING:
    from ring_faults import Oracle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a module's rings."""
    from ring_faults import write_model

    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """What one machine by itself answers with that model."""
    from ring_faults import Oracle

    oracle = Oracle(tmp_path_factory.mktemp("alone") / "home", model)
    yield oracle
    oracle.engine.close()
