"""The engine's part of ``privatellm doctor``: ``python -m engine.doctor_facts``.

Reads a Load as JSON from stdin, writes :class:`engine.ipc.messages.DoctorFacts` as JSON to stdout. Nothing is loaded,
and torch is not imported; that a kernel library is damaged can end only this process.
"""

from __future__ import annotations

import sys

import msgspec

from engine.calibration.calibration_file import calibration_key, load_calibration
from engine.errors import ModelError
from engine.ipc.messages import DoctorFacts, Load
from engine.models.store.local_models import resolve
from engine.moe.kernels import bindings
from engine.moe.kernels.pool import threads_of, within_this_machine
from engine.runtimes.model_headers import read_headers
from engine.session.plan_model import gpu_for, planned_runtime
from engine.system.free_memory import memory
from engine.system.processes import keep_to_owner


def doctor_facts(load: Load) -> DoctorFacts:
    """The kernels of this machine, and what the model of ``load`` would run on."""
    load, _ = within_this_machine(load)
    there = memory()
    facts = msgspec.structs.replace(
        _kernels(load), memory_total=there.total, memory_free=there.free, memory_of_machine=there.machine
    )
    try:
        return _about_model(facts, load)
    except ModelError as error:
        return msgspec.structs.replace(facts, model_problem=str(error))


def _kernels(load: Load) -> DoctorFacts:
    threads = threads_of(load)
    built, sets = bindings.path() is not None, list(bindings.available())
    try:
        choice = bindings.choose("float32" if load.dtype == "float32" else "bfloat16")
    except ModelError as error:
        return DoctorFacts(built=built, instruction_sets=sets, threads=threads, kernels_problem=str(error))
    return DoctorFacts(
        built=built,
        instruction_sets=sets,
        threads=threads,
        kernels=choice.name,
        kernels_reason=choice.cause,
        kernels_way_out=choice.way_out,
    )


def _about_model(facts: DoctorFacts, load: Load) -> DoctorFacts:
    """Raises ModelError if there is no such model on this machine, or it cannot be opened."""
    folder = resolve(load.model).require_folder()
    headers = read_headers(folder, load)
    graphics = gpu_for(load)
    runtime = planned_runtime(load, headers, graphics)
    facts = msgspec.structs.replace(facts, runtime=runtime.name, runtime_reason=runtime.reason)
    if headers.shape is None:
        return facts
    notices: list[str] = []
    dtype = headers.sizes.for_runtime(runtime.name).dtype
    key = calibration_key(dtype, load.cpu_threads, graphics.name if graphics is not None else None)
    calibration = load_calibration(headers.shape, key, notices.append)
    none = " ".join(notices) or "none for this model's experts on this machine"
    found = calibration is not None
    return msgspec.structs.replace(facts, calibrated=found, calibration=f"measured on {key}" if found else none)


def main() -> None:
    keep_to_owner()
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(doctor_facts(load)))


if __name__ == "__main__":
    main()
