"""What the tests of forked processes run in them, each instead of an engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn


def says() -> NoReturn:
    """How its process looks from inside."""
    facts = {
        "home": os.environ["PRIVATELLM_HOME"],
        "variables": len(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "pid": os.getpid(),
        "read": sys.stdin.read(),
        "imported": "engine.session.session" in sys.modules,
        "torch": "torch" in sys.modules,
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }
    print(json.dumps(facts))
    raise SystemExit(7)


def reads(status: int = 0) -> NoReturn:
    """To the end of its input."""
    sys.stdin.read()
    raise SystemExit(status)


def fails() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise ValueError


def says_whether_it_was_forked() -> NoReturn:
    print("engine.session.session" in sys.modules)
    raise SystemExit(0)


def imports_tests(path: str) -> NoReturn:
    """As the server of the workers does, and says what is left of that besides the modules."""
    from tests.support import collected_tests

    before = list(sys.path)
    collected_tests.import_tests([path])
    module = f"tests.support.{Path(path).stem}"
    print(module in sys.modules, "tests.conftest" in sys.modules, sys.path == before)
    raise SystemExit(0)
