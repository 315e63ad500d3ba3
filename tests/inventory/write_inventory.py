"""Writes ``inventory.txt``, or with the argument ``logits`` ``logits.txt``: run by ``make inventory`` and by ``make
logits`` after a change of what privatellm offers and says, or of what models answer. Further arguments name the tiny
models whose logits are written anew."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("inventory.txt")
LOGITS = Path(__file__).with_name("logits.txt")


def write_inventory() -> None:
    from tests.inventory.inventory_tables import inventory

    FILE.write_text("\n".join(inventory()) + "\n", encoding="utf-8")


def write_logits(names: list[str]) -> None:
    """Takes some minutes, and needs the native kernels and mlx. ``names``: of the tiny models; empty: all."""
    from engine.moe.kernels.bindings import choose
    from tests.inventory.logits_of_models import FAMILIES, lines_of, outcomes

    kernels = choose("float32")
    if not kernels.native:
        sys.exit(f"There are no native kernels whose logits could be kept: {kernels.reason}")
    before = LOGITS.read_text("utf-8").splitlines() if names else []
    lines = [line for line in before if line.partition(",")[0] not in names]
    for family in names or FAMILIES:
        with tempfile.TemporaryDirectory() as home:
            os.environ["PRIVATELLM_HOME"] = f"{home}/home"
            lines += lines_of(list(outcomes(family, Path(home))))
    LOGITS.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    write_logits(sys.argv[2:]) if sys.argv[1:2] == ["logits"] else write_inventory()
