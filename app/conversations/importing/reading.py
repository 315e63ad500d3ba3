"""Reading a file of conversations, whichever of the known programs wrote it."""

from __future__ import annotations

import re
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from app.conversations.importing import chatgpt, claude, llm_log, open_webui, own
from app.conversations.importing.entries import Unread, entries
from app.conversations.importing.parts import (
    Allowance,
    ImportedConversation,
    ImportProblem,
    ImportTooLarge,
    digest,
    produced_of,
)
from app.text_safety import one_line
from engine.planning.units import byte_size

MOST_BYTES = 500_000_000
"""Largest size in bytes of the JSON that is read, unpacked."""
_MOST_UNPACKED = 50
"""Largest ratio of what an archive unpacks to and its own size. That of an export is below ten."""
_SMALL = 10_000_000
"""Size in bytes up to which that ratio does not matter."""
_MOST_MEMBERS = 100_000
_MOST_ENTRIES = 500_000
"""Largest number of entries that are looked at. An archive of a few kilobytes may have millions of empty ones."""
_MOST_DAMAGED = 100
"""Number of files in an archive that cannot be unpacked after which it is given up."""
_MOST_NAMED = 5
"""Maximum items that are named as lost. The others are only counted."""
_MEMBER = re.compile(r"(?:.*/)?conversations(?:-\d{1,6})?\.json")
"""Names of the files with conversations in the archives of ChatGPT and Claude."""
_NOT_UNPACKED = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError)


@dataclass(frozen=True)
class Format:
    """A kind of export. ``program`` is its name for the person."""

    program: str
    is_conversation: Callable[[Mapping[str, Any]], bool]
    conversation: Callable[[Mapping[str, Any]], ImportedConversation]


FORMATS = (
    Format("ChatGPT", chatgpt.is_conversation, chatgpt.conversation),
    Format("Claude", claude.is_conversation, claude.conversation),
    Format("Open WebUI", open_webui.is_conversation, open_webui.conversation),
    Format("privatellm", own.is_conversation, own.conversation),
)


@dataclass(frozen=True)
class ReadFile:
    """The conversations of a file, at least one.

    ``unread``: the number of entries in it that are none. ``empty``: the number of conversations without a message
    that has text. ``lost``: what else could not be read, in words.
    """

    program: str
    conversations: Sequence[ImportedConversation]
    unread: int = 0
    empty: int = 0
    lost: Sequence[str] = ()

    @property
    def left_out(self) -> str:
        """A sentence on what is in the file and was not imported; empty if there is nothing."""
        files = sum(message.only_named for chat in self.conversations for message in chat.messages)
        parts = [
            _counted(self.empty, "chat without text", "chats without text"),
            _counted(self.unread, "entry that is no chat", "entries that are no chats"),
            *self.lost,
            _counted(files, "picture or file", "pictures and files"),
        ]
        return f"Left out: {', '.join(filter(None, parts))}." if any(parts) else ""


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}" if count else ""


def read_conversations(path: Path) -> ReadFile:
    """The conversations in the file at ``path``. Raises ImportProblem."""
    try:
        return _read(path)
    except MemoryError:
        raise ImportProblem(f"{one_line(str(path))} needs more memory than there is.") from None


def _read(path: Path) -> ReadFile:
    try:
        # A pipe or a device is not opened at all: that could wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImportProblem(f"{one_line(str(path))} is no file. Name the exported file itself.")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise ImportProblem(f"{one_line(str(path))} cannot be read: {error.strerror or error}.") from error
    reader = _Found(path, produced_of(size))
    if start.startswith(llm_log.HEADER):
        reader.take("llm", llm_log.conversations(path, size, reader.allowance))
        return reader.result()
    documents = _archived(path, size, reader.lost) if start.startswith(b"PK\3\4") else iter([("", _plain(path))])
    printed = llm_log.LoggedAnswers(reader.allowance)
    every = ((member, entry) for member, data in documents for entry in entries(data))
    for member, entry in islice(every, _MOST_ENTRIES):
        if entry is None:
            reader.unread += 1
        elif isinstance(entry, Unread):
            reader.missed[entry, member] += 1
        elif llm_log.is_printed(entry):
            printed.add(entry)
        else:
            reader.take_entry(entry, member)
    if next(every, None) is not None:
        reader.lost.append(f"all that follows {_MOST_ENTRIES:,} entries")
    if printed:
        reader.take("llm", printed.conversations())
    return reader.result()


class _Found:
    """The results so far of reading the file at ``path``."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        self.allowance = allowance
        self.lost: list[str] = []
        self.unread = 0
        self.missed: Counter[tuple[Unread, str]] = Counter()
        """The number of entries by the reason why they were not read, and the file in the archive."""
        self._path = path
        self._program = ""
        self._chats: list[ImportedConversation] = []
        self._empty = 0

    def take(self, program: str, chats: Iterable[ImportedConversation | None]) -> None:
        """Take what was already counted in the allowance. None stands for one that is too large."""
        for chat in chats:
            self._keep(program, chat, "")

    def take_entry(self, entry: Mapping[str, Any], member: str) -> None:
        kind = next((known for known in FORMATS if known.is_conversation(entry)), None)
        if kind is None:
            self.unread += 1
            return
        chat = kind.conversation(entry)
        try:
            chat.spend(self.allowance)
        except ImportTooLarge:
            self._keep(kind.program, None, member)
        else:
            self._keep(kind.program, chat, member)

    def _keep(self, program: str, chat: ImportedConversation | None, member: str) -> None:
        self._program = self._program or program
        if chat is None:
            self.missed[Unread.LARGE, member] += 1
        elif not chat.messages:
            self._empty += 1
        else:
            if chat.origin.endswith(":"):
                # Without an id it would be taken for any other such conversation.
                chat.origin += digest(chat.created, chat.messages)
            for message in chat.messages:
                if message.role == "assistant":
                    message.model = message.model or chat.model
            self._chats.append(chat)

    def result(self) -> ReadFile:
        """The final result. Raises ImportProblem if there is no conversation with text."""
        lost = [*self.lost, *(_missed(*place, count) for place, count in self.missed.items())]
        if len(lost) > _MOST_NAMED:
            lost[_MOST_NAMED:] = [f"and {len(lost) - _MOST_NAMED:,} more such things"]
        if self._chats:
            return ReadFile(self._program, self._chats, self.unread, self._empty, lost)
        file = one_line(str(self._path))
        if self.missed and not self._program and self.missed.keys() <= {(Unread.CUT, ""), (Unread.DAMAGED, "")}:
            raise ImportProblem(f"{file} is no JSON that can be read; export it again.")
        if lost:
            raise ImportProblem(f"{file} has no conversation that can be read. Left out: {', '.join(lost)}.")
        if not self._program:
            raise ImportProblem(
                f"{file} has no conversations that are known; there are exports of privatellm, ChatGPT, Claude, "
                "Open WebUI and llm."
            )
        chats = _counted(self._empty, "chat", "chats") or "no chats"
        raise ImportProblem(
            f"{file} is an export of {self._program} with {chats}"
            f"{', and no message in it has text' if self._empty else ''}."
        )


def _missed(reason: Unread, member: str, count: int) -> str:
    """A description of entries that were not read."""
    where = f" in {one_line(PurePosixPath(member).name)}" if member else ""
    match reason:
        case Unread.CUT:
            return f"all that follows a damaged place{where}"
        case Unread.DAMAGED:
            return _counted(count, "damaged chat", "damaged chats") + where
        case Unread.LARGE:
            return _counted(count, "chat that is too large", "chats that are too large") + where
        case Unread.DEEP:
            return _counted(count, "chat that is nested too deeply", "chats that are nested too deeply") + where


def _plain(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImportProblem(f"{one_line(str(path))} cannot be read: {error.strerror or error}.") from error
    if len(data) > MOST_BYTES:
        raise ImportProblem(f"{one_line(str(path))} has more than {byte_size(MOST_BYTES)} of conversations.")
    return data


def _archived(path: Path, size: int, lost: list[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files with conversations in an archive of ``size`` bytes.

    What its directory says of their sizes is not believed. ``lost`` gets those that cannot be unpacked, in words.
    """
    most = min(MOST_BYTES, max(_SMALL, _MOST_UNPACKED * size))
    total = 0
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > _MOST_MEMBERS:
                raise ImportProblem(f"{one_line(str(path))} has more than {_MOST_MEMBERS:,} files.")
            wanted = [member for member in members if _MEMBER.fullmatch(member.filename)]
            if not wanted:
                raise ImportProblem(f"{one_line(str(path))} is an archive without a file conversations.json.")
            for member in wanted:
                try:
                    data = _unpacked(archive, member, most + 1 - total)
                except _NOT_UNPACKED as error:
                    if len(lost) > _MOST_DAMAGED:
                        raise
                    name = one_line(PurePosixPath(member.filename).name)
                    lost.append(f"{name}, which cannot be unpacked ({one_line(str(error)).rstrip('.')})")
                    continue
                total += len(data)
                if total > most:
                    raise ImportProblem(f"{one_line(str(path))} has more than {byte_size(most)} of conversations.")
                yield member.filename, data
    except _NOT_UNPACKED as error:
        if not zipfile.is_zipfile(path):
            raise ImportProblem(
                f"{one_line(str(path))} is an archive whose end is missing, as after a download that stopped. Download "
                "or copy it again."
            ) from error
        why = one_line(str(error)).rstrip(".")
        raise ImportProblem(f"{one_line(str(path))} cannot be unpacked ({why}). Export it again.") from error


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytes:
    """The first ``most`` bytes of ``member``. Raises those of ``_NOT_UNPACKED``."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotImplementedError("it is packed in an unknown way")
    with archive.open(member) as file:
        return file.read(most)
