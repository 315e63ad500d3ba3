"""The model folder of a GGUF file: configuration and tokenizer from its header, and links to where its weights lie.

Nothing of the weights is copied or converted. With the folder, a GGUF file is a model like any other.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import Cancelled, ModelError
from engine.models.architectures.gguf_architectures import architecture_of, config_of
from engine.models.architectures.gguf_tensors import entries_of
from engine.models.architectures.gguf_tower import settings_of
from engine.models.folders import model_folder
from engine.models.formats.gguf_file import GgufFile
from engine.models.formats.gguf_names import parts_of, tower_among
from engine.models.formats.json_files import SMALL_FILE, read_object
from engine.models.store import local_models
from engine.models.text.gguf_tokenizer import check_tokenizer, write_tokenizer
from engine.system.durable_files import new_file
from engine.system.locations import ensure

if TYPE_CHECKING:
    from engine.ipc.progress import ProgressCallback

WRITTEN_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Names of the files that are written beside the weights."""

_NAMELESS = "model.gguf"
"""Name of the link to a file that has no such ending."""

_LONGEST_STEM = 180
"""Longest name of a link, in characters without the ending."""

StopCheck = Callable[[], bool] | None


def open_gguf(
    path: Path, progress: ProgressCallback, should_stop: StopCheck = None, folder: Path | None = None
) -> Path:
    """The model folder of ``path``, which is a GGUF file or any part of a split one. It is made if it is not there.

    ``folder``: where to make it; needed for a file whose name does not end in ``.gguf``, as ollama keeps them.

    Raises ModelError naming what is wrong with the file or is not supported; Cancelled if ``should_stop`` says so.
    """
    if folder is None:
        resolved = local_models.resolve(str(path.absolute()))
        folder, path = resolved.plain_folder, resolved.source
    if model_folder.is_complete(folder):
        _renew_links(folder, path)
        _add_tower(folder, path)
        return folder
    ensure("models")
    with model_folder.exclusive(folder), GgufFile(path) as gguf:
        if model_folder.is_complete(folder):
            return folder
        local_models.check_name_is_free(folder)
        progress("opening the model", 0, 0, "")
        partial = fresh_partial(folder)
        try:
            write_settings(partial, gguf, should_stop)
            if should_stop is not None and should_stop():
                raise Cancelled("Stopped; what was written so far is deleted.")
            _link(partial, path)
            _add_tower(partial, path)
            partial.rename(folder)
        except OSError as error:
            raise ModelError(f"Writing {folder} failed: {error.strerror or error}.", "disk") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_settings(folder: Path, gguf: GgufFile, should_stop: StopCheck = None) -> None:
    """Write the tokenizer, the generation settings and, last, ``config.json`` of ``gguf`` into ``folder``.

    Raises ModelError if it cannot be run, and OSError.
    """
    write_config(folder, gguf, checked_config(gguf), should_stop)


def write_config(folder: Path, gguf: GgufFile, config: dict[str, Any], should_stop: StopCheck = None) -> None:
    """Write the files of :func:`write_settings`, with ``config`` in place of the file's own configuration."""
    end_ids = write_tokenizer(folder, gguf.metadata, should_stop)
    generation = {"eos_token_id": end_ids, "bos_token_id": config.get("bos_token_id"), **_sampling(gguf)}
    write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v not in (None, [])})
    write_json(folder / "config.json", config)


def fresh_partial(folder: Path) -> Path:
    """An empty ``folder.partial``. Files of an earlier, killed run are deleted."""
    partial = folder.with_name(folder.name + model_folder.PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def write_json(path: Path, value: object) -> None:
    """Write ``value``; the file is there completely or not at all."""
    with new_file(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def checked_config(gguf: GgufFile) -> dict[str, Any]:
    """The model's ``config.json``. Raises ModelError if the file's header tells that it cannot be run."""
    config = config_of(gguf)
    entries_of(gguf, architecture_of(gguf), config)
    check_tokenizer(gguf.metadata)
    return config


_SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""``general.sampling`` of a GGUF -> setting in ``generation_config.json``."""


def _sampling(gguf: GgufFile) -> dict[str, Any]:
    """The sampling that the model's makers advise, as far as it is numbers."""
    sampling: dict[str, Any] = {}
    for key, setting in _SAMPLING.items():
        value = gguf.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            sampling[setting] = round(float(value), 6) if isinstance(value, float) else value
    if "temperature" in sampling:
        sampling["do_sample"] = sampling["temperature"] > 0
    return sampling


def _link(folder: Path, path: Path) -> None:
    for name, part in _links(path).items():
        (folder / name).symlink_to(part)


def _links(path: Path) -> dict[str, Path]:
    """The parts of ``path`` by the names of their links, which end in ``.gguf`` and can go to other machines."""
    return {_link_name(part): part for part in parts_of(path.absolute())}


def _link_name(part: Path) -> str:
    if part.suffix.casefold() != ".gguf":
        return _NAMELESS
    # The end of a name says which part of a split file it is.
    stem = re.sub(r"[^A-Za-z0-9_.+-]+", "-", part.stem)[-_LONGEST_STEM:].lstrip(".+-")
    return f"{stem or 'model'}.gguf"


def _add_tower(folder: Path, path: Path) -> None:
    """Give ``folder`` the vision tower that lies beside ``path``.

    A tower that cannot be used is left out: the model answers without it.
    """
    home, beside = folder / model_folder.TOWER, path.absolute().parent
    with contextlib.suppress(OSError, ModelError):
        name = tower_among(each.name for each in beside.iterdir())
        link = home / (name or "")
        if name is not None and link.is_symlink() and link.readlink() == beside / name:
            return
        shutil.rmtree(home, ignore_errors=True)
        if name is not None:
            with GgufFile(path) as gguf:
                write_tower(folder, gguf, beside / name)
            link.symlink_to(beside / name)


def write_tower(folder: Path, gguf: GgufFile, tower: Path) -> None:
    """Write what a folder of safetensors would say of the file ``tower`` into a folder inside ``folder``, the model
    folder of ``gguf``. Raises ModelError if it is no tower of this model, and OSError."""
    home, config = folder / model_folder.TOWER, read_object(folder / "config.json", SMALL_FILE)
    with GgufFile(tower) as file:
        settings = settings_of(file, config, gguf.metadata["tokenizer.ggml.tokens"])
    if settings is None:
        raise ModelError(f"{tower} is no vision tower of {gguf.path} that runs here.", "bad-input")
    home.mkdir(exist_ok=True)
    write_json(home / "preprocessor_config.json", settings.processor)
    write_json(home / "config.json", settings.config)


def _renew_links(folder: Path, path: Path) -> None:
    """The same file may lie elsewhere than when the folder was made. Raises ModelError if that cannot be noted."""
    for name, part in _links(path).items():
        link = folder / name
        if link.is_symlink() and link.readlink() == part:
            continue
        fresh = link.with_name(name + model_folder.PARTIAL)
        try:
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(part)
            fresh.replace(link)
        except OSError as error:
            raise ModelError(f"{link} cannot be renewed: {error.strerror or error}.", "disk") from error
