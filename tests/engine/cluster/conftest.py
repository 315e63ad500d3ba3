"""Fixtures that the ring's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.membership import server
from tests.engine.cluster.linked_nodes import LinkedNodes
from tests.engine.cluster.paired_nodes import Nodes
from tests.support.eventually import PATIENCE_S, eventually


@pytest.fixture(autouse=True)
def _handshakes_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a paired one may need more than the seconds that a stranger gets."""
    patient = dict(server.SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": int(PATIENCE_S) * 1000}
    monkeypatch.setattr(server, "SERVER_OPTIONS", tuple(patient.items()))


@pytest.fixture
def linked_nodes() -> Iterator[Callable[..., LinkedNodes]]:
    made: list[LinkedNodes] = []

    def make(size: int, **options: Any) -> LinkedNodes:
        made.append(LinkedNodes(size, **options))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path / "nodes", "Anna", "Bob", "Carl", lend=True)
    eventually(nodes.ready)
    yield nodes
    nodes.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, "Anna", "Bob", lend=True)
    yield nodes
    nodes.close()
