"""Starting further processes of this program's own modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ModuleStarter = Callable[..., subprocess.Popen[bytes]]
"""A function that is called as :func:`start_module`."""


def start_module(
    module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``, with ``environment`` besides this process's own; ``options`` are Popen's.

    The child finds the packages where this process found them, in whatever folder it starts. Raises OSError.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        # -P: somebody's folder named ``engine``, in which this was started, is not our engine.
        [sys.executable, "-P", "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        **options,
    )
