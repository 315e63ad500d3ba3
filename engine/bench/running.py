"""One benchmark of a loaded model, from the request's kind to its table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.bench.experts import bench_experts
from engine.bench.subject import BenchSubject
from engine.bench.throughput import bench_beams, bench_decode, bench_prefill
from engine.calibration.memory_rate import BUFFER_BYTES
from engine.calibration.samples import OtherPrograms
from engine.errors import ModelError
from engine.ipc.messages import Bench, BenchResult, ExpertMovement, Load, Message, ModelFacts
from engine.ipc.progress import ProgressCallback
from engine.models.folders.opening import open_model
from engine.models.text.tokenizer import load_tokenizer
from engine.moe.kernels.pool import physical_cores
from engine.planning.memory import ModelSizes
from engine.runtimes.choosing import on_one_machine
from engine.runtimes.model_headers import read_headers
from engine.system.machine import processor

if TYPE_CHECKING:
    from engine.session.session import Session

MOST_ROUNDS = 1000


def check_bench(request: Bench) -> None:
    """Raises ModelError (bad-input) for an impossible number of rounds."""
    if not 1 <= request.rounds <= MOST_ROUNDS:
        raise ModelError(
            f"A benchmark of {request.rounds} rounds means nothing; choose 1 to {MOST_ROUNDS}.", kind="bad-input"
        )


def load_for(request: Bench) -> Load:
    """The Load for ``request``: measuring experts needs the GPU's memory for itself."""
    if request.kind != "experts":
        return request.load
    # By default on the CPU, whose kernels are measured; mlx, where it was chosen, has nothing but its GPU.
    return on_one_machine(request.load, request.load.runtime)


def run_bench(
    request: Bench,
    session: Session,
    folder: Path,
    report: ProgressCallback,
    cancelled: Callable[[], bool],
    buffer_bytes: int | None = None,
) -> BenchResult:
    """Measure ``session``'s model, which is loaded from ``folder``. Raises ModelError, and Cancelled if stopped.

    The session's cache is not changed, as every measurement has its own rows. ``buffer_bytes`` are read to measure the
    rate of memory; None: as many as make it exact.
    """
    ran = msgspec.structs.replace(request.load, runtime=session.facts.runtime)
    sizes = read_headers(folder, ran).sizes
    threads = request.load.cpu_threads or physical_cores()
    subject = BenchSubject(
        model=session.model,
        facts=session.facts,
        rounds=request.rounds,
        prefill_chunk=session.prefill_chunk,
        threads=threads,
        weight_bytes=weight_bytes_per_token(session.facts, sizes),
        report=report,
        cancelled=cancelled,
        unsteady_reason=(lambda samples: "") if request.even_if_busy else OtherPrograms().unsteady_reason,
        buffer_bytes=buffer_bytes or BUFFER_BYTES,
    )
    session.model.recorder.reset()
    match request.kind:
        case "decode":
            result = bench_decode(subject, request.id)
        case "prefill":
            result = bench_prefill(subject, request.id)
        case "beams":
            result = bench_beams(subject, request.id)
        case "experts":
            words = load_tokenizer(folder)
            encode = None if words is None else lambda text: words.encode_chat([Message("user", text)])
            result = bench_experts(subject, request.id, open_model(folder), session.model.popularity, encode)
    result = _with_movement(result, session.model.recorder.frame(request.id).movement)
    return _with_circumstances(result, request, session.facts, threads)


def weight_bytes_per_token(facts: ModelFacts, sizes: ModelSizes) -> int:
    """Bytes of weights that decoding one token reads: the trunk, and the experts the token is sent to.

    Of an embedding that is not the head as well, only one row is read.
    """
    routed = facts.expert_bytes * facts.experts_per_token / facts.experts if facts.experts else 0.0
    embedding = sizes.for_runtime(facts.runtime).embedding_bytes
    return max(0, round(facts.trunk_bytes - embedding + routed))


def _with_movement(result: BenchResult, movement: ExpertMovement | None) -> BenchResult:
    """``result`` with what sharing experts between GPU and CPU cost over the whole benchmark, warm-up included."""
    if movement is None or not movement.tokens:
        return result
    active = movement.hits + movement.misses
    hits = (
        f"{100 * movement.hits / active:.0f} % of the active experts were on the GPU" if active else "none was active"
    )
    note = (
        f"Experts shared over all of it: {hits}, {movement.weight_bytes / movement.tokens / 1e6:.1f} MB of weights "
        f"copied per token, CPU at work {movement.cpu_s:.2f} s, GPU {movement.gpu_s:.2f} s, both at once "
        f"{movement.both_s:.2f} s of {movement.total_s:.2f} s."
    )
    data = {**result.data, "movement": msgspec.to_builtins(movement)}
    return msgspec.structs.replace(result, notes=[*result.notes, note], data=data)


def _with_circumstances(result: BenchResult, request: Bench, facts: ModelFacts, threads: int) -> BenchResult:
    """``result`` with the model, the machine and what ran it: figures mean nothing without these."""
    circumstances: dict[str, Any] = {
        "kind": request.kind,
        "rounds": request.rounds,
        "model": facts.name,
        "runtime": facts.runtime,
        "trunk": facts.trunk,
        "executor": facts.executor,
        "policy": facts.policy,
        "device": facts.device,
        "dtype": facts.dtype,
        "threads": threads,
        "processor": processor(),
    }
    ran = facts.executor if not facts.trunk else f"trunk {facts.trunk}, experts {facts.executor}"
    where = f"{processor()}, {threads} thread{'s' * (threads != 1)}: {facts.runtime} runtime, {ran}, {facts.dtype}."
    return msgspec.structs.replace(result, notes=[where, *result.notes], data={**circumstances, **result.data})
