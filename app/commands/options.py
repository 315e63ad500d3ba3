"""The options of the commands that load a model: flags override the person's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.commands.output import WorkFailed, notify
from app.settings.fields import ItemError, SettingError, Value, check_item
from app.settings.file import open_settings
from app.settings.personas import Persona, open_personas
from app.settings.ring import may_be_copied
from app.settings.schema import Settings
from engine.errors import ModelError
from engine.ipc.messages import Load
from engine.models.store.local_models import resolve


@dataclass(frozen=True)
class LoadFlags:
    """The given flags. ``settings``: values that override the person's settings, by their keys."""

    settings: Mapping[str, Value] = field(default_factory=dict)
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loading:
    """The model to load, and the ring to form for it."""

    settings: Settings
    peers: tuple[str, ...] = ()

    @property
    def load(self) -> Load:
        return self.settings.load


def settings_with(flags: Mapping[str, Value], persona: Persona | None = None) -> Settings:
    """The person's settings, overridden by ``persona`` and then by ``flags``. Problems of the file are printed."""
    file = open_settings()
    for notice in file.notices:
        notify(f"note: {notice}")
    said: dict[str, Any] = {**persona.said, **persona.values_over(file.settings)} if persona is not None else {}
    return dataclasses.replace(file.settings, **{**said, **flags})


def persona_named(name: str) -> Persona:
    """The persona that a flag names. Raises WorkFailed (status 2) with the names that there are."""
    file = open_personas()
    for notice in file.notices:
        notify(f"note: {notice}")
    try:
        return file.find(name)
    except SettingError as error:
        raise WorkFailed(str(error).removesuffix("."), status=2) from error


def load_from(flags: LoadFlags, *, needs_model: bool = True) -> Loading:
    """The settings with the flags, checked.

    ``needs_model``: raises WorkFailed for a model that is unknown or not on this machine. Raises WorkFailed also for
    flags that contradict each other.
    """
    settings = settings_with(flags.settings)
    peers = check_peers(list(flags.peers), ring=settings.partitioning == "ring")
    try:
        resolved = resolve(settings.model) if needs_model else None
        if resolved is not None and resolved.kind != "gguf":  # gets its folder when it is loaded
            resolved.require_folder()
    except ModelError as error:
        raise WorkFailed(str(error)) from error
    return Loading(settings, peers)


def check_model(name: str) -> None:
    """Raises WorkFailed for a model that is unknown, or that must be downloaded first."""
    try:
        model = resolve(name)
        if model.kind == "hub" and not may_be_copied(name, open_settings(look_only=True).settings.partitioning):
            model.require_folder()
    except ModelError as error:
        raise WorkFailed(str(error)) from error


def check_peers(peers: list[str], *, ring: bool) -> tuple[str, ...]:
    """The addresses given with ``--peer``. Raises WorkFailed (status 2) for a bad one, or without a ring."""
    if peers and not ring:
        raise WorkFailed("--peer needs --partitioning ring", status=2)
    try:
        return tuple(check_item("address", peer) for peer in peers)
    except ItemError as error:
        raise WorkFailed(f"--peer takes HOST:PORT, not {str(error)!r}", status=2) from error
