"""Every test of this folder has the fixtures of a chat."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _screens(screens: None) -> None:
    """They are those of ``tests/app/conftest.py``."""
