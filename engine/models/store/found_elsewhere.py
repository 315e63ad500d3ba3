"""Models that other programs on this machine hold already: ollama, LM Studio, llama.cpp, and the Hugging Face cache.

They are found by names and sizes, and used where they lie; nothing is ever written there. What is broken, unfinished or
too much to look at is left out without an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.errors import ModelError, shown
from engine.models.formats.gguf_names import GgufChoice, choices_of, matching
from engine.models.formats.json_files import MOST_TOKENIZER_BYTES, SMALL_FILE, read_object

Program = Literal["ollama", "lmstudio", "llama.cpp", "huggingface"]

TITLES: dict[str, str] = {
    "ollama": "ollama",
    "lmstudio": "LM Studio",
    "llama.cpp": "llama.cpp",
    "huggingface": "the Hugging Face cache",
}
"""The programs, by the word that stands before the colon in a model's name."""

MOST_ENTRIES = 10_000
"""Maximum files and folders that are looked at per program; the rest of a huge folder is not."""
_LONGEST_PATH = 4096
_MANIFEST_BYTES = 1 << 20
"""Maximum bytes of ollama's manifest of a model; they have about a thousand."""
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}"
_NAME = re.compile(_WORD)
_CACHED_REPO = re.compile(rf"models--(?P<owner>{_WORD}?)--(?P<name>{_WORD})")
_REVISION = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
"""Files of which a whole model has one."""
_WEIGHT_INDEX = "model.safetensors.index.json"
_OLLAMA_HOSTS = ("registry.ollama.ai", "ollama.com")
_OLLAMA_WEIGHTS = "application/vnd.ollama.image.model"
_OLLAMA_ADAPTER = "application/vnd.ollama.image.adapter"


@dataclass(frozen=True)
class FoundModel:
    """A complete model among another program's files."""

    name: str
    """The name by which it is used: ``ollama:qwen3:30b``, ``huggingface:owner/name:Q4_K_M``."""
    program: Program
    path: Path
    """A folder of safetensors, a GGUF file, or the first part of a split one. ollama's have no ending."""
    nbytes: int

    @property
    def problem(self) -> str:
        """Why it does not run, if the first bytes of its file tell; empty if not. Reads the disk."""
        from engine.models.architectures.gguf_architectures import ARCHITECTURES
        from engine.models.formats.gguf_file import stated_architecture

        architecture = "" if self.path.is_dir() else stated_architecture(self.path)
        known = not architecture or architecture in ARCHITECTURES
        return "" if known else f"the architecture {shown(architecture)} is not supported"

    @property
    def title(self) -> str:
        """The program's name in a sentence."""
        return TITLES[self.program]

    @property
    def short_name(self) -> str:
        """The name without the program."""
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class Places:
    """The folders in which each program keeps its models. They need not exist."""

    ollama: tuple[Path, ...] = ()
    lmstudio: tuple[Path, ...] = ()
    llama_cpp: tuple[Path, ...] = ()
    huggingface: tuple[Path, ...] = ()


@dataclass
class _Budget:
    """The number of files and folders that may still be looked at."""

    left: int = field(default_factory=lambda: MOST_ENTRIES)


def places(environment: Mapping[str, str], home: Path, platform: str) -> Places:
    """The programs' folders as their own documentation says, with the variables and files that move them."""

    def moved(*names: str) -> Path | None:
        found = (environment[name].strip() for name in names if environment.get(name, "").strip())
        return next((Path(os.path.expanduser(text)) for text in found), None)  # noqa: PTH111 - raises for no user

    mac = platform == "darwin"
    cache = moved("XDG_CACHE_HOME") or home / ".cache"
    hugging_face = moved("HF_HOME") or cache / "huggingface"
    of_service = () if mac else (Path("/usr/share/ollama/.ollama/models"),)
    return Places(
        ollama=(moved("OLLAMA_MODELS") or home / ".ollama" / "models", *of_service),
        lmstudio=_lm_studio_folders(home),
        llama_cpp=(moved("LLAMA_CACHE") or (home / "Library" / "Caches" if mac else cache) / "llama.cpp",),
        huggingface=(moved("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") or hugging_face / "hub",),
    )


def _lm_studio_folders(home: Path) -> tuple[Path, ...]:
    """Folders of LM Studio's models, by its home pointer and its settings, and its default folders."""
    folders = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    with contextlib.suppress(OSError, ValueError):
        pointed = Path(_beginning(home / ".lmstudio-home-pointer", _LONGEST_PATH).decode().strip())
        folders = [pointed, *folders] if pointed.is_absolute() else folders
    models: list[Path] = []
    for folder in folders:
        with contextlib.suppress(ModelError, OSError, ValueError):
            chosen = read_object(folder / "settings.json", SMALL_FILE).get("downloadsFolder")
            if isinstance(chosen, str) and Path(chosen).is_absolute():
                models.append(Path(chosen))
        models.append(folder / "models")
    return tuple(dict.fromkeys(models))


def here() -> Places:
    """The places on this machine, for this person."""
    try:
        home = Path.home()
    except RuntimeError:  # nobody's home is known
        home = Path(os.sep)
    return places(os.environ, home, sys.platform)


def find_all(where: Places) -> tuple[FoundModel, ...]:
    """All models of all programs, by program and name."""
    return (
        *_each(where.ollama, in_ollama),
        *_each(where.lmstudio, in_lm_studio),
        *_each(where.llama_cpp, in_llama_cpp),
        *_each(where.huggingface, in_huggingface),
    )


def find(name: str, where: Places) -> FoundModel | None:
    """The model called ``name`` (``ollama:qwen3:30b``), ignoring case; None if there is none.

    ollama's ``:latest`` may be left out, and so may a tag where there is only one.
    """
    searches: dict[str, tuple[tuple[Path, ...], Callable[[Path], tuple[FoundModel, ...]]]] = {
        "ollama": (where.ollama, in_ollama),
        "lmstudio": (where.lmstudio, in_lm_studio),
        "llama.cpp": (where.llama_cpp, in_llama_cpp),
        "huggingface": (where.huggingface, in_huggingface),
    }
    wanted = name.casefold()
    search = searches.get(wanted.partition(":")[0])
    if search is None:
        return None
    known = {model.name.casefold(): model for model in _each(*search)}
    only = [model for other, model in known.items() if other.startswith(wanted + ":")]
    return known.get(wanted) or known.get(wanted + ":latest") or (only[0] if len(only) == 1 else None)


def find_repo(repo: str, tag: str, where: Places) -> FoundModel | None:
    """The hub repo ``repo`` in the Hugging Face cache: its GGUF file ``tag``, or, if that is empty, its safetensors or
    its only GGUF file. None if it is not there completely."""
    owner, _, name = repo.partition("/")
    for root in where.huggingface:
        folder = root / f"models--{owner}--{name}"
        models = _in_snapshot(folder, repo, _Budget())
        plain = [model for model in models if model.path.is_dir()]
        files = {model.name: model for model in models if not model.path.is_dir()}
        if tag:
            sizes = {model.path.name: model.nbytes for model in files.values()}
            named = {path for choice in matching(choices_of(sizes), tag) for path in choice.paths}
            plain = [model for model in files.values() if model.path.name in named]
        elif not plain:
            plain = list(files.values())
        if len(plain) == 1:
            return plain[0]
    return None


def _each(roots: tuple[Path, ...], search: Callable[[Path], tuple[FoundModel, ...]]) -> tuple[FoundModel, ...]:
    """What ``search`` finds in all ``roots``, by name; of two with one name, that in the earlier root."""
    found: dict[str, FoundModel] = {}
    for root in roots:
        for model in search(root):
            found.setdefault(model.name, model)
    return tuple(sorted(found.values(), key=lambda model: model.name.casefold()))


# --- one program each ---------------------------------------------------------------------------------------------


def in_ollama(root: Path) -> tuple[FoundModel, ...]:
    """The models whose manifests lie in ``root``: ``manifests/host/namespace/model/tag``, JSON that names blobs."""
    budget = _Budget()
    models = []
    for kind in ("manifests", "manifests-v2"):
        for path in _files(root / kind, 4, budget):
            parts = path.relative_to(root / kind).parts
            if len(parts) != 4 or not all(_NAME.fullmatch(part) for part in parts):
                continue
            blob = _ollama_blob(root, path)
            if blob is not None:
                host, owner, model, tag = parts
                owner = "" if owner == "library" and host in _OLLAMA_HOSTS else f"{owner}/"
                host = "" if host in _OLLAMA_HOSTS else f"{host}/"
                models.append(FoundModel(f"ollama:{host}{owner}{model}:{tag}", "ollama", *blob))
    return tuple(models)


def _ollama_blob(root: Path, manifest: Path) -> tuple[Path, int] | None:
    """Path and size of the weights that ``manifest`` names; None if they are not one whole GGUF file."""
    try:
        said = json.loads(_beginning(manifest, _MANIFEST_BYTES))
        layers = [(layer["mediaType"], layer["digest"], layer["size"]) for layer in said["layers"]]
        kinds = [kind for kind, _, _ in layers]
        if kinds.count(_OLLAMA_WEIGHTS) != 1 or _OLLAMA_ADAPTER in kinds:
            return None
        _, digest, size = layers[kinds.index(_OLLAMA_WEIGHTS)]
        if not _DIGEST.fullmatch(digest):
            return None
        blob = root / "blobs" / digest.replace(":", "-")
        # A blob that is still being fetched is shorter, or has another name.
        return (blob, size) if blob.stat().st_size == size else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def in_lm_studio(root: Path) -> tuple[FoundModel, ...]:
    """The models in ``root/owner/name``."""
    budget = _Budget()
    found: list[FoundModel] = []
    for owner in _folders(root, budget):
        for folder in _folders(owner, budget):
            found += _in_folder(folder, f"lmstudio:{owner.name}/{folder.name}", "lmstudio", budget)
    return tuple(found)


def in_llama_cpp(root: Path) -> tuple[FoundModel, ...]:
    """The GGUF files in ``root``, called by their names."""
    return tuple(
        FoundModel(f"llama.cpp:{choice.stem}", "llama.cpp", root / choice.paths[0], choice.nbytes)
        for choice in _choices_in(root, 1, _Budget())
    )


def in_huggingface(root: Path) -> tuple[FoundModel, ...]:
    """The models in the snapshots of ``root``, each of the revision that its cache calls main."""
    budget = _Budget()
    models: list[FoundModel] = []
    for folder in _folders(root, budget):
        named = _CACHED_REPO.fullmatch(folder.name)
        if named is not None:
            models += _in_snapshot(folder, f"{named['owner']}/{named['name']}", budget)
    return tuple(models)


def _in_snapshot(folder: Path, repo: str, budget: _Budget) -> list[FoundModel]:
    snapshot = _snapshot_of(folder)
    return _in_folder(snapshot, f"huggingface:{repo}", "huggingface", budget) if snapshot is not None else []


def _snapshot_of(folder: Path) -> Path | None:
    """The revision that ``refs/main`` names, or else the newest."""
    try:
        main = _beginning(folder / "refs" / "main", 100).decode("ascii", "replace").strip()
        if _REVISION.fullmatch(main) and (folder / "snapshots" / main).is_dir():
            return folder / "snapshots" / main
    except OSError:
        pass
    with contextlib.suppress(OSError):
        kept = [path for path in (folder / "snapshots").iterdir() if _REVISION.fullmatch(path.name)]
        return max(kept, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return None


# --- one folder ---------------------------------------------------------------------------------------------------


def _in_folder(folder: Path, name: str, program: Program, budget: _Budget) -> list[FoundModel]:
    """The safetensors model in ``folder``, called ``name``, and its GGUF models, called ``name:tag``."""
    models = [
        FoundModel(f"{name}:{choice.tag}", program, folder / choice.paths[0], choice.nbytes)
        for choice in _choices_in(folder, 2, budget)
    ]
    weights = _safetensors_bytes(folder)
    return models + ([FoundModel(name, program, folder, weights)] if weights else [])


def _choices_in(folder: Path, depth: int, budget: _Budget) -> list[GgufChoice]:
    sizes: dict[str, int] = {}
    for path in _files(folder, depth, budget):
        if path.suffix.casefold() == ".gguf":
            with contextlib.suppress(OSError):  # a link to what is gone
                seen = path.stat()
                if stat.S_ISREG(seen.st_mode):
                    sizes[path.relative_to(folder).as_posix()] = seen.st_size
    return [choice for choice in choices_of(sizes) if choice.complete]


def _safetensors_bytes(folder: Path) -> int:
    """Bytes of the weights of the model in ``folder``; 0 if it is not a whole one of a family that runs."""
    from engine.models.architectures.composite import language_only
    from engine.models.architectures.families import check_supported

    try:
        if not (folder / "config.json").is_file():
            return 0
        check_supported(language_only(read_object(folder / "config.json", SMALL_FILE)))
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            return 0
        return sum((folder / name).stat().st_size for name in _weight_names(folder))
    except (ModelError, OSError):
        return 0


def _weight_names(folder: Path) -> set[str]:
    """The safetensors files of a whole model; empty if one is missing."""
    index = folder / _WEIGHT_INDEX
    names: set[str]
    if index.is_file():
        listed: Any = read_object(index, MOST_TOKENIZER_BYTES).get("weight_map")
        values = listed.values() if isinstance(listed, dict) else ()
        names = {name for name in values if isinstance(name, str) and _NAME.fullmatch(name)}
    else:
        names = {path.name for path in folder.glob("*.safetensors")}
        for split in filter(None, map(_SHARD.fullmatch, sorted(names))):
            count = int(split["count"])
            if count > len(names):
                return set()
            names |= {f"{split['stem']}-{part:05}-of-{count:05}.safetensors" for part in range(1, count + 1)}
    return names if all((folder / name).is_file() for name in names) else set()


def _beginning(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file; nothing of what is none, as reading a pipe would wait. Raises OSError."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(nbytes)


def _folders(root: Path, budget: _Budget) -> Iterator[Path]:
    """The folders in ``root`` with plain names, in order."""
    for entry in _entries(root, budget):
        if _NAME.fullmatch(entry.name) and _is_folder(entry):
            yield Path(entry.path)


def _files(root: Path, depth: int, budget: _Budget) -> Iterator[Path]:
    """The files in ``root`` and, for ``depth`` above 1, in the folders in it; a link counts as what it points to."""
    for entry in _entries(root, budget):
        if not _is_folder(entry):
            yield Path(entry.path)
        elif depth > 1:
            yield from _files(Path(entry.path), depth - 1, budget)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links
        return False


def _entries(root: Path, budget: _Budget) -> list[os.DirEntry[str]]:
    """What lies in ``root``, by name, as far as the budget goes; nothing if it cannot be read."""
    listed: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError, ValueError), os.scandir(root) as entries:
        for entry in entries:
            if budget.left < 1:
                break
            budget.left -= 1
            listed.append(entry)
    return sorted(listed, key=lambda entry: entry.name)
