"""Puts what writes tiny models for the tests of runtimes on the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtimes"))
