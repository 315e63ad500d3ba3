"""What a damaged file of the person's is called when it is kept aside."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path


def name_aside(path: Path) -> Path:
    """``<stem>.damaged-<time><suffix>`` beside ``path``, with a number if that is taken; nothing is renamed."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    aside, number = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    return aside
