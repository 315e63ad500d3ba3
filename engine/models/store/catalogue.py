"""The models known by a short name: ``assets/catalogue.toml``, read once and validated."""

from __future__ import annotations

import functools
import importlib.resources
import platform
import sys
import tomllib
from typing import Any, Literal

import msgspec

from engine.errors import ModelError

STARTER = "starter"
"""Catalogue name of the model that is built on this machine instead of downloaded as it is."""

Origin = Literal["hub", "starter"]


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known model. Sizes are decimal gigabytes; parameters are in billions."""

    name: str
    origin: Origin = "hub"
    repo: str = ""
    """Hugging Face repo id ``owner/name``; empty for the starter."""
    tag: str = ""
    """What names one GGUF file of the repo, like ``Q4_K_M``; empty for its safetensors."""
    family: str
    """``model_type`` in transformers."""
    gigabytes: float
    """Disk space of the download, in decimal gigabytes."""
    about: bool = False
    """Whether ``gigabytes`` is computed from the parameters and the bits of a weight."""
    memory_gigabytes: int
    """Memory of the machines that it is meant for; 0 if none alone holds it."""
    parameters_billion: float
    active_billion: float
    """Billions of parameters that a token uses; all of them in a dense model."""
    experts: int
    """Routed experts per layer; 0 for a dense model."""
    experts_per_token: int
    runtime: Literal["any", "native", "mlx"] = "any"
    """``native``, ``mlx``: the weights are packed, and no other runtime reads them."""
    suggested: bool = False
    """Whether a first start may suggest it: of its size, one of those with the best answers."""
    licence: str
    """SPDX identifier."""
    description: str

    @property
    def address(self) -> str:
        """``owner/name`` or ``owner/name:Q4_K_M``; the name of the starter."""
        return f"{self.repo}:{self.tag}" if self.tag else self.repo or self.name

    @property
    def summary(self) -> str:
        """The description, and the memory of the machines that the model is meant for."""
        machines = f" For {self.memory_gigabytes} GB of memory." if self.memory_gigabytes else ""
        return self.description + machines


class _CatalogueFile(msgspec.Struct, forbid_unknown_fields=True):
    model: list[CatalogueEntry]


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """All known models in the order for the screen, small ones first."""
    text = importlib.resources.files("assets").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return parse_catalogue(tomllib.loads(text))


def offered(*, apple: bool) -> tuple[CatalogueEntry, ...]:
    """The models to offer: of the packed ones mlx's on a Mac with Apple Silicon (``apple``), GGUF files elsewhere."""
    other = "native" if apple else "mlx"
    return tuple(entry for entry in catalogue() if entry.runtime != other)


def for_gpu_instead(name: str) -> CatalogueEntry | None:
    """The model that mlx runs in place of a GGUF file called ``name`` in the catalogue or by whoever made it: of the
    same line and size. None if there is none."""
    plain = _letters(name)
    lines = {entry: _letters(entry.name.removesuffix("-4bit")) for entry in catalogue() if entry.runtime == "mlx"}
    return next((entry for entry, line in lines.items() if line in plain), None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def offered_here() -> tuple[CatalogueEntry, ...]:
    """The models to offer on this machine. All others can be named as well."""
    return offered(apple=sys.platform == "darwin" and platform.machine() == "arm64")


def parse_catalogue(data: dict[str, Any]) -> tuple[CatalogueEntry, ...]:
    """Validate the parsed TOML. Raises ModelError naming what is wrong."""
    try:
        entries = tuple(msgspec.convert(data, _CatalogueFile).model)
    except msgspec.ValidationError as error:
        raise ModelError(f"The model catalogue is damaged ({error}); reinstall privatellm.", "internal") from error
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise ModelError("The model catalogue names a model twice; reinstall privatellm.", "internal")
    return entries


def find(name: str) -> CatalogueEntry | None:
    """The entry whose name or repo, with the tag if there is one, is ``name``, ignoring case; None if there is none."""
    wanted = name.casefold()
    return next((entry for entry in catalogue() if wanted in (entry.name.casefold(), entry.address.casefold())), None)
