"""A model that this machine lacks and a paired one that is lent has: it is copied from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

