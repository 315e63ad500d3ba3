"""Puts the helpers of the other folders on the import path: faults are tested through the runtime and the process."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("host", "runtimes"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
