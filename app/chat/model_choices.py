"""The models to choose from: on this machine, in other programs, in the catalogue. No Textual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.chat.words import size
from app.text_safety import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.models.catalogue import CatalogueEntry
    from engine.models.store import InstalledModel


@dataclass(frozen=True)
class ModelOption:
    """A model to choose. ``here``: it is on this machine."""

    name: str
    figures: str
    about: str
    here: bool


def model_options() -> list[ModelOption]:
    """The models on this machine first, those of other programs after them, then the others of the catalogue. Reads the
    disk."""
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
        )
        for model in installed()
        if model.linked not in held
    ]
    names = {row.name for row in found}
    known = [
        ModelOption(entry.name, _figures(entry), entry.summary, False)
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


def _figures(entry: CatalogueEntry) -> str:
    active = f", {entry.active_billion:g} B active" if entry.experts else ""
    return (
        f"{'about ' if entry.about else ''}{entry.gigabytes:g} GB · {entry.parameters_billion:g} B parameters{active} "
        f"· {entry.licence}"
    )
