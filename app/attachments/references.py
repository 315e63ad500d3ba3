"""``@file`` in a question: where references stand, and which files they name. No Textual.

A reference is ``@`` at the beginning of a word and a path: relative to the current folder, absolute, or from ``~``.
``@"two words.txt"`` names a path with spaces, ``@src/`` the files below a folder, ``@src/*.py`` those that fit. An
``@`` that names nothing there is text, as in an address or in Python's ``@property``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.attachments.attachment import Attachment, AttachmentError, read_file
from app.attachments.listing import files_below
from engine.planning.units import byte_size

MOST_FILES = 50
"""Maximum number of files that one question may have attached."""
MOST_BYTES = 8_000_000
"""Maximum bytes of all files that one question may have attached. No model has context for as much text."""

_MOST_STARS = 6
"""Maximum number of asterisks in a pattern. The time of a comparison multiplies with each."""

_REFERENCE = re.compile(r"""(?<![^\s([{"',;:])@(?:"([^"\n]+)"|([^\s"@][^\s"]*))""")
_TRAILING = ".,;:!?)]}'"
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Reference:
    """The reference ``@path`` at the offsets ``start`` to ``end`` of a text."""

    start: int
    end: int
    path: str


Stamp = tuple[int, int]
"""A file's time of change in nanoseconds, and its size in bytes."""


@dataclass(frozen=True)
class Resolved:
    """What the references of a question name. ``problems``: a sentence for each file named that cannot be attached.

    ``left_out``: the same for files that a folder or a pattern named; they do not count as problems.
    """

    attachments: tuple[Attachment, ...] = ()
    problems: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    stamps: tuple[tuple[Path, Stamp | None], ...] = field(default=(), compare=False, repr=False)
    """The files that were looked at, and what they were like."""

    def is_current(self) -> bool:
        """Whether the examined files are unchanged. Files that a folder has got since do not count."""
        return all(_stamp(path) == stamp for path, stamp in self.stamps)


def references(text: str) -> Iterator[Reference]:
    """The references in ``text``, in their order."""
    for found in _REFERENCE.finditer(text):
        yield Reference(found.start(), found.end(), found[1] or found[2])


def reference_to(path: str) -> str:
    """The reference that names ``path``."""
    return f'@"{path}"' if re.search(r"[\s\"]", path) else f"@{path}"


def resolve(text: str, folder: Path, attached: Sequence[Attachment] = ()) -> Resolved:
    """Read what ``text`` refers to, each file once, with ``folder`` as the current one. It may take seconds.

    ``attached``: files that were attached to the question before it was edited. One that is still named keeps its text,
    even if the file has changed or is gone.
    """
    attachments: dict[str, Attachment] = {}
    problems: list[str] = []
    left_out: list[str] = []
    below: dict[Path, list[str]] = {}
    stamps: dict[Path, Stamp | None] = {}
    for reference in references(text):
        fitting = [old for old in attached if any(_fits(spelling, old.name) for spelling in _spellings(reference.path))]
        if fitting:
            attachments.update((old.name, old) for old in fitting)
            continue
        spelling, paths = _files(reference.path, folder, below)
        if len(paths) > MOST_FILES:
            problems.append(
                f"@{spelling} names {len(paths):,} files; at most {MOST_FILES} can be attached to a question."
            )
            continue
        if not paths:
            stamps.update((folder / named, None) for named in _spellings(reference.path))
        for name, path in paths:
            if name in attachments:
                continue
            stamps[path] = _stamp(path)
            try:
                attachments[name] = read_file(path, name)
            except AttachmentError as error:
                (left_out if _names_many(spelling) else problems).append(str(error))
    if len(attachments) > MOST_FILES:
        problems.append(f"{len(attachments)} files are named; at most {MOST_FILES} can be attached to a question.")
    total = sum(attachment.size for attachment in attachments.values())
    if total > MOST_BYTES:
        problems.append(f"The files are {byte_size(total)} together; at most {byte_size(MOST_BYTES)} can be attached.")
    return Resolved(tuple(attachments.values()), tuple(problems), tuple(left_out), tuple(stamps.items()))


def _stamp(path: Path) -> Stamp | None:
    """The state of the file at ``path``, to detect changes; None if there is none."""
    try:
        facts = path.expanduser().stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return facts.st_mtime_ns, facts.st_size


def _names_many(path: str) -> bool:
    return path.endswith("/") or _GLOB.search(path) is not None


def _fits(path: str, name: str) -> bool:
    """Whether ``path``, as written in a reference, is the name of the file ``name``, or a pattern or folder for it."""
    if path.endswith("/"):
        return name.startswith(path)
    return path == name or (_GLOB.search(path) is not None and pattern(path).fullmatch(name) is not None)


def _spellings(path: str) -> Iterator[str]:
    """``path``, and ``path`` without punctuation that ends a sentence and not the path."""
    yield path
    while path and path[-1] in _TRAILING:
        path = path[:-1]
        yield path


def _files(path: str, folder: Path, below: dict[Path, list[str]]) -> tuple[str, list[tuple[str, Path]]]:
    """The first spelling of ``path`` that names files, and these files with their names; no files if none does.

    ``below`` keeps what was listed for other references.
    """
    for spelling in _spellings(path):
        try:
            found = _many(spelling, folder, below) if _names_many(spelling) else _one(spelling, folder)
        except (OSError, ValueError, RuntimeError):
            continue
        if found:
            return spelling, found
    return path, []


def _one(path: str, folder: Path) -> list[tuple[str, Path]]:
    target = folder / Path(path).expanduser()
    return [(path, target)] if path and target.exists() and not target.is_dir() else []


def _many(path: str, folder: Path, below: dict[Path, list[str]]) -> list[tuple[str, Path]]:
    fixed = path if path.endswith("/") else _GLOB.split(path)[0].rpartition("/")[0]
    start = fixed.rstrip("/") + "/" if fixed else ("/" if path.startswith("/") else "")
    base = folder / Path(start).expanduser()
    if not base.is_dir():
        return []
    if base not in below:
        below[base] = files_below(base)
    return [(start + name, base / name) for name in below[base] if _fits(path, start + name)]


def pattern(glob: str) -> re.Pattern[str]:
    """The expression for ``glob``: ``*`` and ``?`` stay in a folder, ``**/`` is any number of folders.

    One with more asterisks than anybody needs is a name as it stands.
    """
    if glob.count("*") > _MOST_STARS:
        return re.compile(re.escape(glob))
    parts: list[str] = []
    position = 0
    while position < len(glob):
        rest = glob[position:]
        if rest.startswith("**/"):
            parts.append("(?:.*/)?")
            position += 3
        elif rest.startswith("**"):
            parts.append(".*")
            position += 2
        elif rest[0] in "*?":
            parts.append("[^/]*" if rest[0] == "*" else "[^/]")
            position += 1
        elif rest[0] == "[" and (end := rest.find("]", 3 if rest[1:2] in ("!", "^") else 2)) > 0:
            members = re.sub(r"([\\\[\]&~|^])", r"\\\1", rest[1:end])
            negated = rest[1] in "!^"
            inside = members.removeprefix("!").removeprefix("\\^") if negated else members
            parts.append(f"(?!/)[{'^' if negated else ''}{inside}]")
            position += end + 1
        else:
            parts.append(re.escape(rest[0]))
            position += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(re.escape(glob))
