"""The models on this machine, and the meaning of a model's name.

Layout of ``locate("models")``: one folder per model.

- ``owner--name``: a download of the hub repo ``owner/name``; ``owner--name--Q4_K_M``: of that GGUF file of it;
- ``starter``; ``gguf--stem--fingerprint``: links to a GGUF;
- ``X.prepared``: the prepared copy of ``X``; ``local--name--fingerprint.prepared``: of a folder outside of this one;
- ``name--fingerprints.share``: this machine's shard of a model that a ring runs, received from the ring's head;
- ``X.partial``: an unfinished download, which is never opened as a model;
- ``X.received.partial``: the part of ``X`` that has arrived from another machine.

A folder gets its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine.errors import ModelError, shown
from engine.models.folders.model_folder import (
    BANK_MANIFEST,
    INDEX,
    PARTIAL,
    PREPARED,
    RECEIVED,
    SHARD,
    family_of,
    folder_bytes,
    is_complete,
    path_exists,
    refuse_shard,
)
from engine.models.formats.gguf_names import choices_of, matching, missing_part, models_in, parts_of, tag_of, whole_of
from engine.models.store import catalogue, found_elsewhere
from engine.models.store.catalogue import STARTER, CatalogueEntry
from engine.models.store.found_elsewhere import TITLES, FoundModel
from engine.system.locations import locate, remove_profiles

Kind = Literal["starter", "hub", "folder", "gguf"]


_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,400}")
_HUB_NAMES = ("https://huggingface.co/", "huggingface.co/", "hf.co/")
"""Beginnings of a repository's name as other programs write it."""


@dataclass(frozen=True)
class ResolvedModel:
    """The meaning of a model's name, and the model's folders on this machine."""

    name: str
    """Name on the screen: catalogue name, repo id, or the name of the folder or file."""
    kind: Kind
    source: Path
    """The plain model: a folder of safetensors, or a GGUF file. It may not exist yet (starter, hub)."""
    plain_folder: Path
    """Folder with the weights as published: the source itself, or the folder that links to a GGUF file."""
    prepared_folder: Path
    """Folder of its prepared copy, which may not exist yet."""
    repo: str | None = None
    tag: str = ""
    """What names one GGUF file of the repo, as it was given; empty for its safetensors or its only GGUF file."""
    entry: CatalogueEntry | None = None
    found: FoundModel | None = None
    """What it is among the files of another program; None for all others."""

    @property
    def folder(self) -> Path | None:
        """The folder to open: the prepared one if there is one, else the plain one; None if neither is here."""
        if self.prepared:
            return self.prepared_folder
        return self.plain_folder if is_complete(self.plain_folder) else None

    @property
    def prepared(self) -> bool:
        """Whether there is a prepared copy, not older than the plain folder's files."""
        return is_complete(self.prepared_folder) and not _is_newer(self.plain_folder, self.prepared_folder)

    @property
    def elsewhere(self) -> str:
        """A sentence about the other program that holds it; empty if none does."""
        if self.found is None:
            return ""
        return f"{self.name} is in {self.found.title} already, and is used from there: {self.found.path}"

    def require_folder(self) -> Path:
        """The folder to open. Raises ModelError saying how to get the model if it is not on this machine."""
        folder = self.folder
        if folder is not None:
            return folder
        if self.kind == "gguf":
            raise ModelError(
                f"{self.source} has not been opened yet; run: privatellm models prepare {_quoted(str(self.source))}"
            )
        if self.kind == "folder":
            raise ModelError(
                f"{self.source} is no model: it lacks config.json or *.safetensors; name another folder.", "bad-input"
            )
        raise ModelError(f"The model {self.name} is not on this machine; run: privatellm models pull {self.name}")


@dataclass(frozen=True)
class InstalledModel:
    """A complete model in the models folder."""

    name: str
    """The name by which it is used."""
    path: Path
    family: str
    """``model_type`` of its config; empty if the config cannot be read."""
    nbytes: int
    """Bytes on disk, the prepared copy included."""
    prepared: bool
    linked: Path | None = None
    """The GGUF file, elsewhere on this machine, to which it is only links; None for all others."""


def resolve(model: str, *, elsewhere: bool = True) -> ResolvedModel:
    """The meaning of ``model``: catalogue name, hub repo id (``owner/name:Q4_K_M`` for one GGUF file of it), local
    folder, GGUF file, or a model of another program (``ollama:qwen3:30b``). Opens no socket.

    A repo that is not in the models folder is taken from the Hugging Face cache if it is there, unless ``elsewhere`` is
    False.

    Anything that exists, starts with ``/``, ``.`` or ``~``, or ends in ``.gguf`` without a colon is a path. A catalogue
    name takes precedence over a folder of that name in the current directory. Raises ModelError for anything else, with
    the most similar name.
    """
    text = model.strip()
    if not text:
        raise ModelError("No model was named; `privatellm models` lists those that are known.", "bad-input")
    if "\0" in text:
        raise ModelError("A model's name cannot hold a zero byte.", "bad-input")
    entry = catalogue.find(text)
    if entry is not None:
        return _resolve_entry(entry, elsewhere)
    program, colon, _ = text.partition(":")
    if colon and program.casefold() in TITLES:
        return _resolve_program(text)
    # Path.expanduser raises for an unknown user; os.path leaves such a name as it is, and it is then not found.
    path = Path(os.path.expanduser(text)) if text.startswith("~") else Path(text)  # noqa: PTH111
    repo, tag = _repo_and_tag(text)
    if text.startswith(("/", ".", "~")) or (text.casefold().endswith(".gguf") and not tag) or path_exists(path):
        return _resolve_path(path)
    own = resolve_installed(text)
    if own is not None:
        return own
    if repo:
        return _resolve_repo(repo, tag, None, elsewhere)
    raise ModelError(f"There is no model called {text[:100]!r}; {_suggestions(text[:100])}", "bad-input")


def installed() -> list[InstalledModel]:
    """The complete models in the models folder, by name. Damaged and partial ones are left out without an error."""
    root = locate("models")
    if not root.is_dir():
        return []
    models: dict[str, InstalledModel] = {}
    for folder in sorted(root.iterdir()):
        if folder.name.startswith((".", "local--")) or not is_complete(folder):
            continue
        key = folder.name.removesuffix(PREPARED)
        plain, prepared = root / key, root / (key + PREPARED)
        if key not in models:
            models[key] = InstalledModel(
                name=_display_name(key),
                path=prepared if is_complete(prepared) else plain,
                family=family_of(folder),
                nbytes=folder_bytes(plain) + folder_bytes(prepared) + _linked_bytes(plain),
                prepared=is_complete(prepared),
                linked=_linked_file(plain),
            )
    return sorted(models.values(), key=lambda item: item.name.casefold())


def _linked_bytes(folder: Path) -> int:
    """Bytes of the files outside of ``folder`` that it links to."""
    total = 0
    for link in folder.glob("*.gguf"):
        with contextlib.suppress(OSError):
            total += link.stat().st_size if link.is_symlink() else 0
    return total


def _linked_file(folder: Path) -> Path | None:
    """The first file to which ``folder`` links."""
    if not folder.name.startswith("gguf--"):
        return None
    with contextlib.suppress(OSError):
        return next((path.readlink() for path in sorted(folder.glob("*.gguf")) if path.is_symlink()), None)
    return None


def partial_downloads() -> list[tuple[str, int]]:
    """``(name, bytes so far)`` of unfinished models, by name."""
    root = locate("models")
    bytes_by_name: dict[str, int] = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.suffix == PARTIAL and folder.is_dir():
            name = _display_name(_key_of(folder.name))
            bytes_by_name[name] = bytes_by_name.get(name, 0) + _disk_bytes(folder)
    return list(bytes_by_name.items())


def begun_bytes(model: ResolvedModel) -> int:
    """Bytes on disk of an unfinished download of ``model``; 0 if none was begun."""
    plain = model.plain_folder
    begun = (plain.with_name(plain.name + PARTIAL), download_cache(plain))
    return sum(_disk_bytes(folder) for folder in begun if folder.is_dir())


def shards() -> list[tuple[str, int]]:
    """``(folder name, bytes on disk)`` of this machine's shards. They are not models, but can be removed."""
    root = locate("models")
    found = sorted(root.glob(f"*{SHARD}")) if root.is_dir() else []
    return [(folder.name, _disk_bytes(folder)) for folder in found if folder.is_dir()]


def prepared_elsewhere() -> list[tuple[str, int]]:
    """``(folder name, bytes)`` of the prepared copies of folders outside of the models folder. They can be removed by
    these names."""
    root = locate("models")
    found = sorted(root.glob(f"local--*{PREPARED}")) if root.is_dir() else []
    return [(folder.name, folder_bytes(folder)) for folder in found if is_complete(folder)]


def remove(name: str) -> int:
    """Delete a model of the models folder, its prepared copy, its unfinished parts, and the records of its use.

    A person's own folder or GGUF file is never touched; only what was made from it is deleted. A shard is deleted by
    the name of its folder. Returns the freed bytes.

    Raises ModelError if there is nothing to delete or it cannot be deleted.
    """
    root = locate("models")
    if name in (shard for shard, _ in shards()):
        freed = _disk_bytes(root / name)
        _delete([root / name])
        return freed
    model = resolve(name, elsewhere=False)
    base = model.plain_folder if model.plain_folder.parent == root else model.prepared_folder
    key = base.name.removesuffix(PREPARED)
    folders = [root / (key + suffix) for suffix in ("", PREPARED, PARTIAL, PREPARED + PARTIAL, RECEIVED + PARTIAL)]
    folders = [folder for folder in [*folders, download_cache(root / key)] if folder.is_dir()]
    if not folders:
        if freed := remove_profiles(key):  # what was learned of a model that lies elsewhere
            return freed
        raise ModelError(f"Nothing of {model.name} is in {root}; `privatellm models` lists what is.", "bad-input")
    freed = sum(folder_bytes(folder) for folder in folders)
    _delete(folders)
    return freed + remove_profiles(key)


def _delete(folders: list[Path]) -> None:
    """Raises ModelError if one cannot be deleted."""
    for folder in folders:
        # Renamed first: a removal that is interrupted must not leave half a model under a complete model's name.
        doomed = (
            folder
            if folder.suffix == PARTIAL or folder.name.startswith(".")
            else folder.with_name(f"{folder.name}{PARTIAL}")
        )
        try:
            if doomed != folder:
                if doomed.exists():
                    shutil.rmtree(doomed)
                folder.rename(doomed)
            if doomed.exists():
                shutil.rmtree(doomed)
        except OSError as error:
            raise ModelError(f"{folder} could not be deleted: {error.strerror or error}.", "disk") from error


def profile_key(folder: Path) -> str:
    """The name under which the records of the model in ``folder`` are kept: the same for its plain folder, its
    prepared copy, and its unfinished copy."""
    folder = folder.absolute()
    if folder.parent == locate("models").absolute():
        return _key_of(folder.name)
    return resolve(str(folder)).prepared_folder.name.removesuffix(PREPARED)


def repo_folder_name(repo: str, tag: str = "") -> str:
    """``owner/name``, or one GGUF file of it, as one folder name."""
    return repo.replace("/", "--") + (f"--{_safe(tag)}" if tag else "")


def download_cache(folder: Path) -> Path:
    """The folder for the sources of ``folder`` until it is finished."""
    return folder.with_name(f".{folder.name}.download")


def check_name_is_free(folder: Path) -> None:
    """Raises ModelError if ``folder`` exists and is not a complete model."""
    if os.path.lexists(folder):
        raise ModelError(
            f"{folder} is in the way: it is not a complete model; move it away, or run: "
            f"privatellm models remove {_display_name(folder.name)}",
            "bad-input",
        )


def _disk_bytes(folder: Path) -> int:
    """Bytes of disk that the files below ``folder`` occupy, without the holes of sparse files."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(base) / name).lstat().st_blocks * 512
    return total


def gguf_fingerprint(path: Path) -> str:
    """16 hex digits that change when the GGUF file or another part of its model does: sizes, and the first and last
    megabyte of each.

    Raises ModelError if one cannot be read.
    """
    import hashlib

    chunk = 1024 * 1024
    digest = hashlib.sha256()
    parts = parts_of(path)
    try:
        for part in parts:
            if len(parts) > 1 and not part.exists():
                raise ModelError(missing_part(part, len(parts)), "bad-input")
            size = part.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with part.open("rb") as file:
                digest.update(file.read(chunk))
                file.seek(max(0, size - chunk))
                digest.update(file.read(chunk))
    except OSError as error:
        raise ModelError(f"{part} cannot be read: {error.strerror or error}.", "bad-input") from error
    return digest.hexdigest()[:16]


# --- one kind each ------------------------------------------------------------------------------------------------


def _resolve_entry(entry: CatalogueEntry, elsewhere: bool) -> ResolvedModel:
    if entry.origin == "starter":
        folder = locate("models") / STARTER
        return ResolvedModel(entry.name, "starter", folder, folder, folder.with_name(STARTER + PREPARED), entry=entry)
    return _resolve_repo(entry.repo, entry.tag, entry, elsewhere)


def _repo_and_tag(text: str) -> tuple[str, str]:
    """``owner/name`` and what follows a colon; two empty texts if it is no such name."""
    for prefix in _HUB_NAMES:
        text = text.removeprefix(prefix)
    repo, colon, tag = text.partition(":")
    good = _REPO.fullmatch(repo) and not any(mark in text for mark in ("..", "--"))
    return (repo, tag) if good and (_TAG.fullmatch(tag) if colon else True) else ("", "")


def _resolve_repo(repo: str, tag: str, entry: CatalogueEntry | None, elsewhere: bool) -> ResolvedModel:
    folder = _file_folder(repo, tag)
    name = entry.name if entry else _display_name(folder.name) if folder else f"{repo}:{tag}" if tag else repo
    if folder is None:
        folder = locate("models") / repo_folder_name(repo, tag_of(tag))
    prepared = folder.with_name(folder.name + PREPARED)
    model = ResolvedModel(name, "hub", folder, folder, prepared, repo=repo, tag=tag, entry=entry)
    if elsewhere and model.folder is None:
        found = found_elsewhere.find_repo(repo, tag, found_elsewhere.here())
        if found is not None:
            return _resolve_found(found, entry.name if entry else found.short_name)
    return model


def _resolve_program(text: str) -> ResolvedModel:
    model = found_elsewhere.find(text, found_elsewhere.here())
    if model is None:
        program, _, name = text.partition(":")
        raise ModelError(
            f"There is no whole model {shown(name)} among the files of {TITLES[program.casefold()]}; "
            "`privatellm models` lists what was found.",
            "bad-input",
        )
    return _resolve_found(model, model.name)


def _resolve_found(found: FoundModel, name: str) -> ResolvedModel:
    if found.path.is_dir():
        return replace(_resolve_path(found.path), name=name, found=found)
    return replace(
        _resolve_gguf(found.path, found.path.stem if found.path.suffix else found.short_name), name=name, found=found
    )


def _file_folder(repo: str, tag: str) -> Path | None:
    """The folder of a downloaded GGUF file of ``repo`` that ``tag`` names, or of the only one if it is empty and there
    are no safetensors; None if there is none."""
    plain = locate("models") / repo_folder_name(repo)
    if not tag and is_complete(plain):
        return None
    found = [folder for folder in plain.parent.glob(f"{plain.name}--*") if _holds_file(folder, tag)]
    return found[0] if len(found) == 1 else None


def _holds_file(folder: Path, tag: str) -> bool:
    if folder.suffix == PREPARED or not is_complete(folder):
        return False
    return not tag or bool(matching(choices_of(dict.fromkeys((path.name for path in folder.iterdir()), 0)), tag))


def _resolve_path(path: Path) -> ResolvedModel:
    if not path_exists(path):
        raise ModelError(f"There is no file or folder {_printable(path)}; check the path.", "bad-input")
    path = path.absolute()
    models = locate("models")
    if path.is_file():
        if path.suffix.casefold() != ".gguf":
            raise ModelError(
                f"{path} is neither a folder with config.json and *.safetensors nor a .gguf file; name one of these.",
                "bad-input",
            )
        path = whole_of(path)
        return _resolve_gguf(path, path.stem)
    refuse_shard(path)
    if path.suffix == PARTIAL:
        raise ModelError(f"{path} is an unfinished download; run `privatellm models pull` again.", "bad-input")
    if path.parent == models.absolute() and not path.name.startswith("local--"):
        plain = path.with_name(path.name.removesuffix(PREPARED))
        name = _display_name(plain.name)
        return ResolvedModel(name, "folder", plain, plain, plain.with_name(plain.name + PREPARED))
    if not path_exists(path / "config.json") and (files := _gguf_models_in(path)):
        if len(files) > 1:
            names = ", ".join(each.name for each in files)
            raise ModelError(f"{path} holds several models: {shown(names, 400)}; name one of these files.", "bad-input")
        return _resolve_gguf(files[0], files[0].stem)
    import hashlib

    identity = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    prepared = models / f"local--{_safe(path.name)}--{identity}{PREPARED}"
    return ResolvedModel(path.name, "folder", path, path, prepared)


def _gguf_models_in(folder: Path) -> tuple[Path, ...]:
    """The GGUF files in a person's own folder, of each model the first; none where the folder cannot be read."""
    try:
        return models_in(folder)
    except OSError:
        return ()


def _resolve_gguf(path: Path, stem: str) -> ResolvedModel:
    folder = locate("models") / f"gguf--{_safe(stem)}--{gguf_fingerprint(path)}"
    return ResolvedModel(path.name, "gguf", path, folder, folder.with_name(folder.name + PREPARED))


def resolve_installed(text: str) -> ResolvedModel | None:
    """A complete model of the models folder by its folder's own name, or a GGUF by the name that ``privatellm models``
    shows; None if there is none."""
    if "/" in text or "\0" in text or text.startswith("."):
        return None
    folder = locate("models") / text
    linked = [each for each in _links_of(text) if is_complete(each)]
    if len(linked) == 1:
        folder = linked[0]
    if is_complete(folder) or is_complete(folder.with_name(folder.name + PREPARED)):
        name = _display_name(folder.name)
        return ResolvedModel(name, "folder", folder, folder, folder.with_name(folder.name + PREPARED))
    return None


def _links_of(stem: str) -> list[Path]:
    """The folders of GGUF files called ``stem``.gguf, of which there may be several in different places."""
    root = locate("models")
    pattern = re.compile(re.escape(f"gguf--{stem}--") + "[0-9a-f]{16}")
    return [each for each in root.iterdir() if pattern.fullmatch(each.name)] if root.is_dir() else []


def _is_newer(plain: Path, prepared: Path) -> bool:
    """Whether a person has changed the weights or config in ``plain`` since ``prepared`` was written."""
    last = prepared / (BANK_MANIFEST if path_exists(prepared / BANK_MANIFEST) else INDEX)
    try:
        written = last.stat().st_mtime_ns
        sources = [plain / "config.json", *plain.glob("*.safetensors")]
        return any(source.exists() and source.stat().st_mtime_ns > written for source in sources)
    except OSError:
        return False


def _printable(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() and len(text) <= 200 else shown(text, 200)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-")[:60] or "model"


def _key_of(folder_name: str) -> str:
    """The name of the plain folder of a model, of which the folder may be the prepared copy, or something
    unfinished."""
    return folder_name.removesuffix(PARTIAL).removesuffix(RECEIVED).removesuffix(PREPARED)


def _display_name(key: str) -> str:
    if key.startswith("gguf--"):
        stem = key.removeprefix("gguf--").rpartition("--")[0]
        return stem if len(_links_of(stem)) == 1 else key
    if key.startswith("local--") or "--" not in key:
        return key
    repo = key.replace("--", "/", 1).replace("--", ":", 1)
    entry = catalogue.find(repo)
    return entry.name if entry else repo


def _suggestions(text: str) -> str:
    import difflib

    names = [name for entry in catalogue.catalogue() for name in (entry.name, entry.address)]
    names += [item.name for item in installed()]
    near = difflib.get_close_matches(text, sorted(set(filter(None, names))), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? Otherwise " if near else ""
    return hint + "use a catalogue name (`privatellm models`), a repo id like owner/name, a folder, or a .gguf file."


def _quoted(text: str) -> str:
    return f"'{text}'" if " " in text else text
