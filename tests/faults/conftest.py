"""Rings of processes for tests of what goes wrong in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.ring_faults import Oracle, Ring


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the rings."""
    from tests.faults.ring_faults import write_model

    return write_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """What one machine by itself answers with that model."""
    from tests.faults.ring_faults import Oracle

    oracle = Oracle(tmp_path_factory.mktemp("alone") / "home", model)
    yield oracle
    oracle.engine.close()


@pytest.fixture(scope="module")
def ring_of_three() -> Iterator[Ring]:
    from tests.faults.ring_faults import Ring

    with Ring(2) as ring:
        yield ring


@pytest.fixture(scope="module")
def ring_of_two() -> Iterator[Ring]:
    from tests.faults.ring_faults import Ring

    with Ring(1) as ring:
        yield ring


@pytest.fixture
def three(ring_of_three: Ring, model: Path) -> Ring:
    """A head and two others that have formed a ring; the same processes for all tests of a module, as far as they
    live."""
    return ring_of_three.whole(model)


@pytest.fixture
def two(ring_of_two: Ring, model: Path) -> Ring:
    """A head and one other."""
    return ring_of_two.whole(model)
