"""What happens in engine processes of the host's tests; see :mod:`hooked_engine`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

from engine.cluster.parts import THE_PRODUCT, EngineParts, Moment
from engine.errors import ModelError
from engine.ipc.messages import Generate, Plan, Pull


def with_a_child() -> EngineParts:
    """A Pull starts a process and waits for it."""

    def observe(moment: Moment, *subjects: Any) -> None:
        match moment, subjects:
            case "request", (Pull(), report):
                child = subprocess.Popen([sys.executable, "-c", "import time; print(1); time.sleep(600)"])
                report(str(child.pid), 0, 0, "")
                child.wait()
                raise AssertionError("the child ended")

    return replace(THE_PRODUCT, observe=observe)


def noisy() -> EngineParts:
    """Everything in it prints: Python, native code, the system and a child."""

    def noise() -> None:
        native = ctypes.CDLL(None)
        for _ in range(2000):
            print("noise of python")
            print("complaint of python", file=sys.stderr)
            os.write(1, b"noise of the system\n")
            os.write(2, b"\x00\xff" * 20)
            native.puts(b"noise of native code")
            native.fflush(None)
        subprocess.run(["echo", "noise of a child"], check=True)
        assert sys.stdin.read() == ""
        print("noise is over")

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "serving":
            threading.Thread(target=noise, daemon=True).start()

    return replace(THE_PRODUCT, observe=observe)


def failing_answers() -> EngineParts:
    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "request" and isinstance(subjects[0], Generate):
            raise ZeroDivisionError("division by\nzero")

    return replace(THE_PRODUCT, observe=observe)


def answering_plans_with(kind: str) -> EngineParts:
    """What no frame can hold."""
    texts = {"surrogate": "\ud800", "long": "x" * 2**27}

    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "request" and isinstance(subjects[0], Plan):
            raise ModelError(texts[kind])

    return replace(THE_PRODUCT, observe=observe)


def failing_thread() -> EngineParts:
    def observe(moment: Moment, *subjects: object) -> None:
        if moment == "state":
            raise LookupError("nobody caught this")

    return replace(THE_PRODUCT, observe=observe)
