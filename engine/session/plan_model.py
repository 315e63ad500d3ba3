"""``Plan``: the placement and the predicted speed of a model. Only headers are read, and nothing is loaded.

:mod:`engine.planning.hybrid` decides. This module collects its inputs: the model's sizes, this machine's memory, its
measurements, and the person's own use of the model.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.calibration.calibration_file import MLX_GPU, MachineSpeed, calibration_key, load_calibration, load_speed
from engine.calibration.reading_rates import disk_rate
from engine.errors import ModelError
from engine.ipc.messages import AnswersSpeed, Load, ModelFacts, Plan, Planned, PlannedChoice
from engine.models.formats.number_formats import is_packed
from engine.models.store.local_models import ResolvedModel, resolve
from engine.moe.kernels.pool import reason_for, threads_of, within_this_machine
from engine.moe.popularity import known_counts
from engine.planning.calibration import Calibration
from engine.planning.hybrid import Device, HybridMachine, HybridPlan, HybridRequest, better, workspace_bytes
from engine.planning.hybrid import plan as plan_placement
from engine.planning.memory import ModelSizes
from engine.planning.prediction import ANSWERS
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes import choosing
from engine.runtimes.choosing import choose_runtime, rows_together
from engine.runtimes.mlx import eligible, gguf_files
from engine.runtimes.model_headers import Headers, read_headers
from engine.session.refusals import check_request
from engine.system.free_memory import RESERVE_BYTES, available_bytes, memory
from engine.system.machine import Gpu, gpu, processor

if TYPE_CHECKING:
    from engine.cluster.network import ClusterNetwork


def plan_model(request: Plan, loaded: ModelFacts | None = None, network: ClusterNetwork | None = None) -> Planned:
    """The plan for ``request.load``.

    ``loaded`` is the model that is loaded now, whose memory would be freed. ``network`` gives the machines for
    partitioning ``ring``.

    Raises ModelError as loading would: an unknown model (bad-input), one that is not on this machine, damaged,
    unsupported.
    """
    load, _ = within_this_machine(request.load)
    check_request(load)
    if load.partitioning == "ring":
        return _plan_ring(request, load, loaded, network)
    resolved = resolve(load.model)
    notices: list[str] = []
    here = plan_here(load, _folder_of(resolved), loaded, notices)
    plan, sizes, runtime = here.plan, here.sizes, here.runtime
    return Planned(
        id=request.id,
        model=resolved.name,
        family=sizes.family,
        fits=plan.fits,
        shortfall=plan.shortfall,
        memory=list(plan.memory),
        choices=[*_choices(request.load, sizes, runtime), *here.laid_out, *plan.choices, *_said(notices)],
        tokens_per_s=plan.tokens_per_s,
        prefill_tokens_per_s=plan.prefill_tokens_per_s,
        answers=_answers(plan.answers_per_s),
        basis=_basis(plan, sizes, here.speed, runtime.name, load.model),
    )


@dataclass(frozen=True)
class PlanHere:
    """A plan for this machine, its runtime, and its inputs."""

    plan: HybridPlan
    sizes: ModelSizes
    runtime: RuntimeChoice
    speed: MachineSpeed | None
    laid_out: tuple[PlannedChoice, ...] = ()
    """What a GGUF file's weights take in mlx."""


def plan_here(load: Load, folder: Path, loaded: ModelFacts | None, notices: list[str]) -> PlanHere:
    """The plan of the model in ``folder`` on this machine.

    If nobody chose between GPU and CPU, it is the better plan of the two, each with the runtime that it would have.
    ``notices`` gets lines about what is not used. Raises ModelError as loading would.
    """
    graphics = gpu_for(load)
    if graphics is None or load.partitioning != "auto":
        return _with_one_choice(load, folder, loaded, notices)
    shared = _with_one_choice(msgspec.structs.replace(load, partitioning="hybrid"), folder, loaded, notices)
    try:
        alone = _with_one_choice(msgspec.structs.replace(load, partitioning="cpu"), folder, loaded, [])
    except ModelError:  # the CPU's runtime does not take the model
        return shared
    plan = better(alone.plan, shared.plan, load.gpu_expert_bytes is not None)
    return replace(shared if plan.on_gpu else alone, plan=plan)


def _with_one_choice(load: Load, folder: Path, loaded: ModelFacts | None, notices: list[str]) -> PlanHere:
    graphics = gpu_for(load)
    headers = read_headers(folder, load)
    runtime = planned_runtime(load, headers, graphics)
    sizes = headers.sizes.as_loaded(load, runtime.name, on_gpu=graphics is not None)
    if runtime.name == "mlx":
        sizes = sizes.with_windows(eligible.prefill_chunk(load.prefill_chunk, eligible.architecture()))
    elif runtime.name == "native" and not sizes.state_bytes:
        sizes = sizes.with_windows(load.prefill_chunk)
    headers = replace(headers, sizes=sizes)
    calibration, speed = _measured(load, headers, graphics, runtime.name, notices)
    overhead_s, read_share = _beside_streaming(speed, runtime.name)
    needed = sizes.trunk_bytes + sizes.expert_bytes + sizes.planned_cache_bytes + workspace_bytes(sizes, gpu=False)
    plan = plan_placement(
        sizes,
        _machine(headers, needed, graphics, speed, loaded),
        HybridRequest(
            partitioning="cpu" if graphics is None else "hybrid",
            policy=load.policy,
            gpu_expert_bytes=load.gpu_expert_bytes,
            cpu_layer_overhead_s=overhead_s,
            cpu_read_share=read_share,
            rows_together=rows_together(runtime.name),
        ),
        calibration,
        _popularity(headers, notices),
    )
    return PlanHere(plan, sizes, runtime, speed, tuple(_laid_out(headers, sizes, runtime)))


def _plan_ring(request: Plan, load: Load, loaded: ModelFacts | None, network: ClusterNetwork | None) -> Planned:
    """The plan with the machines of ``network`` that can be reached now."""
    from engine.cluster.plan_request import plan_ring_request

    resolved = resolve(load.model)
    kept = network.kept_shard(resolved) if network is not None else None
    headers = read_headers(kept or _folder_of(resolved), load)
    notices: list[str] = []
    plan = plan_ring_request(
        network, headers, resolved.name, load, planned_runtime(load, headers, None), loaded, notices
    )
    decision, memory, runtime = plan.decision, plan.memory, plan.choice
    return Planned(
        id=request.id,
        model=resolved.name,
        family=headers.sizes.family,
        fits=decision.kind != "refused",
        shortfall=decision.shortfall,
        memory=memory,
        choices=[
            *_choices(request.load, headers.sizes.as_loaded(load, runtime.name), runtime),
            PlannedChoice(
                "partitioning", "ring" if decision.kind == "ring" else "this machine", decision.reason or "as chosen"
            ),
            *_said([*notices, *decision.notices]),
        ],
        tokens_per_s=plan.tokens_per_s,
        answers=_answers(plan.answers_per_s),
        basis="what the machines measured of themselves and of their links",
        ring=decision.facts,
    )


def _answers(rates: Sequence[float]) -> list[AnswersSpeed]:
    return [AnswersSpeed(answers, rate) for answers, rate in zip(ANSWERS, rates, strict=False)]


def _folder_of(resolved: ResolvedModel) -> Path:
    """The folder to plan for. A GGUF file gets its folder now, if it has none. Raises ModelError."""
    if resolved.kind == "gguf":
        from engine.models.store.gguf_folder import open_gguf

        return open_gguf(resolved.source, lambda stage, done, total, unit: None, folder=resolved.plain_folder)
    return resolved.require_folder()


def gpu_for(load: Load) -> Gpu | None:
    """The GPU that ``load`` may use through torch; None without one, or if the choices exclude it."""
    return None if load.partitioning == "cpu" or load.runtime in ("native", "mlx") else gpu()


def planned_runtime(load: Load, headers: Headers, graphics: Gpu | None) -> RuntimeChoice:
    """The runtime that loading would choose, from the model's headers. Raises ModelError if it refuses the model."""
    choice = choose_runtime(load, headers.folder, graphics is not None, lambda: headers.not_native)
    if choice.name == "native" and headers.refused is not None:
        raise headers.refused
    if choice.name == "mlx" and gguf_files.in_gguf(headers.folder):
        gguf_files.refuse_unsupported(headers.folder, load.partitioning == "ring")
    return choice


def _machine(
    headers: Headers, needed: int, graphics: Gpu | None, speed: MachineSpeed | None, loaded: ModelFacts | None
) -> HybridMachine:
    """This machine as it will be once the loaded model is freed. ``needed``: bytes that hold everything."""
    on_gpu = loaded is not None and loaded.device.startswith("cuda")
    freed = loaded.trunk_bytes if loaded is not None and loaded.runtime != "native" else 0
    cpu = Device("CPU", memory().total, available_bytes() + (0 if on_gpu else freed))
    memory_read = speed.memory_read if speed is not None else None
    # Measuring the disk takes a moment, so it is done only where the result matters.
    disk = disk_rate(headers.largest) if headers.largest is not None and needed > cpu.free else None
    if graphics is None:
        return HybridMachine(cpu, memory_read=memory_read, disk_read=disk, reserve=RESERVE_BYTES)
    freed_there = freed + loaded.gpu_expert_bytes if loaded is not None and on_gpu else 0
    there = Device(graphics.name, graphics.total, min(graphics.total, graphics.free + freed_there))
    return HybridMachine(cpu, there, memory_read, disk, RESERVE_BYTES)


def _measured(
    load: Load, headers: Headers, graphics: Gpu | None, runtime: str, notices: list[str]
) -> tuple[Calibration | None, MachineSpeed | None]:
    """The calibration of the model's experts on this machine, and the machine's other measurements."""
    dtype, shape = headers.sizes.dtype, headers.shape
    name = graphics.name if graphics is not None else None
    key = calibration_key(dtype, load.cpu_threads, name)
    on_mac_gpu = runtime == "mlx" and choosing.on_apple_silicon()
    speed = load_speed(calibration_key(dtype, load.cpu_threads, MLX_GPU if on_mac_gpu else None))
    if shape is None:
        return None, speed
    calibration = load_calibration(shape, key, notices.append)
    there = gpu() if calibration is None and graphics is None else None
    if there is not None:
        # The CPU's figures are the same, whatever else is in the machine.
        calibration = load_calibration(shape, calibration_key(dtype, load.cpu_threads, there.name), notices.append)
    return calibration, speed


def _popularity(headers: Headers, notices: list[str]) -> list[list[int]]:
    if headers.profile is None:
        return []
    counts = known_counts(headers.folder, headers.profile, headers.sizes.experts_per_token, notices.append)
    return [] if counts is None else [[round(routes) for routes in row] for row in counts.values()]


def _choices(load: Load, sizes: ModelSizes, runtime: RuntimeChoice) -> list[PlannedChoice]:
    context = sizes.context_tokens
    if load.context_limit is not None and load.context_limit < sizes.context_limit:
        why = "as chosen"
    elif context == sizes.context_limit:
        asked = f", though {load.context_limit} were asked for" if (load.context_limit or 0) > context else ""
        why = f"what the model was made for{asked}"
    else:
        why = f"usual for a conversation; the model takes up to {sizes.context_limit}"
    per_token = sizes.key_value_bytes_per_token
    if sizes.dropped_bytes(context):
        per_token -= sizes.windowed_bytes_per_token
    per_thousand = 1000 * per_token / 1e6
    if load.dtype != "auto":
        numbers = "as chosen"
    elif is_packed(sizes.stored):
        numbers = f"the weights are packed, most of them as {sizes.stored}"
    else:
        numbers = (
            "as the model is stored" if sizes.stored == sizes.dtype else f"the weights are stored as {sizes.stored}"
        )
    choices = [
        PlannedChoice("runtime", runtime.name, runtime.reason),
        PlannedChoice("numbers", sizes.dtype, numbers),
        PlannedChoice("context", f"{context} tokens", f"{why}; 1000 more take {per_thousand:.0f} MB"),
    ]
    if runtime.name != "mlx":
        choices.append(PlannedChoice("threads", str(threads_of(load)), reason_for(load)))
    if load.partitioning == "hybrid" and load.runtime not in ("native", "mlx") and gpu() is None:
        choices.append(PlannedChoice("partitioning", "cpu", "no GPU that torch can use was found"))
    return choices


def _laid_out(headers: Headers, sizes: ModelSizes, runtime: RuntimeChoice) -> Iterator[PlannedChoice]:
    if sizes.table_bytes:
        held = f"{sizes.table_bytes / 1e9:.1f} GB"
        yield PlannedChoice("n-grams", held, "read from the disk as they are needed, a few rows a token")
    if runtime.name == "mlx" and sizes.mlx_codes is not None:
        stored = headers.sizes.trunk_stored.total + headers.sizes.expert_bytes
        held = f"{(sizes.trunk_bytes + sizes.expert_bytes) / 1e9:.1f} GB"
        yield PlannedChoice("weights", held, f"laid out for mlx; {stored / 1e9:.1f} GB in the GGUF file")


def _said(notices: list[str]) -> list[PlannedChoice]:
    return [PlannedChoice("note", "not used", notice) for notice in notices]


def _beside_streaming(speed: MachineSpeed | None, runtime: str) -> tuple[float, float]:
    """Seconds per layer and step that ``runtime`` adds, and the fraction of the memory rate at which it reads weights.

    A runtime in Python takes its time for each layer, the native one for each byte. A runtime that was not measured
    gets the native runtime's figures. Otherwise it would seem faster than native.
    """
    if speed is None:
        return 0.0, 1.0
    measured = runtime if runtime in speed.layer_overhead_s else "native"
    share = speed.read_share.get("native") if measured == "native" else None
    return (speed.layer_overhead_s.get(measured, 0.0), 1.0) if share is None else (0.0, share)


def _basis(plan: HybridPlan, sizes: ModelSizes, speed: MachineSpeed | None, runtime: str, model: str) -> str:
    if plan.tokens_per_s is None:
        if not sizes.experts and not plan.on_gpu and speed is None:
            return f"nothing was measured on this machine ({processor()}): run `privatellm bench decode` with any model"
        return plan.basis
    if not plan.on_gpu and (speed is None or runtime not in speed.layer_overhead_s):
        command = f"privatellm bench decode {shlex.quote(model)} --runtime {runtime}"
        return f"at best: what {runtime} adds to each layer was not measured (`{command}`); {plan.basis}"
    return plan.basis
