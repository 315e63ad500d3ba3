"""Writes ``inventory.txt``: run by ``make inventory`` after a change of what privatellm offers or says."""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path(__file__).with_name("inventory.txt")


def main() -> None:
    from inventory_tables import inventory

    FILE.write_text("\n".join(inventory()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
    main()
