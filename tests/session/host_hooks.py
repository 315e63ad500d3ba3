"""What happens in engine processes of the host's tests; see :mod:`hooked_engine`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

from engine import host
from engine.cluster.network import ClusterNetwork
from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.ipc.messages import Done, NetworkState, Plan, Pull
from engine.ipc.pipes import Pipes
from engine.session import plan_model
from engine.session.session import Session


def with_a_child() -> EngineParts:
    """A Pull starts a process and waits for it."""

    def sleeping(self: host.Host, task: host.Task, request: Pull) -> NoReturn:
        child = subprocess.Popen([sys.executable, "-c", "import time; print(1); time.sleep(600)"])
        task.report(str(child.pid), 0, 0, "")
        child.wait()
        raise AssertionError("the child ended")

    host.Host._pull = sleeping  # type: ignore[method-assign]
    return THE_PRODUCT


def noisy() -> EngineParts:
    """Everything in it prints: Python, native code, the system and a child."""
    claim = host.claim_standard_streams

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

    def claim_and_be_noisy(log: Path) -> Pipes:
        pipes = claim(log)
        threading.Thread(target=noise, daemon=True).start()
        return pipes

    host.claim_standard_streams = claim_and_be_noisy
    return THE_PRODUCT


def failing_answers() -> EngineParts:
    def bug(*_: object) -> NoReturn:
        raise ZeroDivisionError("division by\nzero")

    Session.generate = bug  # type: ignore[method-assign]
    return THE_PRODUCT


def answering_plans_with(kind: str) -> EngineParts:
    """What no frame can hold."""
    details = {"number": 2**64, "surrogate": "\ud800", "object": object(), "long": "x" * 2**27}

    def answer(request: Plan, *_: object) -> Done:
        return Done(id=request.id, path="x", detail=details[kind])  # type: ignore[arg-type]

    plan_model.plan_model = answer  # type: ignore[assignment]
    return THE_PRODUCT


def failing_thread() -> EngineParts:
    def fail(self: ClusterNetwork, request_id: int = 0) -> NetworkState:
        raise LookupError("nobody caught this")

    ClusterNetwork.state = fail  # type: ignore[method-assign]
    return THE_PRODUCT
