"""A pool of threads for the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.moe.kernels.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()
