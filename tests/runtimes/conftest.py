"""Puts the helpers of the ring's tests (`memory_exchange`, `ring_places`) on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))
