"""Fixtures that the ring's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.cluster.linked_nodes import LinkedNodes


@pytest.fixture
def linked_nodes() -> Iterator[Callable[..., LinkedNodes]]:
    made: list[LinkedNodes] = []

    def make(size: int, **options: Any) -> LinkedNodes:
        made.append(LinkedNodes(size, **options))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()
