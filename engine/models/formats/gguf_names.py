"""What the names of GGUF files say: which files are one model, and which model a tag like ``Q4_K_M`` names.

Most are pure functions of names and sizes, for a repository on the hub as well as for a folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from engine.planning.units import byte_size

_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}"
_SAFE_PATH = re.compile(rf"({_WORD}/){{0,2}}{_WORD}\.gguf", re.IGNORECASE)
"""A path that cannot leave its folder. Repositories keep split files one folder deep."""
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.IGNORECASE)
_MOST_PARTS = 1000
_EDGE = r"(?:(?<=[-._/])|^)"
_TAG = re.compile(
    _EDGE + r"(?P<tag>(UD-)?(I?Q\d+(_[A-Z0-9]+)*|TQ\d_\d|MXFP4(_MOE)?|NVFP4|BF16|FP?16|FP?32))(?=[-.]|$)", re.IGNORECASE
)
_RUNS = re.compile(
    r"(UD-)?(Q[4568]|Q[458]_[01]|Q[12]_0|Q[234568]_K(_[A-Z]+)?|IQ[123]_(XXS|XS|S|M)|IQ4_(XS|NL)|TQ[12]_0|"
    r"MXFP4(_MOE)?|NVFP4|BF16|FP?16|FP?32)"
)
"""Tags of files whose tensors are, by custom, all in formats that run."""
_FEW_BITS = re.compile(r"(UD-)?(I?Q[123]|TQ)")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_TOWER = re.compile(r"[\w.+-]*mmproj[\w.+-]*\.gguf", re.IGNORECASE)
_RECOMMENDED = ("Q4_K_M", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_K_XL", "Q4_K_L", "Q4_K_S", "IQ4_XS", "Q4_0", "Q5_K_M")
"""Tags in the order in which they are recommended: about 4.5 bits per weight cost little quality."""


@dataclass(frozen=True)
class GgufChoice:
    """One model among the files: a single file, or all parts of a split one."""

    tag: str
    """What it is called after the colon: ``Q4_K_M``, or the file's name without its ending where that says more."""
    paths: tuple[str, ...]
    """Paths of its parts, in order."""
    nbytes: int
    complete: bool = True
    """Whether all parts of a split one are there."""

    @property
    def stem(self) -> str:
        """The file's name without its ending and the number of the part."""
        return _stem(self.paths[0])

    @property
    def runs(self) -> bool:
        """Whether its name speaks of formats that run, or of none. Its header tells for certain."""
        tag = tag_of(self.stem)
        return _RUNS.fullmatch(tag) is not None or _TAG.fullmatch(tag) is None


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of the model of which ``path`` is one: the parts of a split one in order, else ``path`` alone."""
    match = _SPLIT.fullmatch(path.stem) if path.suffix.casefold() == ".gguf" else None
    if match is None or not 1 <= int(match["count"]) <= _MOST_PARTS:
        return (path,)
    count = int(match["count"])
    return tuple(
        path.with_name(f"{match['stem']}-{part:05}-of-{count:05}{path.suffix}") for part in range(1, count + 1)
    )


def whole_of(path: Path) -> Path:
    """The first file of the model of which ``path`` is a file, or a link to one. The other parts lie beside the link,
    or else beside what it leads to."""
    here, there = parts_of(path), parts_of(path.resolve())
    if len(here) > 1 and (len(there) == 1 or all(part.exists() for part in here)):
        return here[0]
    return there[0] if len(there) > 1 else path


def models_in(folder: Path) -> tuple[Path, ...]:
    """The first file of each GGUF model in ``folder``, by name. Vision towers and importance matrices are none."""
    files = (each for each in folder.iterdir() if each.suffix.casefold() == ".gguf" and not _is_no_model(each.name))
    return tuple(sorted({parts_of(each)[0] for each in files}))


_BEST_TOWERS = ("BF16", "F16", "F32", "Q8_0")
"""Number formats in the names of vision towers, the best first: half of the bytes of F32, and nothing is lost."""


def tower_among(names: Iterable[str]) -> str | None:
    """The vision tower to take among the ``names`` of a folder's files; None if there is none."""

    def rank(name: str) -> tuple[int, str]:
        words = re.split(r"[-.]", name.upper())
        return next((place for place, tag in enumerate(_BEST_TOWERS) if tag in words), len(_BEST_TOWERS)), name

    return min((name for name in names if _TOWER.fullmatch(name)), key=rank, default=None)


def missing_part(part: Path, count: int) -> str:
    """What is to be said of a part that is not there, of a model of ``count`` parts."""
    return f"{part} is missing: the model is split into {count} files; put them into one folder."


def choices_of(sizes: Mapping[str, int]) -> tuple[GgufChoice, ...]:
    """The models among files of the given paths and sizes, the smallest first.

    Vision towers (mmproj), importance matrices, and names that are not safe are left out.
    """
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in sorted(sizes):
        if _SAFE_PATH.fullmatch(path) is None or _is_no_model(path):
            continue
        whole = path[: -len(".gguf")]
        split = _SPLIT.fullmatch(whole)
        key = (split["stem"], int(split["count"])) if split else (whole, 1)
        groups.setdefault(key, {})[int(split["number"]) if split else 1] = path
    choices = []
    for (whole, count), parts in groups.items():
        paths = tuple(parts[number] for number in sorted(parts))
        complete = sorted(parts) == list(range(1, count + 1))
        choices.append(GgufChoice(tag_of(whole), paths, sum(sizes[path] for path in paths), complete))
    often = Counter(choice.tag for choice in choices)
    told_apart = [choice if often[choice.tag] == 1 else replace(choice, tag=choice.stem) for choice in choices]
    return tuple(sorted(told_apart, key=lambda choice: (choice.nbytes, choice.tag)))


def tag_of(name: str) -> str:
    """The tag that a file's name or a person's word contains, in capitals; else the name without its ending."""
    stem = _stem(name)
    found = list(_TAG.finditer(stem))
    return found[-1]["tag"].upper() if found else stem


def matching(choices: Iterable[GgufChoice], wanted: str) -> tuple[GgufChoice, ...]:
    """The choices that ``wanted`` names, as users of llama.cpp and ollama write it, ignoring case.

    It is a file's name, whole or without its ending, or a tag; a tag also names what only adds to it in front
    (``Q4_K_XL`` names ``UD-Q4_K_XL``) or, failing that, a file whose name contains it as words. The first of these
    ways that finds something counts.
    """
    choices, wanted = tuple(choices), wanted.casefold()
    stem = _stem(wanted)

    def words(choice: GgufChoice) -> bool:
        return re.search(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", choice.paths[0].casefold()) is not None

    ways = (
        lambda choice: wanted in (path.casefold() for path in choice.paths),
        lambda choice: choice.stem.casefold() == stem,
        lambda choice: choice.tag.casefold() == wanted,
        lambda choice: choice.tag.casefold().endswith("-" + wanted),
        words,
    )
    return next((found for way in ways if (found := tuple(filter(way, choices)))), ())


def recommended(choices: Iterable[GgufChoice]) -> GgufChoice | None:
    """The one to take without a reason for another; None if none of them runs."""
    running = [choice for choice in choices if choice.runs and choice.complete]
    by_tag = {choice.tag: choice for choice in running}
    # Otherwise the smallest one, but of files with fewer than four bits the largest.
    wide = [choice for choice in running if not _FEW_BITS.match(choice.tag)]
    other = wide[0] if wide else running[-1] if running else None
    return next((by_tag[tag] for tag in _RECOMMENDED if tag in by_tag), other)


def listed(choices: Iterable[GgufChoice]) -> str:
    """``Q4_K_M (4.9 GB), Q8_0 (8.5 GB)``, with the number of those that are left out because they do not run."""
    choices = tuple(choices)
    shown = [choice for choice in choices if choice.runs] or choices
    text = ", ".join(f"{choice.tag} ({byte_size(choice.nbytes)})" for choice in shown)
    left = len(choices) - len(shown)
    return text + (f", and {left} in formats that do not run here" if left else "")


def _stem(name: str) -> str:
    last = PurePosixPath(name).name
    if last.casefold().endswith(".gguf"):
        last = last[: -len(".gguf")]
    split = _SPLIT.fullmatch(last)
    return split["stem"] if split else last


def _is_no_model(path: str) -> bool:
    found = _NO_MODEL.search(PurePosixPath(path).name)
    # What was packed with the help of an importance matrix may say so and is a model.
    return found is not None and (found[0].casefold() == "mmproj" or _TAG.search(_stem(path)) is None)
