"""Figures, models and thoughts in words, for every front end of the chat. Pure; no Textual."""

from __future__ import annotations

import functools

from app.chat.state import Status
from app.conversations.records import Thoughts
from app.ring_words import latency, ring_name
from app.text_safety import one_line
from engine.ipc.messages import ModelFacts, Progress
from engine.planning.units import byte_size

size = functools.partial(byte_size, fine=True)
"""An amount of memory as the chat words it, where small ones are watched, too."""


def rate(tokens_per_s: float) -> str:
    """``8.1 tok/s``, ``1,069 tok/s``; empty if nothing was measured."""
    if tokens_per_s <= 0:
        return ""
    return f"{tokens_per_s:,.0f} tok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.1f} tok/s"


def progress_text(progress: Progress) -> str:
    """``weights 12 of 30 layers``, ``model.safetensors 1.2 of 3.4 GB``."""
    stage = progress.stage
    if not progress.total:
        return stage
    if progress.unit == "bytes":
        return f"{stage} {size(progress.done)} of {size(progress.total)}"
    return f"{stage} {progress.done} of {progress.total} {progress.unit}".rstrip()


def engine_name(facts: ModelFacts) -> str:
    """Trunk and executor: ``native (avx2, 2 threads)`` if both are the same, otherwise ``transformers (torch, cpu) ·
    local (torch, cpu)``."""
    trunk, executor = facts.trunk or facts.runtime, facts.executor
    name = trunk.partition(" ")[0]
    if executor == name or executor.startswith((f"{name} ", f"{name}:")):
        return trunk if facts.trunk else executor
    return f"{trunk} · {executor}"


def thought_figures(thoughts: Thoughts) -> str:
    """``12 s, 340 tokens``; empty if nothing was counted."""
    figures = []
    if thoughts.seconds:
        figures.append(f"{thoughts.seconds:.0f} s" if thoughts.seconds >= 10 else f"{thoughts.seconds:.1f} s")
    if thoughts.tokens:
        figures.append(f"{thoughts.tokens:,} token{'' if thoughts.tokens == 1 else 's'}")
    return ", ".join(figures)


def parameters(count: int) -> str:
    """``30.5 B parameters``, ``393 M parameters``."""
    return f"{count / 1e9:.1f} B parameters" if count >= 1e9 else f"{count / 1e6:.0f} M parameters"


def status_words(status: Status) -> list[str]:
    """All that the status line may show, in sentences: it has no room for all of it, and shows it in few words."""
    lines = [f"Activity: {status.phase.value}."]
    if status.problem:
        lines.append(f"No model is loaded: {status.problem}")
    facts = status.facts
    if facts is None:
        lines.append(f"Model: {status.model}, not loaded.")
    else:
        experts = f"{facts.experts} experts, {facts.experts_per_token} active per token" if facts.experts else "dense"
        about = [facts.name, facts.weights, parameters(facts.parameters), experts]
        lines.append(f"Model: {', '.join(filter(None, about))}.")
        lines.append(f"Engine: {engine_name(facts)}.")
        if facts.ring is not None:
            lines.append(f"Machines: {ring_name(facts.ring, status.away)}.")
        used, limit = status.context_used or 0, facts.context_limit
        if limit:
            lines.append(f"Context: {used:,} of {limit:,} tokens ({used / limit:.0%}).")
    if status.warm_up is not None and status.warm_up.total:
        share = f"{100 * status.warm_up.done // status.warm_up.total} %"
        lines.append(f"Weights in memory: {share}; the rest is being loaded in the background.")
    if status.memory is not None:
        mapped = f", and {size(status.memory.mapped)} of mapped files, which the system drops when it needs room"
        lines.append(f"Memory: {size(status.memory.own)} of the engine's own{mapped * bool(status.memory.mapped)}.")
    if status.tokens_per_s > 0:
        first = f", first token after {latency(status.ttft_s)}" if status.ttft_s is not None else ""
        lines.append(f"Speed of the last answer: {rate(status.tokens_per_s)}{first}.")
    if status.beams > 1:
        lines.append(f"Beams: {status.beams}.")
    if status.served_at:
        lines.append(f"Other programs are answered at {', '.join(status.served_at)} (privatellm serve).")
    if status.waiting + status.queued:
        lines.append(f"Questions that wait: {status.waiting + status.queued}.")
    if status.unsaved:
        lines.append(f"Not saved: {status.unsaved}")
    return [one_line(line) for line in lines]
