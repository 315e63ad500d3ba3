"""The model that the ring's tests of forming share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.planning.calibration import Curve
from engine.planning.ring_nodes import NodeFacts
from tests.support.tiny_models import write_tiny_model


def tiny_mixtral(folder: Path) -> Path:
    """A random Mixtral of eight experts per layer."""
    return write_tiny_model(folder / "tiny-mixtral", "mixtral", num_local_experts=8)


def facts(**changes: Any) -> NodeFacts:
    values: dict[str, Any] = {
        "memory_total": 8_000_000_000,
        "memory_free": 6_000_000_000,
        "memory_read": 20e9,
        "disk_free": 10**10,
        "expert": Curve((1, 16), (1e-4, 2e-4)),
        "instruction_set": "avx512_bf16",
        "runtimes": ["native", "torch"],
        "processor": "a processor",
        "system": "Linux x86_64",
        "threads": 2,
        "machine": "one",
    }
    return NodeFacts(**(values | changes))
