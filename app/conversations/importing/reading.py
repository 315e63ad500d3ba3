"""Reading a file of conversations, whichever of the known programs wrote it."""

from __future__ import annotations

import json
import re
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.conversations.importing import chatgpt, claude, llm_log, open_webui, own
from app.conversations.importing.parts import MOST_MESSAGES, ImportedConversation, ImportProblem, digest
from app.text_safety import one_line
from engine.planning.units import byte_size

MOST_BYTES = 500_000_000
"""Largest size in bytes of the JSON that is read, unpacked."""
_MOST_MEMBERS = 100_000
_MEMBER = re.compile(r"(?:.*/)?conversations(?:-\d{1,6})?\.json")
"""Names of the files with conversations in the archives of ChatGPT and Claude."""


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
    that has text.
    """

    program: str
    conversations: Sequence[ImportedConversation]
    unread: int = 0
    empty: int = 0

    @property
    def left_out(self) -> str:
        """What is in the file and not in the conversations, as a sentence; empty if there is nothing."""
        files = sum(message.only_named for chat in self.conversations for message in chat.messages)
        parts = [
            _counted(self.empty, "chat without text", "chats without text"),
            _counted(self.unread, "entry that is no chat", "entries that are no chats"),
            _counted(files, "picture or file", "pictures and files"),
        ]
        return f"Left out: {', '.join(filter(None, parts))}." if any(parts) else ""


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}" if count else ""


def read_conversations(path: Path) -> ReadFile:
    """The conversations in the file at ``path``. Raises ImportProblem."""
    try:
        # A pipe or a device is not opened at all: that could wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImportProblem(f"{one_line(str(path))} is no file. Name the exported file itself.")
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise ImportProblem(f"{one_line(str(path))} cannot be read: {error.strerror or error}.") from error
    if start.startswith(llm_log.HEADER):
        return _read(path, "llm", llm_log.conversations(path))
    documents = _archived(path) if start.startswith(b"PK\3\4") else iter([_plain(path)])
    found: list[ImportedConversation] = []
    programs: list[str] = []
    unread = 0
    printed: list[Mapping[str, Any]] = []
    for data in documents:
        for entry in _entries(path, data):
            if llm_log.is_printed(entry):
                printed.append(entry)
                continue
            kind = next((known for known in FORMATS if known.is_conversation(entry)), None)
            if kind is None:
                unread += 1
                continue
            programs.append(kind.program)
            found.append(kind.conversation(entry))
    if printed:
        programs.append("llm")
        found += llm_log.printed_conversations(printed)
    if not programs:
        raise ImportProblem(
            f"{one_line(str(path))} has no conversations that are known; there are exports of privatellm, ChatGPT, "
            "Claude, Open WebUI and llm."
        )
    return _read(path, programs[0], found, unread)


def _read(path: Path, program: str, found: Sequence[ImportedConversation], unread: int = 0) -> ReadFile:
    """The conversations of ``found`` that have messages. Raises ImportProblem if there is none."""
    large = next((chat for chat in found if len(chat.messages) > MOST_MESSAGES), None)
    if large is not None:
        raise ImportProblem(f"A conversation has more than {MOST_MESSAGES:,} messages; nothing was imported.")
    kept = [chat for chat in found if chat.messages]
    if not kept:
        chats = _counted(len(found), "chat", "chats") or "no chats"
        raise ImportProblem(
            f"{one_line(str(path))} is an export of {program} with {chats}"
            f"{', and no message in it has text' if found else ''}."
        )
    for chat in kept:
        if chat.origin.endswith(":"):
            # Without an id it would be taken for any other such conversation.
            chat.origin += digest(chat.created, chat.messages)
    return ReadFile(program, kept, unread, len(found) - len(kept))


def _plain(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImportProblem(f"{one_line(str(path))} cannot be read: {error.strerror or error}.") from error
    _check_size(path, len(data))
    return data


def _archived(path: Path) -> Iterator[bytes]:
    """The files with conversations in an archive. What its directory says of their sizes is not believed."""
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
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ImportProblem(f"{one_line(str(path))} is packed in a way that cannot be unpacked here.")
                with archive.open(member) as file:
                    data = file.read(MOST_BYTES + 1 - total)
                total += len(data)
                _check_size(path, total)
                yield data
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ImportProblem(f"{one_line(str(path))} cannot be unpacked: {one_line(str(error)).rstrip('.')}.") from error


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise ImportProblem(f"{one_line(str(path))} has more than {byte_size(MOST_BYTES)} of conversations.")


def _entries(path: Path, data: bytes) -> list[Mapping[str, Any]]:
    try:
        content = json.loads(data)
    except RecursionError:
        raise ImportProblem(f"{one_line(str(path))} is nested too deeply to be read.") from None
    except ValueError as error:
        raise ImportProblem(f"{one_line(str(path))} is no JSON that can be read: {one_line(str(error))}.") from None
    if isinstance(content, dict):
        # Some exports have the list in an object.
        inside = content.get("conversations")
        content = inside if isinstance(inside, list) else [content]
    return [entry if isinstance(entry, dict) else {} for entry in content] if isinstance(content, list) else []
