"""The models to choose from: on this machine, in other programs, in the catalogue. No Textual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.chat.offers import STARTER_DOWNLOAD_BYTES, MachineFigures, fits, speed_or_why_not
from app.chat.words import size
from app.text_safety import one_line

if TYPE_CHECKING:
    from engine.models.store.catalogue import CatalogueEntry
    from engine.models.store.local_models import InstalledModel


@dataclass(frozen=True)
class ModelOption:
    """A model to choose."""

    name: str
    here: bool
    """Whether the model is on this machine."""
    size: str = ""
    """Size of the model's files, or of the download, as shown."""
    memory: str = ""
    """Memory of the machines that the model is meant for, as shown."""
    speed: str = ""
    """Predicted speed, or a few words why the model cannot run here."""
    runs_not: bool = False
    """Whether ``speed`` says why the model cannot run here."""
    licence: str = ""
    details: str = ""
    """Family, location, and problems of the model, as shown."""
    description: str = ""

    @property
    def figures(self) -> str:
        """``754 MB · mixtral · prepared``"""
        return " · ".join(filter(None, [self.size, self.details]))


def model_options(machine: MachineFigures | None = None) -> list[ModelOption]:
    """The models on this machine first, those of other programs after them, then the others of the catalogue. Reads the
    disk.

    Without ``machine`` nothing is said of speeds.
    """
    from engine.models.store import found_elsewhere
    from engine.models.store.catalogue import catalogue, offered_here
    from engine.models.store.local_models import installed

    entries = {entry.name: entry for entry in catalogue()}
    elsewhere = found_elsewhere.find_all(found_elsewhere.here())
    held = {model.path for model in elsewhere}
    here = [_installed(model, entries.get(model.name), machine) for model in installed() if model.linked not in held]
    names = {row.name for row in here}
    offered = [_of_catalogue(entry, machine, entry.name) for entry in offered_here() if entry.name not in names]
    others = [
        ModelOption(
            model.name,
            here=True,
            size=size(model.nbytes),
            speed="does not run" if model.problem else "",
            runs_not=bool(model.problem),
            details=" · ".join(filter(None, [f"in {model.title}", model.problem])),
            description=one_line(str(model.path)),
        )
        for model in elsewhere
    ]
    return here + others + offered


def _installed(model: InstalledModel, entry: CatalogueEntry | None, machine: MachineFigures | None) -> ModelOption:
    option = _of_catalogue(entry, machine, model.name)
    return replace(
        option,
        here=True,
        size=size(model.nbytes),
        details=" · ".join(filter(None, [one_line(model.family), "prepared" if model.prepared else ""])),
        description=option.description if model.linked is None else one_line(f"Links to {model.linked}."),
    )


def _of_catalogue(entry: CatalogueEntry | None, machine: MachineFigures | None, name: str) -> ModelOption:
    """The option for the model called ``name``, from its entry in the catalogue."""
    if entry is None:
        return ModelOption(name, here=False)
    return ModelOption(
        name,
        here=False,
        size=_size(entry),
        memory=f"{entry.memory_gigabytes} GB" if entry.memory_gigabytes else "",
        speed="" if machine is None else speed_or_why_not(entry, machine),
        runs_not=machine is not None and machine.memory_bytes > 0 and not fits(entry, machine),
        licence=entry.licence,
        description=_description(entry),
    )


def _size(entry: CatalogueEntry) -> str:
    """Size of the download, as shown."""
    if entry.origin == "starter":
        return size(STARTER_DOWNLOAD_BYTES)
    return f"{'about ' if entry.about else ''}{size(entry.gigabytes * 1e9)}"


def _description(entry: CatalogueEntry) -> str:
    active = f", {entry.active_billion:g} B active" if entry.experts else ""
    return f"{entry.summary} {entry.parameters_billion:g} B parameters{active} · {entry.licence}"
