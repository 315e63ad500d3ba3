"""A ring of processes whose hardware is sleeps: it starts the nodes, runs methods on them, and returns what they took.

The times are slept ``SLOW`` times as long as they are, and divided by that afterwards, so that what this machine itself
needs for an exchange weighs that much less: the nodes share two cores here, and would have their own elsewhere.
"""

from __future__ import annotations

import secrets
import statistics
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import msgspec

from benchmarks.papers.timed_node import Carrier, Pace, TimedPasses, TimedRun
from discovery.certificates import make_certificate
from engine.bench.exchange_node import NeighbourNode, NodePort, NodeSetup
from engine.moe.expert_parallel import Loading, Mode
from engine.planning.placement import Placement
from engine.system.processes import start_module

SLOW = 4.0
"""Factor by which everything is slept longer."""
ANSWER_S = 300.0
"""Time in seconds after which silent nodes are ended."""
_Message = TypeVar("_Message")


@dataclass(frozen=True)
class TimedMethod:
    """How a ring of ``placement.nodes`` nodes runs a model; the defaults are one token of DBRX, decentralised."""

    placement: Placement
    """Of one layer, which counts for all, or of all."""
    mode: Mode = "fast"
    loading: Loading = "router-aided"
    one_by_one: bool = False
    exchange: Carrier = "tls"
    layers: int = 40
    per_token: int = 4
    width: int = 6144
    rows: int = 1
    routes: Sequence[Sequence[Sequence[int]]] = ()
    shared_meanwhile: bool = False


@dataclass(frozen=True)
class TimedResult:
    """Seconds of the head per pass, medians, at the speed of the hardware."""

    seconds: float
    moe_s: float
    exchange_s: float
    """In the exchange, and waiting for it and for other nodes."""
    executed: float
    """Experts that the head executed per layer."""

    @property
    def other_s(self) -> float:
        return self.seconds - self.moe_s - self.exchange_s

    @property
    def per_s(self) -> float:
        """Passes per second."""
        return 1.0 / self.seconds


class TimedRing:
    """``nodes`` processes of this machine. Use as a context. Raises OSError if one cannot be started."""

    def __init__(self, nodes: int, slow: float = SLOW) -> None:
        self._slow = slow
        self._processes: list[subprocess.Popen[bytes]] = []
        self._members: list[NeighbourNode] = []
        try:
            for _ in range(nodes):
                module = "benchmarks.papers.timed_node"
                self._processes.append(start_module(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for rank, process in enumerate(self._processes):
                key, certificate = make_certificate()
                _send(process, NodeSetup(rank=rank, certificate=certificate, private_key=key))
                self._members.append(NeighbourNode(certificate=certificate, port=0))
            for rank, process in enumerate(self._processes):
                port = self._receive(process, NodePort).port
                self._members[rank] = msgspec.structs.replace(self._members[rank], port=port)
        except BaseException:
            self.close()
            raise

    def run(self, method: TimedMethod, pace: Pace, passes: int, warm: int = 1) -> TimedResult:
        """The head's times. Raises RuntimeError if a node ended."""
        slow = self._slow
        slept = {name: getattr(pace, name) * slow for name in pace.__struct_fields__}
        slept["wire_bytes_per_s"] = pace.wire_bytes_per_s / slow
        wanted = TimedRun(
            epoch=secrets.token_hex(8),
            key=secrets.token_bytes(32),
            members=self._members[: method.placement.nodes],
            exchange=method.exchange,
            holders=[[list(ranks) for ranks in layer] for layer in method.placement.holders],
            layers=method.layers,
            per_token=method.per_token,
            width=method.width,
            mode=method.mode,
            loading=method.loading,
            one_by_one=method.one_by_one,
            pace=Pace(**slept),
            passes=passes,
            warm=warm,
            rows=method.rows,
            routes=[[list(chosen) for chosen in step] for step in method.routes],
            shared_meanwhile=method.shared_meanwhile,
        )
        used = self._processes[: method.placement.nodes]
        for process in used:
            _send(process, wanted)
        head, *_ = [self._receive(process, TimedPasses) for process in used]
        return TimedResult(
            statistics.median(head.seconds) / slow,
            statistics.median(head.moe_s) / slow,
            statistics.median(head.exchange_s) / slow,
            head.executed,
        )

    def _receive(self, process: subprocess.Popen[bytes], kind: type[_Message]) -> _Message:
        assert process.stdout is not None
        giving_up = threading.Timer(ANSWER_S, process.kill)
        giving_up.daemon = True
        giving_up.start()
        try:
            line = process.stdout.readline()
        finally:
            giving_up.cancel()
        if not line:
            raise RuntimeError("a node of the timed ring ended; its reason is above")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.close()
            except OSError:
                process.kill()
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def __enter__(self) -> TimedRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _send(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()
