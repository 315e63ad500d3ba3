"""Fixtures that the ring's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from linked_nodes import LinkedNodes


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
def no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of test identities stay in the test's folder."""
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
