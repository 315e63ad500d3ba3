"""An engine process that speaks the real frames and plays a script: what the client must cope with.

Run as a program with the name of a script. Requests are answered by what their text says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from engine.ipc.messages import (
    PROTOCOL_VERSION,
    AnswersSpeed,
    Beam,
    BeamProgress,
    Bench,
    BenchResult,
    Cancel,
    CloseNetwork,
    DeviceMemory,
    Done,
    Event,
    Failed,
    Finished,
    ForgetPeer,
    Generate,
    Hello,
    LendingFacts,
    ListPeers,
    Load,
    Loaded,
    ModelFacts,
    NetworkState,
    NodeId,
    NodeShard,
    Notice,
    OpenNetwork,
    Pair,
    PeerFacts,
    Piece,
    Plan,
    Planned,
    PlannedChoice,
    Prepare,
    Progress,
    Pull,
    ReasoningFacts,
    RingFacts,
    ShowCode,
    Shutdown,
    pack,
    request_reader,
)
from engine.pictures.sight import Sight


def emit(*events: Event) -> None:
    os.write(1, b"".join(map(pack, events)))


def finished(request: int, text: str, reason: str = "stop") -> Finished:
    return Finished(
        id=request, text=text, token_ids=[], finish_reason=reason, prompt_tokens=1, prefilled_tokens=1,
        completion_tokens=1, ttft_s=0.0, tokens_per_s=1.0,
    )  # fmt: skip


def facts(request: Load) -> ModelFacts:
    return ModelFacts(
        name=request.model, family="mixtral", runtime="torch", executor="local (torch, cpu)", device="cpu",
        dtype="float32", layers=2, experts=4, experts_per_token=2, moe_layers=[0, 1], vocabulary=10, hidden=8,
        context_limit=64, trunk_bytes=1, expert_bytes=1, key_value_bytes_per_token=1, parameters=2, load_s=0.5,
        notices=["no native kernel"],
        reasoning=ReasoningFacts(format="think") if "SCRIPTED_REASONING" in os.environ else None,
        sight=Sight("qwen3_5", 9, patch=16, merge=2, most=2048) if "SCRIPTED_SIGHT" in os.environ else None,
    )  # fmt: skip


def answer(request: Generate) -> None:
    words = request.messages[-1].content if request.messages else "echo:"
    match words.split(":")[0]:
        case "say":
            for number, word in enumerate(words.removeprefix("say:").split()):
                emit(Piece(id=request.id, text=word + " ", tokens=number + 1))
            emit(finished(request.id, words.removeprefix("say:")))
        case "many":
            count = int(words.removeprefix("many:"))
            for number in range(count):
                emit(Piece(id=request.id, text=f"{number} ", tokens=number + 1))
            emit(finished(request.id, "many"))
        case "think":
            emit(Piece(id=request.id, text="", tokens=1, reasoning="Hm.", reasoning_tokens=1))
            text = words.removeprefix("think:")
            if text:
                emit(Piece(id=request.id, text=text, tokens=2, reasoning_tokens=1))
            found = finished(request.id, text, "stop" if text else "length")
            emit(msgspec.structs.replace(found, reasoning="Hm.", reasoning_tokens=1, reasoning_s=0.5))
        case "late":
            emit(Piece(id=request.id, text="Hm.", tokens=1))
            emit(Piece(id=request.id, text="Four.", tokens=2, reasoning="Hm.", withdrawn=True))
            emit(msgspec.structs.replace(finished(request.id, "Four."), reasoning="Hm."))
        case "die":
            emit(Piece(id=request.id, text="last words", tokens=1))
            signal_or_status = int(words.removeprefix("die:"))
            if signal_or_status < 0:
                os.kill(os.getpid(), -signal_or_status)
            os._exit(signal_or_status)
        case "garbage":
            emit(Piece(id=request.id, text="before", tokens=1))
            os.write(1, b"\xff\xff\xff\xff this is no frame")
            time.sleep(60)
        case "mute":
            os.close(1)
            time.sleep(60)
        case "wait":
            emit(Piece(id=request.id, text="unended", tokens=1))
            if words == "wait:noted":
                emit(Notice(text="the answer began"))
        case "notice":
            emit(Notice(text=words.removeprefix("notice:")))
        case "fail":
            emit(Failed(id=request.id, error="It failed.", kind="model"))
        case "raw":
            emit(Piece(id=request.id, text="a\x1b[31", tokens=1))
            emit(Piece(id=request.id, text="mred\x1b]0;title\x07\x9b2J end\r", tokens=2))
            emit(finished(request.id, "a\x1b[31mred\x1b]0;title\x07\x9b2J end\r"))
        case "beams":
            emit(BeamProgress(id=request.id, step=1, beams=[]))
            beam = Beam(text="best \x1b[1mone", token_ids=[4, 5], score=-0.5, finished=True)
            emit(msgspec.structs.replace(finished(request.id, beam.text), beams=[beam]))
        case "bad":
            emit(Failed(id=request.id, error="Token id 9 is unknown.", kind="bad-input"))
        case "echo":
            emit(finished(request.id, msgspec.json.encode(request).decode()))
        case "orphan":
            child = subprocess.Popen(["sleep", "60"], stdout=1)
            emit(Piece(id=request.id, text=str(child.pid), tokens=1))
            os._exit(3)


STUDIO = PeerFacts(
    node_id="b2" * 32, name="stu\x1b[31mdio", state="paired", addresses=["10.0.0.2:47820"],
    memory_total=128_000_000_000, memory_free=96_000_000_000, runtime="native", problem="",
)  # fmt: skip
NetworkRequest = OpenNetwork | CloseNetwork | ShowCode | Pair | ForgetPeer | ListPeers
opened: list[OpenNetwork] = []


def network(id: int = 0, lending: LendingFacts | None = None) -> NetworkState:
    peer = msgspec.structs.replace(STUDIO, state="ready", lends=True) if opened else STUDIO
    me = NodeId(node_id="a1" * 32, name="laptop", listening=["127.0.0.1:47820"] if opened else [], words=["oak", "tea"])
    return NetworkState(
        id=id, me=me, open=bool(opened), peers=[peer], code="1234 5678" if opened and opened[0].lend else "",
        code_seconds=120, code_tries=3, lending=lending, problems=["no multicast was heard"] if opened else [],
    )  # fmt: skip


def answer_network(request: NetworkRequest, script: str) -> None:
    """Machines that are always the same; ``0000`` is a wrong code, ``in use`` a port that is taken."""
    match request:
        case ListPeers():
            emit(network(request.id))
        case OpenNetwork() if script == "in-use":
            emit(Failed(id=request.id, error="Port 47820 is in use: choose another with --listen.", kind="network"))
        case Pair(code="0000 0000"):
            emit(Failed(id=request.id, error="The code is wrong.", kind="network"))
        case ForgetPeer(peer="nobody"):
            emit(Failed(id=request.id, error="No paired machine is called nobody.", kind="network"))
        case OpenNetwork():
            opened.append(request)
            emit(Done(id=request.id, path=""), network())
            if request.lend:
                share = LendingFacts(
                    head="desk", model="mixtral", rank=1, nodes=2, experts=12, expert_bytes=637_000_000, stage="ready"
                )
                emit(network(lending=share))
            if script == "dies-when-open":
                os._exit(3)
        case CloseNetwork():
            opened.clear()
            emit(Done(id=request.id, path=""))
        case Pair() | ForgetPeer():
            emit(Done(id=request.id, path="", detail="studio"))
        case ShowCode():
            emit(Done(id=request.id, path=""), network())


RING = RingFacts(
    mode="exact", exchange="tls", loading="selected", tokens_per_s=21.3, alone_tokens_per_s=14.2, exchange_s=1.4e-4,
    nodes=[
        NodeShard(rank=0, node_id="a1" * 32, name="laptop", experts=640, expert_bytes=11_300_000_000,
                  trunk_bytes=1_900_000_000, memory_free=24_000_000_000, expected_experts=2.1),
        NodeShard(rank=1, node_id="b2" * 32, name="studio", experts=2432, expert_bytes=43_100_000_000,
                  trunk_bytes=1_900_000_000, memory_free=96_000_000_000, expected_experts=5.9),
    ],
)  # fmt: skip


def planned(request: Plan, shortfall: int = 0) -> Planned:
    """A plan that tells the request back in its choices."""
    return Planned(
        id=request.id, model=request.load.model, family="mixtral", fits=not shortfall, shortfall=shortfall,
        memory=[
            DeviceMemory(device="A GPU", total=8_000_000_000, free=7_500_000_000, trunk=3_000_000_000, workspace=500),
            DeviceMemory(device="CPU", total=0, free=0, experts=90_000_000_000),
        ],
        choices=[PlannedChoice("load", msgspec.json.encode(request.load).decode(), "as\x1b[31m asked")],
        tokens_per_s=None if shortfall else 12.345, prefill_tokens_per_s=None if shortfall else 678.9,
        answers=[] if shortfall else [AnswersSpeed(1, 12.345), AnswersSpeed(2, 20.0), AnswersSpeed(4, 31.5)],
        basis="nothing was measured" if shortfall else "measured",
        ring=RING if request.load.partitioning == "ring" else None,
    )  # fmt: skip


def benched(request: Bench) -> BenchResult:
    return BenchResult(
        id=request.id, title=f"{request.kind} of {request.load.model}", columns=["rows", "ms/step", "GPU, ms"],
        rows=[[1, "10.0 (9.00\u201311.0)", None], [12, "30.0", 2.5]], notes=["a\x1b[2J note"],
        data={"rounds": request.rounds, "nodes": request.nodes, "load": msgspec.to_builtins(request.load),
              "seconds": [0.01, 0.02]},
    )  # fmt: skip


def main(script: str) -> None:
    if script == "no-hello":
        sys.exit("cannot import anything")
    if script == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    emit(Hello(protocol=PROTOCOL_VERSION + (script == "other-version"), pid=os.getpid()))
    emit(Notice(text="hello from the script"))
    reader = request_reader()
    while data := os.read(0, 65536):
        for request in reader.feed(data):
            match request:
                case Generate():
                    answer(request)
                case Cancel() if script == "stubborn":
                    continue
                case Cancel():
                    emit(finished(request.target, "unended", "cancelled"))
                case Load() if script == "unloadable":
                    emit(Failed(id=request.id, error="The file is truncated.", kind="model"))
                case Load():
                    emit(Progress(id=request.id, stage="reading", done=1, total=2, unit="bytes"))
                    emit(Loaded(id=request.id, facts=facts(request)))
                case Pull() if script == "unreachable":
                    emit(Failed(id=request.id, error="There is no network.", kind="network"))
                case Pull() | Prepare():
                    # In one piece, so that the client has both before it has looked at either.
                    emit(
                        Progress(id=request.id, stage="fetching", done=1, total=2, unit="bytes"),
                        Done(id=request.id, path="/there", detail=f"{type(request).__name__} of {request.model}"),
                    )
                case Plan() if script == "too-large":
                    emit(planned(request, shortfall=3_000_000_000))
                case Plan():
                    emit(planned(request))
                case Bench() if script == "slow":
                    emit(Progress(id=request.id, stage="decoding", done=1, total=5))
                case Bench() if script == "unloadable":
                    emit(Failed(id=request.id, error="The file is truncated.", kind="model"))
                case Bench():
                    emit(Progress(id=request.id, stage="decoding", done=1, total=2), benched(request))
                case OpenNetwork() | CloseNetwork() | ShowCode() | Pair() | ForgetPeer() | ListPeers():
                    answer_network(request, script)
                case Shutdown() if script != "deaf":
                    return
                case _:
                    continue
    while script == "deaf":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
