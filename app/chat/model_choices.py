"""The models to choose from: on this machine, in other programs, in the catalogue. No Textual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.chat.offers import STARTER_DOWNLOAD_BYTES, MachineFigures, speed_or_why_not
from app.chat.words import size
from app.text_safety import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.models.catalogue import CatalogueEntry
    from engine.models.store import InstalledModel


@dataclass(frozen=True)
class ModelOption:
    """A model to choose. ``here``: it is on this machine. ``speed``: predicted, or why it cannot run here."""

    name: str
    figures: str
    about: str
    here: bool
    speed: str = ""


def model_options(machine: MachineFigures | None = None) -> list[ModelOption]:
    """The models on this machine first, those of other programs after them, then the others of the catalogue. Reads the
    disk.

    Without ``machine`` nothing is said of speeds.
    """
    from engine.models import found_elsewhere
    from engine.models.catalogue import catalogue, offered_here
    from engine.models.store import installed

    entries = {entry.name: entry for entry in catalogue()}
    theirs = found_elsewhere.find_all(found_elsewhere.here())
    held = {model.path for model in theirs}
    found = [
        ModelOption(
            model.name,
            " · ".join(
                filter(None, [size(model.nbytes), one_line(model.family), "prepared" if model.prepared else ""])
            ),
            _about(model, entries),
            True,
            _speed(entries.get(model.name), machine),
        )
        for model in installed()
        if model.linked not in held
    ]
    names = {row.name for row in found}
    known = [
        ModelOption(entry.name, _size(entry), _description(entry), False, _speed(entry, machine))
        for entry in offered_here()
        if entry.name not in names
    ]
    others = [
        ModelOption(
            model.name,
            " · ".join(filter(None, [size(model.nbytes), f"in {model.title}", model.problem])),
            one_line(str(model.path)),
            True,
        )
        for model in theirs
    ]
    return found + others + known


def _about(model: InstalledModel, entries: Mapping[str, CatalogueEntry]) -> str:
    if model.linked is not None:
        return one_line(f"Links to {model.linked}.")
    return entries[model.name].description if model.name in entries else ""


def _speed(entry: CatalogueEntry | None, machine: MachineFigures | None) -> str:
    return "" if entry is None or machine is None else speed_or_why_not(entry, machine)


def _size(entry: CatalogueEntry) -> str:
    """What it takes to download."""
    if entry.origin == "starter":
        return size(STARTER_DOWNLOAD_BYTES)
    return f"{'about ' if entry.about else ''}{size(entry.gigabytes * 1e9)}"


def _description(entry: CatalogueEntry) -> str:
    active = f", {entry.active_billion:g} B active" if entry.experts else ""
    return f"{entry.summary} {entry.parameters_billion:g} B parameters{active} · {entry.licence}"
