"""``bench ring``: tables 3 and 4 of the paper of private LLMs on Apple Silicon, with processes on this machine.

The nodes are engine processes of their own, on loopback, which share this machine's cores and memory: what can be
compared is how the methods' parts relate, not how many tokens a cluster would write. Beside every measurement stands
what the model of the cluster predicted before the ring was formed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.bench.decode import bench_decode
from engine.bench.running import weight_bytes_per_token
from engine.bench.setting import WARM_UP_STEPS, Setting, random_tokens, read_prompt, steps
from engine.bench.spread import figure
from engine.errors import Cancelled, ModelError
from engine.experts.kernels.pool import physical_cores
from engine.loading import alone, find_folder, load_model
from engine.machine import processor
from engine.messages import Bench, BenchResult, Load, OpenNetwork, PhaseTimes
from engine.messages.ring import LoadingName, RingChoice, RingFacts, RingMode
from engine.models.opening import open_model
from engine.models.sizes import sizes_of
from engine.planning.ring_speed import Compared, PassTime, compare
from engine.progress import ProgressCallback
from engine.ring.forming import RingFormer, Trial
from engine.ring.head_model import RingModel
from engine.ring.local_ring import NETWORK, LocalRing, temporary_home
from engine.ring.network import Network
from engine.runtimes import pick_runtime
from engine.runtimes.protocol import LoadedModel, Runtime

STEPS = 24
"""Decoded per round."""
PROMPT = 32
MOST_NODES = 8
THERE_S = 30.0


@dataclass(frozen=True)
class Method:
    """A version of the paper's table 3. P, prestacking, is how every model lies here; the naive one calls its experts
    one by one instead."""

    name: str
    mode: RingMode
    loading: LoadingName
    one_by_one: bool = False


NAIVE = Method("naive", "central", "selected", one_by_one=True)
BUSY_FULL = Method("P-L_B", "central", "busy-full")
DECENTRALISED = Method("P-L_R-D", "fast", "router-aided")
TABLE_3 = (NAIVE, BUSY_FULL, DECENTRALISED)


@dataclass(frozen=True)
class Row:
    """What one method took on so many nodes: seconds per token, the head's. ``predicted`` None: nothing to go by."""

    method: str
    nodes: int
    measured: PassTime
    low: float
    high: float
    predicted: PassTime | None
    compared: Compared | None
    ring: RingFacts | None


def bench_ring(request: Bench, report: ProgressCallback, cancelled: Callable[[], bool]) -> BenchResult:
    """The methods of table 3 on the fewest nodes asked for, then the last of them on more (table 4).

    Raises ModelError (bad-input), Cancelled.
    """
    if not request.nodes or not all(2 <= nodes <= MOST_NODES for nodes in request.nodes):
        raise ModelError(
            f"A ring on one machine is measured with 2 to {MOST_NODES} processes, not {request.nodes}.",
            kind="bad-input",
        )
    name, folder = find_folder(request.load.model, report, cancelled)
    counts = sorted(set(request.nodes))
    plan = [(method, counts[0]) for method in TABLE_3] + [(DECENTRALISED, count) for count in counts[1:]]
    with temporary_home() as home:
        (home / NETWORK).mkdir(parents=True, mode=0o700)
        # The same in every row: what is compared is nodes, not threads.
        threads = max(1, physical_cores() // counts[-1])
        bench = _Bench(request, name, folder, threads, report, cancelled)
        rows = [bench.by_itself()]
        with LocalRing(home, counts[-1] - 1, [folder]) as ring:
            network = Network(lambda event: None, home / NETWORK)
            try:
                network.answer(OpenNetwork(id=0, name="head", listen="127.0.0.1:0", peers=ring.addresses))
                ids = [identity.node_id for identity in ring.identities[1:]]
                _until_there(network, len(ids), cancelled)
                for method, nodes in plan:
                    report(f"{method.name} on {nodes} nodes", len(rows) - 1, len(plan), "")
                    rows.append(bench.together(network, method, ids[: nodes - 1]))
            finally:
                network.close()
    return _result(request, name, threads, rows)


def _until_there(network: Network, count: int, cancelled: Callable[[], bool]) -> None:
    by = time.monotonic() + THERE_S
    while sum(peer.state == "ready" for peer in network.state().peers) < count:
        if cancelled():
            raise Cancelled("The benchmark was stopped.")
        if time.monotonic() > by:
            raise ModelError("The processes on this machine do not find each other.", kind="internal")
        time.sleep(0.05)


class _Bench:
    def __init__(
        self,
        request: Bench,
        name: str,
        folder: Path,
        threads: int,
        report: ProgressCallback,
        cancelled: Callable[[], bool],
    ) -> None:
        self._rounds = request.rounds
        self._name = name
        self._folder = folder
        self._threads = threads
        self._report = report
        self._cancelled = cancelled
        as_node = alone(msgspec.structs.replace(request.load, partitioning="ring"))
        self._runtime, _ = pick_runtime(request.load.runtime, folder, as_node)
        self._load = msgspec.structs.replace(
            as_node,
            runtime=self._runtime.name,
            keep_resident=False,
            cpu_threads=threads,
        )

    def by_itself(self) -> Row:
        """One node without a ring, and what a layer costs there beside its weights, for the predictions."""
        model = load_model(self._runtime, self._name, self._folder, self._load, self._report)
        try:
            # Keeps what a layer costs here beside its weights: the predictions rest on it.
            bench_decode(self._setting(model), 0)
            return Row("one node", 1, *self._measured(model), None, None, None)
        finally:
            model.close()

    def together(self, network: Network, method: Method, followers: Sequence[str]) -> Row:
        nodes = len(followers) + 1
        choice = RingChoice(
            nodes=list(followers),
            mode=method.mode,
            loading=method.loading,
            exchange="tls",
            overlap=method is DECENTRALISED and nodes > 2,
            even_if_slower=True,
        )
        load = msgspec.structs.replace(self._load, ring=choice)
        trial = Trial(method.one_by_one, self._threads, max(1.0, physical_cores() / self._threads))
        former = _former(network, self._name, self._folder, self._runtime, load, trial)
        model = RingModel(self._name, former, self._report)
        try:
            taken, low, high = self._measured(model)
            facts = model.facts.ring
        finally:
            model.close()
        predicted = former.decision.step if former.decision is not None else None
        compared = compare(predicted, taken) if predicted is not None else None
        return Row(method.name, nodes, taken, low, high, predicted, compared, facts)

    def _setting(self, model: LoadedModel) -> Setting:
        sizes = sizes_of(open_model(self._folder), self._load.dtype)
        return Setting(
            model=model,
            facts=model.facts,
            rounds=self._rounds,
            prefill_chunk=self._load.prefill_chunk,
            threads=self._load.cpu_threads or physical_cores(),
            weight_bytes=weight_bytes_per_token(model.facts, sizes),
            report=self._report,
            cancelled=self._cancelled,
        )

    def _measured(self, model: LoadedModel) -> tuple[PassTime, float, float]:
        """Medians over the rounds of a token's time in its parts, and the fastest and slowest round's seconds."""
        setting = self._setting(model)
        prompt = random_tokens(1, min(PROMPT, setting.prompt_tokens(STEPS + WARM_UP_STEPS)), model.facts.vocabulary)
        parts = []
        for index in range(self._rounds):
            rows = model.start()
            read_prompt(setting, rows, prompt)
            model.recorder.enabled = True
            model.recorder.reset()
            steps(setting, rows, STEPS, seed=100 + index)
            parts.append(parts_of(model.recorder.frame(0).decode))
            model.recorder.enabled = False
            del rows
        seconds = [part.seconds for part in parts]
        middle = PassTime(
            statistics.median(part.moe_s for part in parts),
            statistics.median(part.exchange_s for part in parts),
            statistics.median(part.other_s for part in parts),
        )
        return middle, min(seconds), max(seconds)


def parts_of(decode: PhaseTimes) -> PassTime:
    """Seconds per token as table 3 splits them. Waiting for the slowest node counts as communication."""
    experts = sum(layer.experts for layer in decode.layers) / 1000.0
    communication = sum(layer.exchange + layer.wait for layer in decode.layers) / 1000.0
    return PassTime(experts, communication, max(0.0, decode.per_token / 1000.0 - experts - communication))


def _former(network: Network, name: str, folder: Path, runtime: Runtime, load: Load, trial: Trial) -> RingFormer:
    node = network.node
    surveyor = network.surveyor(node.identity.node_id, folder, load)
    return RingFormer(node, name, folder, runtime, load, surveyor, trial)


def _result(request: Bench, name: str, threads: int, rows: Sequence[Row]) -> BenchResult:
    table: list[list[str | int | float | None]] = []
    for row in rows:
        took = row.measured
        table.append(
            [
                row.method,
                row.nodes,
                figure(took.moe_s * 1e3),
                figure(took.exchange_s * 1e3),
                figure(took.other_s * 1e3),
                f"{figure(took.seconds * 1e3)} ({figure(row.low * 1e3)}–{figure(row.high * 1e3)})",
                figure(took.tokens_per_s),
                figure(row.predicted.tokens_per_s) if row.predicted is not None else None,
                f"{row.compared.error * 100:+.0f} %" if row.compared is not None else None,
            ]
        )
    notes = [
        f"{processor()}: the nodes are processes of this machine, each with {threads} "
        f"thread{'s' * (threads != 1)}, and share its {physical_cores()} cores and its memory.",
        "Milliseconds per token, the head's; waiting for the slowest node counts as communication. The predicted time "
        "was made before the ring was formed; its error is of the time of a token.",
        "naive and P-L_B are central, P-L_R-D is decentralised (paper on Apple Silicon, tables 3 and 4).",
    ]
    return BenchResult(
        id=request.id,
        title=f"Rings on this machine, {name}",
        columns=["method", "nodes", "MoE", "communication", "other", "ms/token", "tokens/s", "predicted", "error"],
        rows=table,
        notes=notes,
        data={
            "model": name,
            "rounds": request.rounds,
            "threads_per_node": threads,
            "steps_per_round": STEPS,
            "rows": [
                {
                    "method": row.method,
                    "nodes": row.nodes,
                    "moe_s": row.measured.moe_s,
                    "communication_s": row.measured.exchange_s,
                    "other_s": row.measured.other_s,
                    "predicted_s": row.predicted.seconds if row.predicted is not None else None,
                    "predicted_moe_s": row.predicted.moe_s if row.predicted is not None else None,
                    "predicted_communication_s": row.predicted.exchange_s if row.predicted is not None else None,
                    "error": row.compared.error if row.compared is not None else None,
                    "within_25_percent": row.compared.within if row.compared is not None else None,
                }
                for row in rows
            ],
        },
    )
