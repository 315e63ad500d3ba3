"""Figures, models and thoughts in words, for every front end of the chat. Pure; no Textual."""

from __future__ import annotations

import functools

from app.conversations.store import Thoughts
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
