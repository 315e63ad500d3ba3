"""The model that the ring's tests of forming share."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_models import write_tiny_model


def tiny_mixtral(folder: Path) -> Path:
    """A random Mixtral of eight experts per layer."""
    return write_tiny_model(folder / "tiny-mixtral", "mixtral", num_local_experts=8)
