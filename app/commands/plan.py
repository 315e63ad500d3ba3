"""``privatellm plan``: where a model would lie in memory, how fast it should be, and why; nothing is loaded."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from app.commands.engine_work import Interruption, do, run_with_engine, with_ring
from app.commands.options import LoadFlags, load_from
from app.commands.output import ProgressLine, WorkFailed, answer, as_json, figure
from app.engine_client import EngineClient
from app.ring_words import gpu_words, how_it_runs, machine_name, speed_words, to_send
from app.text_safety import one_line
from engine.ipc.messages import DeviceMemory, Plan, Planned, RingFacts
from engine.planning.units import byte_size


def plan(flags: LoadFlags, *, in_json: bool) -> int:
    """Print the plan on stdout; the exit status. Raises WorkFailed, also for a plan that cannot fit."""
    wanted = load_from(flags)

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        load = await with_ring(engine, wanted.load, wanted.settings, wanted.peers)
        planned = await do(engine, Plan(id=engine.new_id(), load=load), ProgressLine(quiet_elsewhere=True))
        assert isinstance(planned, Planned)
        problem = {} if planned.fits else {"error": shortfall(planned)}
        answer(as_json(as_object(planned) | problem) if in_json else as_text(planned))
        if problem:
            raise WorkFailed(problem["error"], answered=in_json)
        return 0

    return run_with_engine(work)


def as_object(planned: Planned) -> dict[str, Any]:
    """The object that ``--json`` prints: the event without its id and type."""
    found = cast(dict[str, Any], msgspec.to_builtins(planned))
    return {key: value for key, value in found.items() if key not in ("id", "type")}


def as_text(planned: Planned) -> str:
    """Memory per device, the prediction with its basis, and the reason for each choice."""
    width = max((len(one_line(choice.what)) for choice in planned.choices), default=0)
    parts = [
        [one_line(f"{planned.model} ({planned.family})")],
        [one_line(memory_line(device)) for device in planned.memory],
        [one_line(_speed(planned)), *_several(planned)],
        ring_lines(planned.ring) if planned.ring is not None else [],
        [f"{one_line(c.what):{width}}  {one_line(f'{c.choice}: {c.reason}')}" for c in planned.choices],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def memory_line(device: DeviceMemory) -> str:
    """``CPU: 14.2 GB of 24.0 GB (20.1 GB free): trunk 3.2 GB, experts 10.5 GB, KV cache 0.5 GB``"""
    parts = {
        "trunk": device.trunk,
        "experts": device.experts,
        "KV cache": device.key_values,
        "workspace": device.workspace,
    }
    used = ", ".join(f"{what} {byte_size(nbytes)}" for what, nbytes in parts.items() if nbytes) or "nothing"
    room = f" of {byte_size(device.total)} ({byte_size(device.free)} free)" if device.total else ""
    return f"{device.device}: {byte_size(sum(parts.values()))}{room}: {used}"


def ring_lines(ring: RingFacts) -> list[str]:
    """The ring in one line, then a line for each node with its share."""
    fast, alone = figure(ring.tokens_per_s or 0), figure(ring.alone_tokens_per_s or 0)
    who = f"{machine_name(ring.nodes[1])} alone" if ring.elsewhere else f"Ring of {len(ring.nodes)}"
    head = f"{who}: {speed_words(ring, f'{fast} tokens/s', f'{alone} tokens/s')}"
    names = max((len(machine_name(node)) for node in ring.nodes), default=0)
    nodes = [
        f"{node.rank + 1}  {machine_name(node):{names}}  {node.experts:,} experts {byte_size(node.expert_bytes)}, "
        f"trunk {byte_size(node.trunk_bytes)}, {byte_size(node.memory_free)} free, "
        f"{node.expected_experts:.1f} run per layer"
        + (f", {on_gpu}" if (on_gpu := gpu_words(node)) else "")
        + (f", {sending}" if (sending := to_send(node)) else "")
        for node in ring.nodes
    ]
    reason = [one_line(ring.reason)] if ring.reason else []
    return [head, "; ".join(how_it_runs(ring)), *reason, *nodes]


def shortfall(planned: Planned) -> str:
    """The error message for a model that does not fit in memory."""
    return (
        f"{planned.model} does not fit in memory: {byte_size(planned.shortfall)} are missing; choose a shorter "
        "context, less GPU memory for experts, or a smaller model"
    )


def _speed(planned: Planned) -> str:
    if planned.tokens_per_s is None:
        return f"No speed is predicted: {planned.basis}" if planned.basis else "No speed is predicted."
    prompt = planned.prefill_tokens_per_s
    reading = f"; prompts at {figure(prompt)} tokens/s" if prompt is not None else ""
    return f"Predicted: {figure(planned.tokens_per_s)} tokens/s{reading} ({planned.basis})"


def _several(planned: Planned) -> list[str]:
    """``Several answers at once: 2 get 21.3 tokens/s in all, 4 get 30.1, 8 get 38.4``"""
    more = [each for each in planned.answers if each.answers > 1]
    if not more:
        return []
    first, *others = (f"{each.answers} get {figure(each.tokens_per_s)}" for each in more)
    return [f"Several answers at once: {', '.join([f'{first} tokens/s in all', *others])}"]
