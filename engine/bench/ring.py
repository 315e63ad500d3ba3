"""``bench ring``: tables 3 and 4 of the paper of private LLMs on Apple Silicon, with processes on this machine.

The nodes are separate engine processes on loopback, which share this machine's cores and memory. The figures therefore
compare the methods, not the speed of a cluster. Beside every measurement is the prediction of the cluster's model: as
planned before the ring was formed, and with the terms that were measured on one node alone and on the exchange of all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.bench.local_ring import NETWORK, Launcher, LocalRing, bound, cores_here, launch_python, shared_out
from engine.bench.running import weight_bytes_per_token
from engine.bench.subject import WARM_UP_STEPS, BenchSubject, random_tokens, read_prompt, steps
from engine.bench.synthetic_moe import MoeShape, write_moe
from engine.bench.throughput import bench_decode
from engine.calibration.samples import figure
from engine.calibration.synthetic_experts import experts_at_once
from engine.cluster.all_gather import RingLayers
from engine.cluster.head.epoch_specs import Trial
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.head_model import RingModel
from engine.cluster.network import ClusterNetwork
from engine.cluster.transport.exchange import Buffer
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import Bench, BenchResult, OpenNetwork, PhaseTimes
from engine.ipc.messages.ring import ExchangeName, LoadingName, RingChoice, RingFacts, RingMode
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.folders.sizes import sizes_of
from engine.models.store.catalogue import STARTER
from engine.moe.expert_parallel import HEAD, RankContext
from engine.moe.kernels.pool import physical_cores
from engine.planning.memory import ModelSizes
from engine.planning.placement import Placement
from engine.planning.ring_speed import ALLOWED_ERROR, PassTime, StepTerms, measured_costs, relative_error
from engine.runtimes import runtime_named
from engine.runtimes.choosing import choose_runtime, on_one_machine
from engine.runtimes.common.loading import load_model
from engine.runtimes.model_headers import read_headers
from engine.runtimes.protocol import LoadedModel, RingPlace
from engine.session.loading import find_folder
from engine.system.machine import processor
from engine.system.temporary_folders import temporary_folder

STEPS = 24
"""Decoding steps per round."""
PROMPT = 32
MOST_NODES = 8
THERE_S = 120.0
"""Maximum seconds in which the processes of a ring find each other; they take one on a quiet machine."""
SWEEPS = 2
"""Number of times that each ring is formed. The second time is in the opposite order, so that warming up and other
programs affect all rings alike."""
TRIES = 2
"""Attempts to form a ring that loses a node meanwhile."""
MADE_UP = "synthetic-moe"


@dataclass(frozen=True)
class RingMethod:
    """A version of the paper's table 3. Every model is prestacked (P) here; the naive version calls its experts one by
    one instead. ``exchange``: the paper's decentralised version has the envoy."""

    name: str
    mode: RingMode
    loading: LoadingName
    one_by_one: bool = False
    exchange: ExchangeName = "tls"


NAIVE = RingMethod("naive", "central", "selected", one_by_one=True)
BUSY_FULL = RingMethod("P-L_B", "central", "busy-full")
DECENTRALISED = RingMethod("P-L_R-D", "fast", "router-aided", exchange="envoy")
OVER_TLS = RingMethod("P-L_R-D, TLS", "fast", "router-aided")
"""The same method over the exchange that this program would choose."""
TABLE_3 = (NAIVE, BUSY_FULL, DECENTRALISED)


@dataclass
class Samples:
    """Measurements of one method on a number of nodes, per token. Lists have an entry per round; the rest is of the
    last formed ring."""

    method: RingMethod | None
    """Method of the ring; None: one node by itself."""
    nodes: int
    in_parts: bool = False
    """Whether the node runs as a node of a ring does, interrupted at every MoE layer, but with no other node."""
    parts: list[PassTime] = field(default_factory=list)
    planned: PassTime | None = None
    terms: StepTerms | None = None
    ring: RingFacts | None = None

    def median(self) -> PassTime:
        return PassTime(
            statistics.median(part.moe_s for part in self.parts),
            statistics.median(part.exchange_s for part in self.parts),
            statistics.median(part.other_s for part in self.parts),
        )


def bench_ring(
    request: Bench,
    report: ProgressCallback,
    cancelled: Callable[[], bool],
    made_up: MoeShape | None = None,
    launch: Launcher = launch_python,
) -> BenchResult:
    """Measure the methods of table 3 on the smallest number of nodes, then the last of them on more (table 4).

    Without a model in ``request``, the starter and a synthetic model of the shape ``made_up`` are measured. Raises
    ModelError (bad-input, disk), Cancelled.
    """
    if not request.nodes or not all(2 <= nodes <= MOST_NODES for nodes in request.nodes):
        raise ModelError(
            f"A ring on one machine is measured with 2 to {MOST_NODES} processes, not {request.nodes}.",
            kind="bad-input",
        )
    counts = sorted(set(request.nodes))
    wanted = request.load.model
    name, folder = find_folder(wanted or STARTER, report, cancelled)
    with temporary_folder("privatellm-head-") as home:
        models = [(name, folder)]
        if not wanted:
            models.append((MADE_UP, write_moe(home / MADE_UP, made_up or MoeShape(), report)))
        (home / NETWORK).mkdir(parents=True, mode=0o700)
        cores = cores_here()
        own = shared_out(cores, counts[-1])
        # The same in every row: what is compared is nodes, not threads.
        threads = request.load.cpu_threads or max(1, physical_cores() // counts[-1])
        # What several processes do at once is measured before this one is bound to a part of the cores.
        benches = [_Bench(request, name, folder, threads, report, cancelled) for name, folder in models]
        with (
            bound(own[0] if own else ()),
            LocalRing(home, counts[-1] - 1, [folder for _, folder in models], threads, own[1:], launch) as ring,
        ):
            network = ClusterNetwork(lambda event: None, home / NETWORK)
            try:
                network.answer(OpenNetwork(id=0, name="head", listen="127.0.0.1:0", peers=ring.addresses))
                ids = [identity.node_id for identity in ring.identities[1:]]
                _until_there(network, ids, cancelled)
                for bench in benches:
                    bench.measure(network, ids, counts)
            finally:
                network.close()
        rows = [row for bench in benches for row in bench.rows()]
    return result_of(request, threads, bool(own), len(cores) or physical_cores(), STEPS, rows)


def _until_there(network: ClusterNetwork, nodes: Sequence[str], cancelled: Callable[[], bool]) -> None:
    """Wait until all of ``nodes`` (ids) answer. Raises Cancelled, and ModelError after ``THERE_S``."""
    by = time.monotonic() + THERE_S
    while not set(nodes) <= {peer.node_id for peer in network.state().peers if peer.state == "ready"}:
        if cancelled():
            raise Cancelled("The benchmark was stopped.")
        if time.monotonic() > by:
            raise ModelError("The processes on this machine do not find each other.", kind="internal")
        time.sleep(0.05)


class _Bench:
    """Measures one model."""

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
        wanted = msgspec.structs.replace(request.load, model=name, partitioning="ring")
        self._runtime = runtime_named(choose_runtime(wanted, folder).name)
        self._load = msgspec.structs.replace(
            on_one_machine(wanted, self._runtime.name),
            runtime=self._runtime.name,
            keep_resident=False,
            cpu_threads=threads,
        )
        self._at_once = self._experts_at_once()
        self._plan: list[Samples] = []

    def measure(self, network: ClusterNetwork, ids: Sequence[str], counts: Sequence[int]) -> None:
        """Every method and number of nodes. ``network``: the head's, to which the other nodes' processes are known;
        ``ids``: theirs."""
        plan = self._plan = [
            Samples(None, 1),
            Samples(None, 1, in_parts=True),
            *(Samples(method, counts[0]) for method in (*TABLE_3, OVER_TLS)),
            *(Samples(DECENTRALISED, count) for count in counts[1:]),
        ]
        sweeps = min(SWEEPS, self._rounds)
        for sweep in range(sweeps):
            rounds = self._rounds // sweeps + (sweep < self._rounds % sweeps)
            for samples in plan if sweep % 2 == 0 else reversed(plan):
                said = _name_of(samples)
                self._report(f"{self._name}: {said}, nodes: {samples.nodes}", sweep, sweeps, "")
                if samples.method is None:
                    self._by_itself(samples, rounds)
                else:
                    self._together(network, samples, samples.method, ids[: samples.nodes - 1], rounds)

    def rows(self) -> list[RingRow]:
        """The measurements, in the order of the table. The other nodes' processes have ended."""
        # Another program may have disturbed either measurement.
        self._at_once = statistics.fmean((self._at_once, self._experts_at_once()))
        in_parts = self._plan[1].median()
        return [self._row(samples, in_parts) for samples in self._plan]

    def _experts_at_once(self) -> float:
        self._report("measuring experts", 0, 0, "")
        shape = read_headers(self._folder, self._load).shape
        processes = max(1, physical_cores() // self._threads)
        return 1.0 if shape is None else experts_at_once(shape, self._threads, processes)

    def _row(self, samples: Samples, in_parts: PassTime) -> RingRow:
        predicted = None
        if samples.terms is not None and samples.ring is not None:
            terms = samples.terms
            # Sharing out the routes and framing count as other there, and are in what was rehearsed.
            framing_s = max(0.0, terms.nodes[0].fence_s * terms.model.moe_layers - in_parts.exchange_s)
            computing = PassTime(in_parts.moe_s, 0.0, max(0.0, in_parts.other_s - framing_s))
            costs = measured_costs(terms.model, computing, machine="this")
            setting = replace(terms.setting, at_once=self._at_once)
            predicted = replace(terms.with_nodes(costs), setting=setting).step()
        seconds = [part.seconds for part in samples.parts]
        return RingRow(
            model=self._name,
            method=_name_of(samples),
            nodes=samples.nodes,
            measured=samples.median(),
            low=min(seconds),
            high=max(seconds),
            planned=samples.planned,
            predicted=predicted,
            at_once=self._at_once,
            exchange=samples.ring.exchange if samples.ring is not None else "",
            exchange_s=samples.ring.exchange_s if samples.ring is not None else None,
        )

    def _by_itself(self, samples: Samples, rounds: int) -> None:
        """One node without a ring, and what a layer costs there beside its weights, for the plans."""
        headers = read_headers(self._folder, self._load)
        layers = headers.profile.layers if headers.profile is not None else ()
        place = ring_of_one(layers, headers.sizes.experts) if samples.in_parts else None
        model = load_model(self._runtime, self._name, self._folder, self._load, self._report, place)
        try:
            if not samples.parts and not samples.in_parts:
                # Keeps what a layer costs here beside its weights: the plans rest on it.
                bench_decode(self._subject(model), 0)
            samples.parts += self._measured(model, rounds)
        finally:
            model.close()

    def _together(
        self, network: ClusterNetwork, samples: Samples, method: RingMethod, followers: Sequence[str], rounds: int
    ) -> None:
        model, former = self._formed(network, method, followers)
        try:
            samples.parts += self._measured(model, rounds)
            samples.ring = model.facts.ring
            if former.decision is not None:
                samples.planned, samples.terms = former.decision.step, former.terms
        finally:
            model.close()

    def _formed(
        self, network: ClusterNetwork, method: RingMethod, followers: Sequence[str]
    ) -> tuple[RingModel, RingFormer]:
        """A ring of all these nodes. Raises ModelError if one of them is left out again and again."""
        held = held_at_most(sizes_of(open_model(self._folder), self._load.dtype))
        choice = RingChoice(
            nodes=list(followers),
            shares=dict.fromkeys((network.node.identity.node_id, *followers), held),
            mode=method.mode,
            loading=method.loading,
            exchange=method.exchange,
            overlap=method.mode == "fast" and len(followers) > 1,
            even_if_slower=True,
            wait_s=0.0,
        )
        load = msgspec.structs.replace(self._load, ring=choice)
        trial = Trial(method.one_by_one, self._threads, self._at_once)
        reason = ""
        for _ in range(TRIES):
            # On a busy machine a process may not have answered for a moment.
            _until_there(network, followers, self._cancelled)
            node = network.node
            surveyor = network.surveyor(node.identity.node_id, self._folder, load)
            former = RingFormer(node, self._name, self._folder, self._runtime, load, surveyor, trial)
            model = RingModel(self._name, former, self._report)
            ring = model.facts.ring
            if ring is not None and len(ring.nodes) == len(followers) + 1:
                return model, former
            reason = " ".join(model.recorder.take_notices())
            model.close()
        raise ModelError(
            f"A ring of {len(followers) + 1} processes could not be formed on this machine: {reason}", kind="network"
        )

    def _subject(self, model: LoadedModel) -> BenchSubject:
        sizes = sizes_of(open_model(self._folder), self._load.dtype)
        return BenchSubject(
            model=model,
            facts=model.facts,
            rounds=self._rounds,
            prefill_chunk=self._load.prefill_chunk,
            threads=self._threads,
            weight_bytes=weight_bytes_per_token(model.facts, sizes),
            report=self._report,
            cancelled=self._cancelled,
        )

    def _measured(self, model: LoadedModel, rounds: int) -> list[PassTime]:
        """A token's time in its parts, the mean of each round's steps."""
        subject = self._subject(model)
        prompt = random_tokens(1, min(PROMPT, subject.prompt_tokens(STEPS + WARM_UP_STEPS)), model.facts.vocabulary)
        parts = []
        for index in range(rounds):
            rows = model.start()
            read_prompt(subject, rows, prompt)
            model.recorder.enabled = True
            model.recorder.reset()
            steps(subject, rows, STEPS, seed=100 + index)
            parts.append(parts_of(model.recorder.frame(0).decode))
            model.recorder.enabled = False
            del rows
        return parts


def held_at_most(model: ModelSizes) -> int:
    """Bytes of experts on one node: half of each layer's, rounded up, like the paper's nodes, which hold 8 of 16."""
    return -(-model.experts // 2) * model.moe_layers * model.slab_bytes


def _name_of(samples: Samples) -> str:
    if samples.method is not None:
        return samples.method.name
    return "one, in parts" if samples.in_parts else "one node"


def parts_of(decode: PhaseTimes) -> PassTime:
    """Seconds per token as table 3 splits them. Waiting for the slowest node counts as communication."""
    experts = sum(layer.experts for layer in decode.layers) / 1000.0
    communication = sum(layer.exchange + layer.wait for layer in decode.layers) / 1000.0
    return PassTime(experts, communication, max(0.0, decode.per_token / 1000.0 - experts - communication))


class LoneExchange:
    """An exchange of one node, which gets back what it sent. See
    :class:`engine.cluster.transport.exchange.Exchange`."""

    name = "none"
    rank = HEAD
    size = 1
    idle_s = 0.0

    def __init__(self) -> None:
        self._sent = b""

    def send(self, parts: Sequence[Buffer], capacity: int) -> None:
        self._sent = b"".join(parts)

    def receive(self) -> list[memoryview]:
        return [memoryview(self._sent)]

    def missing(self) -> list[int]:
        return []

    def close(self) -> None:
        return


def ring_of_one(layers: Sequence[int], experts: int) -> RingPlace:
    """The context of a single node that holds all ``experts`` of all MoE ``layers``, in fast mode."""
    placement = Placement(tuple(layers), 1, (((HEAD,),) * experts,) * len(layers))
    context = RankContext("alone", HEAD, placement, "fast")
    return RingPlace(context, RingLayers(context, LoneExchange()))


# --- the table -------------------------------------------------------------------------------------------------------


MEASURED = ("tokens/s", "ms/token", "MoE", "communication", "other")
COLUMNS = ("model", "method", "nodes", *MEASURED, "planned", "predicted", "error", "within 25 %")


@dataclass(frozen=True)
class RingRow:
    """The result of one method on a number of nodes: medians over the rounds, in seconds per token on the head.

    ``low`` and ``high`` are of the fastest and slowest round. ``planned`` was predicted before the ring was formed,
    ``predicted`` with the measurements of one node alone and of the exchange; None without a basis.
    """

    model: str
    method: str
    nodes: int
    measured: PassTime
    low: float
    high: float
    planned: PassTime | None = None
    predicted: PassTime | None = None
    at_once: float = 1.0
    """Number of nodes whose experts this machine runs in the time of one node's."""
    exchange: str = ""
    exchange_s: float | None = None


def result_of(
    request: Bench, threads: int, bound: bool, cores: int, steps: int, rows: Sequence[RingRow]
) -> BenchResult:
    """The table. ``bound``: each process had its own cores, of ``cores``."""
    where = "on cores of its own" if bound else f"sharing the {cores} cores"
    together = {row.model: f"{row.at_once:.1f} ({row.model})" for row in rows}
    notes = [
        f"{processor()}: the nodes are processes of this machine, each with {threads} "
        f"thread{'s' * (threads != 1)}, {where}, and all with one memory: at once they run "
        f"{' and '.join(together.values())} times the experts of one.",
        "Milliseconds per token, the head's, medians over the rounds (ms/token with its range); the rings were formed "
        "in turns. Waiting for the slowest node counts as communication.",
        "planned: tokens/s as predicted before the ring was formed, from experts like the model's, the rate of memory "
        "and the links. predicted: tokens/s from the step of one node that runs as in a ring but exchanges with nobody "
        "(one, in parts), its experts and all else apart, and from layers that all nodes rehearsed once they were "
        "joined; its error is of the time of a token.",
        "naive and P-L_B are central, P-L_R-D is decentralised (paper on Apple Silicon, tables 3 and 4). As there, a "
        "node of a ring holds at most half of each layer's experts, and P-L_R-D exchanges by the envoy; P-L_R-D, TLS "
        "is the same over TLS, as the central versions are.",
        *_within(rows),
    ]
    names = list(dict.fromkeys(row.model for row in rows))
    return BenchResult(
        id=request.id,
        title=f"Rings on this machine: {', '.join(names)}",
        columns=list(COLUMNS),
        rows=[_cells(row) for row in rows],
        notes=notes,
        data={
            "kind": "ring",
            "models": names,
            "processor": processor(),
            "rounds": request.rounds,
            "threads_per_node": threads,
            "cores": cores,
            "own_cores": bound,
            "steps_per_round": steps,
            "rows": [_figures(row) for row in rows],
        },
    )


def _cells(row: RingRow) -> list[str | int | float | None]:
    took = row.measured
    error = relative_error(row.predicted, took) if row.predicted is not None else None
    return [
        row.model,
        row.method,
        row.nodes,
        figure(took.tokens_per_s),
        f"{figure(took.seconds * 1e3)} ({figure(row.low * 1e3)}–{figure(row.high * 1e3)})",
        figure(took.moe_s * 1e3),
        figure(took.exchange_s * 1e3),
        figure(took.other_s * 1e3),
        figure(row.planned.tokens_per_s) if row.planned is not None else None,
        figure(row.predicted.tokens_per_s) if row.predicted is not None else None,
        f"{error * 100:+.0f} %" if error is not None else None,
        ("yes" if abs(error) <= ALLOWED_ERROR else "no") if error is not None else None,
    ]


def _within(rows: Sequence[RingRow]) -> list[str]:
    """A line that counts the predictions that came true; none without any."""
    counted = []
    for name in ("planned", "predicted"):
        pairs = [(time, row.measured) for row in rows if (time := getattr(row, name)) is not None]
        if pairs:
            within = sum(abs(relative_error(*pair)) <= ALLOWED_ERROR for pair in pairs)
            counted.append(f"{name} {within} of {len(pairs)}")
    return [f"Predictions within 25 % of the measured time of a token: {', '.join(counted)}."] if counted else []


def _figures(row: RingRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "method": row.method,
        "nodes": row.nodes,
        "total_s": row.measured.seconds,
        "low_s": row.low,
        "high_s": row.high,
        "at_once": row.at_once,
        "exchange": row.exchange,
        "exchange_s": row.exchange_s,
        **_parts("", row.measured),
        **_predicted("planned", row.planned, row.measured),
        **_predicted("predicted", row.predicted, row.measured),
    }


def _parts(before: str, time: PassTime) -> dict[str, float]:
    return {
        f"{before}moe_s": time.moe_s,
        f"{before}communication_s": time.exchange_s,
        f"{before}other_s": time.other_s,
    }


def _predicted(name: str, time: PassTime | None, measured: PassTime) -> dict[str, Any]:
    if time is None:
        return {f"{name}_s": None, f"{name}_error": None, f"{name}_within_25_percent": None}
    error = relative_error(time, measured)
    return {
        f"{name}_s": time.seconds,
        **_parts(f"{name}_", time),
        f"{name}_error": error,
        f"{name}_within_25_percent": abs(error) <= ALLOWED_ERROR,
    }
