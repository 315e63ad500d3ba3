"""``@file`` in a question: where references stand, and which files they name. No Textual.

A reference is ``@`` at the beginning of a word and a path: relative to the current folder, absolute, or from ``~``.
``@"two words.txt"`` names a path with spaces, ``@src/`` the files below a folder, ``@src/*.py`` those that fit. An
``@`` that names nothing there is text, as in an address or in Python's ``@property``. Pictures are among the files
that a path names, or a pattern with their ending.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from app.attachments.attachment import Attachment, pictures_of
from app.attachments.listing import files_below
from app.attachments.reading import PICTURE_ENDINGS, AttachmentError, FileReader
from engine.ipc.messages import MOST_PICTURE_BYTES
from engine.planning.units import byte_size

MOST_FILES = 50
"""Maximum number of files that one question may have attached."""
MOST_BYTES = 8_000_000
"""Maximum bytes of all texts that one question may have attached. No model has context for as much."""

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
    with FileReader() as reader:
        return _Resolving(folder, attached, reader).resolved(text)


class _Resolving:
    """One resolution. The arguments are those of :func:`resolve`."""

    def __init__(self, folder: Path, attached: Sequence[Attachment], reader: FileReader) -> None:
        self._folder = folder
        self._attached = attached
        self._reader = reader
        self._attachments: dict[str, Attachment] = {}
        self._problems: list[str] = []
        self._left_out: list[str] = []
        self._below: dict[Path, list[str]] = {}
        self._stamps: dict[Path, Stamp | None] = {}

    def resolved(self, text: str) -> Resolved:
        for reference in references(text):
            self._take(reference.path)
        attachments = tuple(self._attachments.values())
        if len(attachments) > MOST_FILES:
            self._problems.append(
                f"{len(attachments)} files are named; at most {MOST_FILES} can be attached to a question."
            )
        pictures = sum(len(picture.data) for picture in pictures_of(attachments))
        texts = sum(attachment.size for attachment in attachments) - pictures
        for what, total, most in (("files", texts, MOST_BYTES), ("pictures", pictures, MOST_PICTURE_BYTES)):
            if total > most:
                self._problems.append(
                    f"The {what} are {byte_size(total)} together; at most {byte_size(most)} can be attached."
                )
        return Resolved(attachments, tuple(self._problems), tuple(self._left_out), tuple(self._stamps.items()))

    def _take(self, named: str) -> None:
        """Attach what the reference ``@named`` names."""
        fitting = [old for old in self._attached if any(_fits(spelling, old.name) for spelling in _spellings(named))]
        if fitting:
            self._attachments.update((old.name, old) for old in fitting)
            return
        spelling, paths = _files(named, self._folder, self._below)
        if len(paths) > MOST_FILES:
            self._problems.append(
                f"@{spelling} names {len(paths):,} files; at most {MOST_FILES} can be attached to a question."
            )
            return
        if not paths:
            self._stamps.update((self._folder / path, None) for path in _spellings(named))
        for name, path in paths:
            if name not in self._attachments:
                self._read(name, path, _names_many(spelling))

    def _read(self, name: str, path: Path, one_of_many: bool) -> None:
        self._stamps[path] = _stamp(path)
        try:
            self._attachments[name] = self._reader.read(path, name)
        except AttachmentError as error:
            (self._left_out if one_of_many else self._problems).append(str(error))


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
    fitting = [name for name in below[base] if _fits(path, start + name)]
    if not _shows_pictures(path):
        # Who names a folder of sources means its texts, and may talk to a model that sees nothing.
        fitting = [name for name in fitting if not _shows_pictures(name)]
    return [(start + name, base / name) for name in fitting]


def _shows_pictures(path: str) -> bool:
    return path.lower().endswith(PICTURE_ENDINGS)


# --- a pasted path ---------------------------------------------------------------------------------------------------

_LONGEST_PASTE = 20_000
"""Maximum characters of pasted paths."""


def pasted_pictures(pasted: str) -> str:
    """References to the pictures whose paths were ``pasted``, as terminals paste what is dropped on them: quoted, with
    backslashes, or as ``file:`` addresses. Empty if it is anything else."""
    if "\n" in pasted.strip() or len(pasted) > _LONGEST_PASTE or not any(e in pasted.lower() for e in PICTURE_ENDINGS):
        return ""
    paths = _pasted_paths(pasted.strip())
    return " ".join(map(reference_to, paths)) + " " if paths else ""


def _pasted_paths(text: str) -> list[str]:
    """The paths in ``text`` if all of them are of pictures that are there, else none."""
    if _is_shown(text):
        return [text]  # not every terminal marks the spaces in it
    try:
        words = shlex.split(text)
    except ValueError:
        return []
    paths = [unquote(word.removeprefix("file://")) if word.startswith("file:///") else word for word in words]
    return paths if all(map(_is_shown, paths)) else []


def _is_shown(path: str) -> bool:
    """Whether a reference to ``path`` would name a picture that is there."""
    try:
        return _shows_pictures(path) and '"' not in path and Path(path).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):
        return False


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
