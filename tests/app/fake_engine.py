"""An engine for the tests of the screen: it answers from a script, and does what it is told when it is told."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from app.engine_client import EngineDied
from engine.ipc.messages import (
    AnyEvent,
    AnyRequest,
    Beam,
    BeamEstimate,
    BeamEstimates,
    BeamProgress,
    Cancel,
    CloseNetwork,
    CountTokens,
    DeviceMemory,
    Done,
    EstimateBeams,
    Failed,
    Finished,
    ForgetPeer,
    Generate,
    LendingFacts,
    ListPeers,
    Load,
    Loaded,
    MachineMeasured,
    MeasureMachine,
    ModelFacts,
    NetworkState,
    NodeId,
    Notice,
    OpenNetwork,
    Pair,
    PeerFacts,
    Piece,
    Plan,
    Planned,
    PlannedChoice,
    Prefill,
    Progress,
    Pull,
    Resize,
    RingChanged,
    Sample,
    ShowCode,
    Timing,
    TokensCounted,
    UnderWay,
    WarmUp,
    Watch,
)

FACTS = ModelFacts(
    name="starter", family="mixtral", runtime="torch", executor="local (torch, cpu)", device="cpu", dtype="bfloat16",
    layers=4, experts=4, experts_per_token=2, moe_layers=[0, 1, 2, 3], vocabulary=100, hidden=16, context_limit=2048,
    trunk_bytes=1, expert_bytes=1, key_value_bytes_per_token=1, parameters=393_000_000,
)  # fmt: skip


PLANNED = Planned(
    model="starter", family="mixtral", fits=True, tokens_per_s=96.4, prefill_tokens_per_s=1069.0,
    memory=[DeviceMemory(device="CPU", total=25_000_000_000, free=21_000_000_000, trunk=160_000_000,
                         experts=594_000_000, key_values=50_000_000, workspace=20_000_000)],
    choices=[PlannedChoice("runtime", "native", "no GPU is used and the model has the commonest shape"),
             PlannedChoice("threads", "2", "one per physical core")],
    basis="streaming read of 48 GB/s, measured here",
)  # fmt: skip


ME = NodeId(
    node_id="a1" * 32, name="laptop", listening=["10.0.0.1:47820"], words=["amber", "canyon", "lemon", "orbit"],
    key_storage="the system's keyring",
)  # fmt: skip
STUDIO = PeerFacts(
    node_id="b2" * 32, name="studio", state="ready", lends=True, addresses=["10.0.0.2:47820"],
    memory_total=128_000_000_000, memory_free=96_000_000_000, runtime="native avx512_bf16", version="0.1.0",
)  # fmt: skip
STRANGER = PeerFacts(
    node_id="c3" * 32, addresses=["10.0.0.3:47820"], words=["prism", "saddle", "cabin", "walrus", "fiddle", "kitchen"]
)


class FakeNetwork:
    """Machines that are found when the network is opened; ``codes`` says by which code one can be paired."""

    def __init__(self) -> None:
        self.peers = [STUDIO, STRANGER]
        self.codes = {STRANGER.node_id: "4711-2208"}
        self.names = {STRANGER.node_id: "mini"}
        self.opened: OpenNetwork | None = None
        self.code = ""
        self.problems: list[str] = []
        self.refusal = ""
        self.lending: LendingFacts | None = None

    def state(self, id: int = 0) -> NetworkState:
        there = self.peers if self.opened else [peer for peer in self.peers if peer.state != "found"]
        shown = there if self.opened else [msgspec.structs.replace(peer, state="paired") for peer in there]
        return NetworkState(
            id=id, me=ME if self.opened else msgspec.structs.replace(ME, listening=[]), open=self.opened is not None,
            peers=shown, code=self.code, code_seconds=118 if self.code else 0, code_tries=3 if self.code else 0,
            problems=self.problems if self.opened else [], lending=self.lending,
        )  # fmt: skip

    def answer(self, request: AnyRequest) -> AnyEvent | None:
        """What ends ``request``; None: it is none of the network's."""
        match request:
            case ListPeers():
                return self.state(request.id)
            case OpenNetwork() if self.refusal:
                return Failed(id=request.id, error=self.refusal, kind="network")
            case OpenNetwork():
                self.opened = request
            case CloseNetwork():
                self.opened = None
            case ShowCode():
                self.code = "1234-5678"
            case Pair() if self.codes.get(self._whole(request.peer)) != request.code:
                return Failed(id=request.id, error="The code is wrong; 2 tries are left.", kind="network")
            case Pair():
                return Done(id=request.id, path="", detail=self._pair(self._whole(request.peer)))
            case ForgetPeer():
                self.peers = [peer for peer in self.peers if peer.node_id != self._whole(request.peer)]
            case _:
                return None
        return Done(id=request.id, path="")

    def _whole(self, peer: str) -> str:
        return next((known.node_id for known in self.peers if known.node_id.startswith(peer)), peer)

    def _pair(self, node_id: str) -> str:
        name = self.names[node_id]
        self.peers = [
            msgspec.structs.replace(peer, name=name, state="ready") if peer.node_id == node_id else peer
            for peer in self.peers
        ]
        return name


def sampled(piece: str, sample: int) -> str:
    """The piece of answer ``sample`` of several, which all differ in capital letters."""
    return (piece, piece.upper(), piece.swapcase(), piece.title())[sample]


class FakeEngine:
    """``answer`` gives the pieces of each answer. ``gate`` (when set to an event) holds pieces back from the second on.

    ``dies_at`` names the piece before which the engine dies, once; ``turn_progress`` comes before the second piece.
    """

    def __init__(self, answer: Callable[[Generate], Sequence[str]] | None = None) -> None:
        self.on_notice: Callable[[Notice], None] | None = None
        self.on_network: Callable[[NetworkState], None] | None = None
        self.on_warm_up: Callable[[WarmUp], None] | None = None
        self.on_ring: Callable[[RingChanged], None] | None = None
        self.network = FakeNetwork()
        self.answer = answer or (lambda request: ["Paris", " is the", " capital."])
        self.thoughts: Sequence[str] = ()
        """Pieces of thoughts that come before each answer's pieces."""
        self.requests: list[AnyRequest] = []
        self.cancelled: set[int] = set()
        self.gate: asyncio.Event | None = None
        self.load_gate: asyncio.Event | None = None
        self.dies_at: int | None = None
        self.dies_loading = 0
        self.load_error: str | None = None
        self.resize_error: str | None = None
        self.load_errors: dict[str, str] = {}
        """By model."""
        self.generate_error: str | None = None
        self.facts = FACTS
        self.turn_progress: Progress | None = None
        self.load_progress = Progress(stage="weights", done=63, total=100, unit="layers")
        self.beam_steps: list[list[Beam]] = []
        self.timing: Timing | None = None
        self.planned: Planned | Failed = PLANNED
        self.counts: Callable[[str], int] | None = None
        """Gives the tokens of a text; None: they cannot be counted. The requests for it are not kept."""
        self.starts = 0
        self.start_gate: asyncio.Event | None = None
        self.pull_gate: asyncio.Event | None = None
        self.speed = 8.1
        self.under_way: UnderWay | None = None
        self.pull_error: str | None = None
        self.machine = MachineMeasured(memory_bytes=25_000_000_000, memory_read=24e9)
        self._ids = itertools.count(1)
        self._running = False

    def new_id(self) -> int:
        return next(self._ids)

    @property
    def running(self) -> bool:
        return self._running

    def die(self) -> None:
        self._running = False
        self.network.opened = None

    def tell_network(self) -> None:
        """As the engine does whenever something changed."""
        if self.on_network is not None:
            self.on_network(self.network.state())

    async def start(self) -> None:
        if self.start_gate is not None:
            await self.start_gate.wait()
        if not self._running:
            self.starts += 1
            self._running = True

    async def send(self, request: AnyRequest) -> None:
        if not self._running:
            raise EngineDied("The engine is not running.")
        self.requests.append(request)
        if isinstance(request, Cancel):
            self.cancelled.add(request.target)
            for gate in (self.gate, self.load_gate, self.pull_gate):
                if gate is not None:
                    gate.set()

    async def stream(self, request: AnyRequest) -> AsyncIterator[AnyEvent]:
        if not self._running:
            raise EngineDied("The engine is not running.")
        if isinstance(request, CountTokens):
            if self.counts is not None:
                yield TokensCounted(id=request.id, counts=[self.counts(text) for text in request.texts])
            return
        self.requests.append(request)
        answer = self.network.answer(request)
        if answer is not None:
            if isinstance(answer, Done):
                self.tell_network()
            yield answer
            return
        match request:
            case Load():
                events = self._load(request)
            case Generate():
                events = self._beams(request) if request.beams > 1 else self._generate(request)
            case EstimateBeams():
                events = self._estimate(request)
            case MeasureMachine():
                yield msgspec.structs.replace(self.machine, id=request.id)
                return
            case Pull():
                events = self._pull(request)
            case Resize() if self.resize_error is not None:
                yield Failed(id=request.id, error=self.resize_error, kind="memory")
                return
            case Resize(gpu_expert_bytes=nbytes):
                self.facts = msgspec.structs.replace(self.facts, gpu_expert_bytes=nbytes or 0)
                yield Loaded(id=request.id, facts=self.facts)
                return
            case Plan():
                yield msgspec.structs.replace(self.planned, id=request.id)
                return
            case _:
                raise AssertionError(request)
        async for event in events:
            yield event

    async def close(self) -> None:
        self._running = False

    def sent(self, kind: type) -> list[AnyRequest]:
        return [request for request in self.requests if isinstance(request, kind)]

    @property
    def watching(self) -> bool:
        watches = [request for request in self.requests if isinstance(request, Watch)]
        return bool(watches) and watches[-1].timing

    def _crash(self) -> None:
        self.die()
        raise EngineDied("The engine was killed (SIGKILL), most likely because memory ran out.")

    async def _load(self, request: Load) -> AsyncIterator[AnyEvent]:
        yield self._with_id(self.load_progress, request.id)
        if self.dies_loading:
            self.dies_loading -= 1
            self._crash()
        if self.load_gate is not None:
            await self.load_gate.wait()
        error = self.load_errors.get(request.model, self.load_error)
        if request.id in self.cancelled:
            error = "Loading was stopped."
        if error is not None:
            yield Failed(id=request.id, error=error, kind="model")
        else:
            yield Loaded(id=request.id, facts=self.facts)

    @staticmethod
    def _with_id(progress: Progress, id: int) -> Progress:
        return Progress(id=id, stage=progress.stage, done=progress.done, total=progress.total, unit=progress.unit)

    async def _generate(self, request: Generate) -> AsyncIterator[AnyEvent]:
        if self.generate_error is not None:
            yield Failed(id=request.id, error=self.generate_error, kind="context")
            return
        yield Prefill(id=request.id, done=20, total=20)
        text = reasoning = ""
        pieces = [*((thought, "") for thought in self.thoughts), *(("", piece) for piece in self.answer(request))]
        for count, (thought, piece) in enumerate(pieces, start=1):
            if self.turn_progress is not None and count == 2:
                yield self._with_id(self.turn_progress, request.id)
            if self.gate is not None and count > 1:
                await self.gate.wait()
            if self.dies_at == count:
                self.dies_at = None
                self._crash()
            if request.id in self.cancelled:
                break
            text, reasoning = text + piece, reasoning + thought
            thought_tokens = min(count, len(self.thoughts))
            for sample in range(request.samples):
                yield Piece(
                    id=request.id, text=sampled(piece, sample), tokens=count, tokens_per_s=self.speed,
                    reasoning=thought, reasoning_tokens=thought_tokens, reasoning_s=float(thought_tokens),
                    under_way=self.under_way, sample=sample,
                )  # fmt: skip
            await asyncio.sleep(0)
        if self.timing is not None and self.watching:
            yield self.timing
        found = self._finished(request, text, [])
        count = min(count, len(self.thoughts))
        found = msgspec.structs.replace(found, reasoning=reasoning, reasoning_tokens=count, reasoning_s=float(count))
        if request.samples > 1:
            texts = ["".join(sampled(piece, sample) for _, piece in pieces) for sample in range(request.samples)]
            cut = [each[: len(text) * len(each) // max(1, len(texts[0]))] for each in texts]
            samples = [
                Sample(text=each, token_ids=[1] * (number + 2), finish_reason=found.finish_reason)
                for number, each in enumerate(cut)
            ]
            found = msgspec.structs.replace(found, samples=samples)
        yield found

    def _finished(self, request: Generate, text: str, beams: list[Beam]) -> Finished:
        reason = "cancelled" if request.id in self.cancelled else "stop"
        return Finished(
            id=request.id, text=text, token_ids=[], finish_reason=reason, prompt_tokens=20, prefilled_tokens=20,
            completion_tokens=12, ttft_s=0.1, tokens_per_s=self.speed, beams=beams, sampling=request.sampling,
        )  # fmt: skip

    async def _beams(self, request: Generate) -> AsyncIterator[AnyEvent]:
        yield Prefill(id=request.id, done=20, total=20)
        beams: list[Beam] = []
        for step, candidates in enumerate(self.beam_steps, start=1):
            if self.gate is not None and step > 1:
                await self.gate.wait()
            if request.id in self.cancelled:
                break
            beams = candidates
            yield BeamProgress(id=request.id, step=step, beams=beams, tokens_per_s=self.speed)
            await asyncio.sleep(0)
        yield self._finished(request, beams[0].text if beams else "", beams)

    async def _estimate(self, request: EstimateBeams) -> AsyncIterator[AnyEvent]:
        estimates = [
            BeamEstimate(width, width * 190_000_000, width <= 12, round(1 + 0.12 * (width - 1), 2))
            for width in request.widths
        ]
        yield BeamEstimates(id=request.id, estimates=estimates, available_bytes=2_400_000_000)

    async def _pull(self, request: Pull) -> AsyncIterator[AnyEvent]:
        yield Progress(id=request.id, stage="downloading", done=420_000_000, total=1_000_000_000, unit="bytes")
        if self.pull_gate is not None:
            await self.pull_gate.wait()
        if request.id in self.cancelled:
            yield Failed(id=request.id, error="The download was stopped; it resumes where it was.", kind="network")
        elif self.pull_error is not None:
            yield Failed(id=request.id, error=self.pull_error, kind="network")
        else:
            yield Done(id=request.id, path="/models/x")
