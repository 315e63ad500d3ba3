"""Downloading one GGUF file of a hub repository, with all its parts if it is split, and its vision tower.

The header comes first, in a few megabytes: what cannot be run is refused before the weights are fetched.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from engine.errors import Cancelled, ModelError
from engine.models.architectures.gguf_tower import may_see
from engine.models.folders.model_folder import TOWER
from engine.models.formats.gguf_file import MOST_HEADER_BYTES, GgufFile, HeaderGoesOn, UnreadableFormat
from engine.models.formats.gguf_names import GgufChoice, choices_of, listed, matching, recommended, tower_among
from engine.models.store import hub
from engine.models.store.gguf_folder import WRITTEN_FILES, checked_config, write_settings, write_tower
from engine.planning.units import byte_size

if TYPE_CHECKING:
    from engine.models.store.downloading import Download
    from engine.models.store.hub import RemoteFile, Repository

FIRST_BYTES = 8 << 20
"""Bytes of the first part that are fetched first; a vocabulary of 150,000 tokens takes about 6 million."""
LATER_BYTES = 1 << 20
"""Bytes of the other parts that are fetched first; they hold no vocabulary."""
MOST_OTHERS = 3
"""Maximum files whose headers are read in search of one that runs."""


def choose(repository: Repository, tag: str) -> GgufChoice | None:
    """The GGUF file of ``repository`` that ``tag`` names; without a tag its only one, or None if it has safetensors or
    no GGUF file.

    Raises ModelError (bad-input) with the choices, their sizes and the recommended one if that is not exactly one.
    """
    repo = repository.repo
    choices = choices_of(_sizes_of(repository))
    if not tag and (hub.has_safetensors(repository) or not choices):
        return None
    if not choices:
        raise ModelError(
            f"{repo} holds no GGUF file, so there is no {tag} of it; for its safetensors, run: privatellm models pull "
            f"{repo}",
            "bad-input",
        )
    meant_choices = matching(choices, tag) if tag else choices
    if len(meant_choices) == 1 and meant_choices[0].complete:
        return meant_choices[0]
    if len(meant_choices) == 1:
        problem, meant = f"not all parts of {meant_choices[0].tag}", choices
    elif meant_choices:
        problem, meant = f"several GGUF files{f' that {tag} could mean' if tag else ''}", meant_choices
    else:
        problem, meant = f"no GGUF file called {tag}", choices
    whole = [choice for choice in meant if choice.complete]
    best = recommended(whole)
    if best is None:
        others = f", but {listed(whole)} are in formats that do not run here" if whole else ""
        raise ModelError(f"{repo} holds {problem}{others}; choose another repository.", "bad-input")
    raise ModelError(
        f"{repo} holds {problem}; choose one of {listed(whole)}; the recommended one: privatellm models pull "
        f"{repo}:{best.tag}",
        "bad-input",
    )


def fetch_gguf(
    task: Download, repository: Repository, choice: GgufChoice, refuse: Callable[[Mapping[str, Any], int], None]
) -> set[str]:
    """Fetch the files of ``choice`` into the task's folder and write the model's settings beside them, ``config.json``
    last. Returns the names of what belongs to the model.

    ``refuse`` is called with the configuration and the bytes of the weights before they are fetched. Raises ModelError,
    Cancelled, OSError.
    """
    files = files_of(repository, choice)
    try:
        config = checked_config(header_of(task, repository, files))
        refuse(config, hub.total_bytes(files))
    except ModelError as error:
        try:
            if isinstance(error, UnreadableFormat) and (other := _another(task, repository, choice)):
                raise ModelError(
                    f"{error.problem}; {other.tag} of it ({byte_size(other.nbytes)}) runs: privatellm models pull "
                    f"{repository.repo}:{other.tag}"
                ) from error
            raise
        finally:
            if error.kind == "model":  # nothing of it is of use
                shutil.rmtree(task.folder, ignore_errors=True)
    tower = _tower_of(repository, config)
    task.fetch([*files, *tower], hub.total_bytes([*files, *tower]))
    task.progress("opening the model", 0, 0, "")
    with GgufFile(task.folder / files[0].name) as gguf:
        write_settings(task.folder, gguf, task.should_stop)
        for file in tower:
            path = task.folder / file.name
            with contextlib.suppress(ModelError):  # the model answers without it
                write_tower(task.folder, gguf, path)
                path.rename(task.folder / TOWER / file.name)
    return {*(file.name for file in files), *WRITTEN_FILES, TOWER}


def _tower_of(repository: Repository, config: Mapping[str, Any]) -> list[RemoteFile]:
    """The vision tower beside the model of ``config``, if it has one that runs here."""
    name = tower_among(repository.files) if may_see(config) else None
    return [] if name is None else [repository.files[name]]


def _another(task: Download, repository: Repository, unreadable: GgufChoice) -> GgufChoice | None:
    """The file of ``repository`` next in size to ``unreadable`` whose header says that it runs; few are looked at."""
    others = [choice for choice in choices_of(_sizes_of(repository)) if choice.runs and choice.complete]
    others = [choice for choice in others if choice.paths != unreadable.paths]
    for choice in sorted(others, key=lambda choice: abs(choice.nbytes - unreadable.nbytes))[:MOST_OTHERS]:
        try:
            checked_config(header_of(task, repository, files_of(repository, choice)))
        except Cancelled:
            raise
        except ModelError:
            continue
        return choice
    return None


def _sizes_of(repository: Repository) -> dict[str, int]:
    """Bytes of the repository's files, by their paths."""
    return {name: file.size for name, file in repository.files.items()}


def files_of(repository: Repository, choice: GgufChoice) -> list[RemoteFile]:
    """The parts of ``choice``, by the names that they get: without the repository's folders."""
    return [replace(repository.files[path], name=PurePosixPath(path).name) for path in choice.paths]


def header_of(task: Download, repository: Repository, files: list[RemoteFile]) -> GgufFile:
    """The model as its header describes it, of which only the beginning is fetched. Raises ModelError."""
    # It is named in errors as it is on the hub.
    path = Path(repository.repo) / files[0].name
    lengths = [FIRST_BYTES, *([LATER_BYTES] * (len(files) - 1))]
    while True:
        beginnings = [(task.beginning(file, length), file.size) for file, length in zip(files, lengths, strict=True)]
        try:
            header = GgufFile(path, beginnings)
        except HeaderGoesOn as short:
            if lengths[short.part] >= MOST_HEADER_BYTES:
                raise ModelError(
                    f"{path} has a header of over {MOST_HEADER_BYTES} bytes, which no model needs; it was not fetched."
                ) from short
            lengths[short.part] *= 4
            continue
        # These few numbers lie among the weights; the configuration is read again when they are here.
        header.tensors.pop("rope_freqs.weight", None)
        return header
