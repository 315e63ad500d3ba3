"""``bench exchange``: the cost of one exchange through every transport, between processes on this machine.

Each node is a process with its own certificate; the links are those of a ring, on loopback. All transports are measured
in turns in the same run, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import hashlib
import secrets
import statistics
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from discovery.certificates import make_certificate
from engine.bench.exchange_node import (
    ExchangeTimes,
    NeighbourNode,
    NodeConnected,
    NodePlan,
    NodePort,
    NodeRound,
    NodeSetup,
    contribution,
)
from engine.calibration.samples import figure
from engine.cluster.transport.registry import TRANSPORTS, available_exchanges
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, BenchResult
from engine.ipc.messages.ring import ExchangeName
from engine.ipc.progress import ProgressCallback
from engine.system.machine import processor
from engine.system.processes import ModuleStarter, start_module

SIZES = (12 * 1024, 96 * 1024, 1 << 20)
COMPARED = (0, 1, 2, 5, *SIZES, (2 << 20) + 3)
"""Sizes in bytes of contributions that all exchanges must carry with equal results before they are measured."""
REPEATS = (100, 30, 10)
"""Exchanges of each size in one round."""
WARM = 5
MOST_NODES = 8
ANSWER_S = 60.0
"""Time in seconds after which a silent process is given up."""
TARGETS_S: dict[ExchangeName, float] = {"socket": 120e-6, "tls": 300e-6, "envoy": 400e-6}
"""Target for the median time of an exchange of 12 KiB between two nodes on loopback, in seconds."""
_MOST_LINE = 16 << 20
_Message = TypeVar("_Message")


@dataclass
class Measured:
    """The results for one number of nodes."""

    nodes: int
    seconds: dict[ExchangeName, dict[int, list[float]]] = field(default_factory=dict)
    """Seconds of every exchange, measured on the head, by its name and its size in bytes."""
    busy: dict[ExchangeName, float] = field(default_factory=dict)
    """Share of a core that a waiting node used, the busiest one's."""
    problems: dict[ExchangeName, str] = field(default_factory=dict)


def bench_exchange(
    request: Bench, report: ProgressCallback, cancelled: Callable[[], bool], start: ModuleStarter = start_module
) -> BenchResult:
    """Median and range of an exchange by transport, number of nodes and size. Needs no model.

    Raises ModelError (bad-input, network), Cancelled.
    """
    if not request.nodes or not all(2 <= nodes <= MOST_NODES for nodes in request.nodes):
        raise ModelError(
            f"An exchange is measured between 2 to {MOST_NODES} processes, not {request.nodes}.", kind="bad-input"
        )
    measured = []
    for index, nodes in enumerate(request.nodes):
        report("measuring exchanges", index, len(request.nodes), "")
        measured.append(measure_nodes(nodes, request.rounds, available_exchanges(), cancelled, start))
    return as_result(request, measured)


def measure_nodes(
    nodes: int,
    rounds: int,
    exchanges: Sequence[ExchangeName],
    cancelled: Callable[[], bool],
    start: ModuleStarter = start_module,
) -> Measured:
    """Start ``nodes`` processes, measure, and end them. Raises ModelError (network), Cancelled."""
    processes = [_NodeProcess(rank, start) for rank in range(nodes)]
    try:
        return _measure(processes, rounds, exchanges, cancelled)
    finally:
        for process in processes:
            process.close()


def _measure(
    processes: list[_NodeProcess], rounds: int, exchanges: Sequence[ExchangeName], cancelled: Callable[[], bool]
) -> Measured:
    result = Measured(len(processes))
    for process in processes:
        process.send(NodeSetup(rank=process.rank, certificate=process.certificate, private_key=process.private_key))
    neighbours = [
        NeighbourNode(certificate=process.certificate, port=process.receive(NodePort).port) for process in processes
    ]
    plan = NodePlan(
        epoch=secrets.token_hex(8), key=secrets.token_bytes(32), neighbours=neighbours, exchanges=list(exchanges)
    )
    connected = _ask_all(processes, plan, NodeConnected)
    common = [name for name in exchanges if all(name in one.exchanges for one in connected)]
    for one in connected:
        result.problems.update({name: one.problems[name] for name in exchanges if name in one.problems})
    _compare(processes, common)
    seconds: dict[ExchangeName, dict[int, list[float]]] = {name: defaultdict(list) for name in common}
    for _ in range(rounds):
        if cancelled():
            raise Cancelled("The benchmark was stopped.")
        wanted = NodeRound(exchanges=common, sizes=list(SIZES), repeats=list(REPEATS), warm=WARM)
        head = _ask_all(processes, wanted, ExchangeTimes)[0]
        for name in common:
            for size in SIZES:
                seconds[name][size] += head.seconds[name][str(size)]
    waiting = NodeRound(exchanges=common, sizes=[], repeats=[], warm=0, what="waiting")
    answers = _ask_all(processes, waiting, ExchangeTimes)
    result.seconds = seconds
    result.busy = {name: max(answer.busy[name] for answer in answers) for name in common}
    return result


def _compare(processes: Sequence[_NodeProcess], exchanges: list[ExchangeName]) -> None:
    """Through every exchange, every node must get the same bytes; raises ModelError (internal) if not."""
    wanted = NodeRound(exchanges=exchanges, sizes=list(COMPARED), repeats=[], warm=0, what="digests")
    answers = _ask_all(processes, wanted, ExchangeTimes)
    expected = hashlib.sha256()
    for size in COMPARED:
        for rank in range(len(processes)):
            part = contribution(rank, size)
            expected.update(len(part).to_bytes(8, "big") + part)
    for rank, answer in enumerate(answers):
        for name, found in answer.digests.items():
            if found != expected.hexdigest():
                raise ModelError(
                    f"Node {rank} got other bytes through the exchange “{name}” than were sent: this is a fault of the "
                    "program, report it.",
                    kind="internal",
                )


def _ask_all(processes: Sequence[_NodeProcess], message: msgspec.Struct, kind: type[_Message]) -> list[_Message]:
    for process in processes:
        process.send(message)
    return [process.receive(kind) for process in processes]


class _NodeProcess:
    """One node, its pipes, and its end."""

    def __init__(self, rank: int, start: ModuleStarter) -> None:
        self.rank = rank
        self.private_key, self.certificate = make_certificate()
        self._process = start(
            "engine.bench.exchange_node",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises ModelError (network) if the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost() from None

    def receive(self, kind: type[_Message]) -> _Message:
        """The node's next answer. Raises ModelError (network) if it is gone or silent for too long."""
        assert self._process.stdout is not None
        giving_up = threading.Timer(ANSWER_S, self._process.kill)
        giving_up.daemon = True
        giving_up.start()
        try:
            line = self._process.stdout.readline(_MOST_LINE)
        finally:
            giving_up.cancel()
        if not line:
            raise self._lost()
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise ModelError(f"Node {self.rank} of the benchmark sent something else ({error}).", "internal") from None

    def close(self) -> None:
        """End the process by closing its stdin, and kill it if that is not enough."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except OSError:
            self._process.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _lost(self) -> ModelError:
        return ModelError(
            f"Node {self.rank} of the benchmark ended or was silent for {ANSWER_S:g} s: run it again.", kind="network"
        )


def as_result(request: Bench, measured: Sequence[Measured]) -> BenchResult:
    """The table: a row per number of nodes and transport, microseconds as median (10 %–90 %)."""
    rows: list[list[str | int | float | None]] = []
    for ring in measured:
        for name, by_size in ring.seconds.items():
            cells = [_cell(by_size[size]) for size in SIZES]
            plain = "plain" if TRANSPORTS[name].plain_text else "encrypted"
            rows.append([ring.nodes, name, plain, *cells, f"{100 * ring.busy[name]:.0f} %"])
    sizes = [f"{size // 1024} KiB" for size in SIZES]
    return BenchResult(
        id=request.id,
        title="One exchange between processes on this machine, µs: median (10 %–90 %)",
        columns=["nodes", "exchange", "", *sizes, "CPU while waiting"],
        rows=rows,
        notes=[
            f"{processor()}; every node contributes as many bytes; loopback; the same bytes arrived through all.",
            *_notes(measured),
        ],
        data={"rounds": request.rounds, "measured": [_data(ring) for ring in measured]},
    )


def _cell(seconds: Sequence[float]) -> str:
    low, middle, high = (1e6 * value for value in percentiles(seconds))
    return f"{figure(middle)} ({figure(low)}–{figure(high)})"


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """10 %, median, 90 %. Raises ValueError for nothing."""
    if not seconds:
        raise ValueError("no exchange was measured")
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], statistics.median(ordered), ordered[round(0.9 * last)]


def _notes(measured: Sequence[Measured]) -> list[str]:
    notes = []
    for ring in measured:
        if ring.nodes == 2:
            for name, target in TARGETS_S.items():
                if name in ring.seconds:
                    median = statistics.median(ring.seconds[name][SIZES[0]])
                    word = "met" if median <= target else "missed"
                    notes.append(f"{name}: at most {1e6 * target:.0f} µs wanted for 12 KiB between two: {word}.")
        notes += [f"{name} between {ring.nodes}: {problem}" for name, problem in ring.problems.items()]
    return notes


def _data(ring: Measured) -> dict[str, Any]:
    return {
        "nodes": ring.nodes,
        "seconds": {
            name: {
                str(size): dict(zip(("p10", "median", "p90"), percentiles(values), strict=True), count=len(values))
                for size, values in sizes.items()
            }
            for name, sizes in ring.seconds.items()
        },
        "busy_while_waiting": dict(ring.busy),
        "problems": dict(ring.problems),
    }
