"""How many random examples a test looks at."""

from __future__ import annotations

import os

SOAKED = 5
"""Factor by which ``make test-soak``, whose examples are new ones, looks at more."""


def examples(few: int) -> int:
    """``few`` in ``make test``, for tests of which each example takes long."""
    return few * SOAKED if "NEW_EXAMPLES" in os.environ else few
