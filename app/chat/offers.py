"""The models that a first start offers: the starter, and two that fit this machine. Pure; no Textual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.chat.words import size
from engine.models.store.catalogue import STARTER, CatalogueEntry
from engine.planning.prediction import rough_tokens_per_s

STARTER_DOWNLOAD_BYTES = 92_871_040
"""Bytes that the starter's package takes to download; its folder is several times as large."""
SLOWEST = 4.0
"""Lowest predicted speed, in tokens per second, of a model that is offered for its answers: a slow reader's."""
USEFUL_BILLIONS = 2.0
"""Least strength (:func:`strength`), in billions, of a model that is offered for its speed."""
LEAST_OF_BEST = 0.25
"""Least strength of such a model, as a fraction of that of the model offered for its answers: a large machine is not
led to a small model."""
NOMINAL_MEMORY = 0.9
"""Fraction of the memory that a machine is sold with that the system reports at least."""


@dataclass(frozen=True)
class MachineFigures:
    """Figures that decide which models fit. ``memory_read`` is in bytes per second; 0.0 if it was not measured."""

    memory_bytes: int
    memory_read: float
    disk_bytes: int


@dataclass(frozen=True)
class ModelOffer:
    """A model that can be chosen with one key."""

    name: str
    download_bytes: int
    tokens_per_s: float
    about: str
    """Purpose of the model, in a sentence."""
    rounded: bool = False
    """Whether ``download_bytes`` is computed from the number of parameters."""

    @property
    def figures(self) -> str:
        """``4.2 GB to download · about 25 tokens/s``"""
        rounded = "about " if self.rounded else ""
        return f"{rounded}{size(self.download_bytes)} to download · {speed_words(self.tokens_per_s)}"


def speed_words(tokens_per_s: float) -> str:
    """``about 25 tokens/s``, ``about 1.5 tokens/s``: at most two digits, because it is a rough prediction."""
    if tokens_per_s < 9.5:
        return f"about {max(0.1, round(tokens_per_s, 1)):g} tokens/s"
    digits = 10 ** max(0, math.floor(math.log10(tokens_per_s)) - 1)
    return f"about {round(tokens_per_s / digits) * digits:,} tokens/s"


def tokens_per_s(entry: CatalogueEntry, machine: MachineFigures) -> float:
    """Predicted speed of ``entry``, on the processor of ``machine``."""
    share = entry.active_billion / entry.parameters_billion
    return rough_tokens_per_s(entry.gigabytes * 1e9, share, machine.memory_read)


def fits(entry: CatalogueEntry, machine: MachineFigures) -> bool:
    """Whether the machine has the memory that ``entry`` is meant for."""
    wanted = entry.memory_gigabytes * 1e9
    return 0 < NOMINAL_MEMORY * wanted <= machine.memory_bytes


def speed_or_why_not(entry: CatalogueEntry, machine: MachineFigures) -> str:
    """``about 22 tokens/s``, or what it would need. Empty if the machine's memory is not known."""
    if not machine.memory_bytes:
        return ""
    if fits(entry, machine):
        return speed_words(tokens_per_s(entry, machine))
    return f"needs {entry.memory_gigabytes} GB" if entry.memory_gigabytes else "needs a ring"


def strength(entry: CatalogueEntry) -> float:
    """A rule of thumb for how good answers are, in billions of parameters: the dense model that a mixture equals, which
    is the geometric mean of all its parameters and those that a token uses."""
    return math.sqrt(entry.parameters_billion * entry.active_billion)


def offers(entries: Sequence[CatalogueEntry], machine: MachineFigures) -> list[ModelOffer]:
    """The starter, then the model with the best answers that is not too slow here, then the fastest useful one.

    ``entries`` are those that this kind of machine can run; only suggested ones are offered. A model that does not fit
    in memory or on the disk is left out, so there may be fewer than three.
    """
    starter = next(entry for entry in entries if entry.name == STARTER)
    offered = [
        ModelOffer(
            STARTER,
            STARTER_DOWNLOAD_BYTES,
            tokens_per_s(starter, machine),
            "For a first try: chats in simple English, and is often wrong.",
        )
    ]
    room = [
        entry
        for entry in entries
        if entry.suggested and fits(entry, machine) and entry.gigabytes * 1e9 < machine.disk_bytes
    ]
    quick_enough = [entry for entry in room if tokens_per_s(entry, machine) >= SLOWEST]
    best = max(quick_enough or room, key=strength, default=None)
    if best is not None:
        of_all = best is max(room, key=strength)
        which = "fit this machine" if of_all else "are quick enough on this machine"
        offered.append(_offer(best, machine, f"The best answers of those that {which}."))
    others = [entry for entry in room if entry is not best]
    least = USEFUL_BILLIONS if best is None else max(USEFUL_BILLIONS, LEAST_OF_BEST * strength(best))
    useful = [entry for entry in others if strength(entry) >= least]
    fastest = max(useful or others, key=lambda entry: tokens_per_s(entry, machine), default=None)
    if best is not None and fastest is not None:
        offered.append(_offer(fastest, machine, _beside(fastest, best, machine)))
    return offered


def _beside(entry: CatalogueEntry, best: CatalogueEntry, machine: MachineFigures) -> str:
    """Advantage of ``entry`` over ``best``, in a sentence."""
    if tokens_per_s(entry, machine) > tokens_per_s(best, machine):
        return "Quicker."
    if strength(entry) > strength(best):
        return "Better answers, but slow here."
    return "Smaller to download." if entry.gigabytes < best.gigabytes else "Another that fits this machine."


def _offer(entry: CatalogueEntry, machine: MachineFigures, about: str) -> ModelOffer:
    nbytes = round(entry.gigabytes * 1e9)
    return ModelOffer(entry.name, nbytes, tokens_per_s(entry, machine), about, entry.about)
