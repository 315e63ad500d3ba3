"""The commands that list, export and import the saved conversations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from app.commands.output import WorkFailed, answer, as_json, notify
from app.conversations.exporting import export_form, export_problem, write_export
from app.conversations.importing.parts import ImportProblem
from app.conversations.importing.reading import read_conversations
from app.conversations.opening import DATABASE, open_store
from app.conversations.records import Conversation
from app.conversations.store import ConversationStore, StoreError
from app.text_safety import one_line
from engine.system.locations import ensure

_MOST = 1_000_000


@dataclass(frozen=True)
class PrintedChat:
    """A conversation of the list. Times are seconds since the epoch."""

    id: int
    title: str
    model: str
    created: float
    updated: float
    pinned: bool
    archived: bool


def show_chats(*, in_json: bool) -> int:
    """Print all conversations, the newest first."""
    with _store() as store:
        listed = [chat for archived in (False, True) for chat in store.conversations(archived=archived, limit=_MOST)]
    found = [_row(chat) for chat in sorted(listed, key=lambda chat: (chat.updated, chat.id), reverse=True)]
    if in_json:
        answer(as_json([vars(row) for row in found]))
    elif found:
        answer("".join(f"{_line(row)}\n" for row in found))
    else:
        notify("There are no chats yet.")
    return 0


def export(number: int, form: Literal["markdown", "json"] | None, file: str | None, *, thoughts: bool) -> int:
    """Print a conversation, or write it to ``file``. ``form`` None: JSON for a file of that name, else Markdown."""
    target = Path(file).expanduser() if file else None
    with _store() as store:
        text = store.export(number, form or (export_form(target) if target else "markdown"), thoughts=thoughts)
    if target is None:
        answer(text)
        return 0
    try:
        notify(f"Exported to {write_export(target, text)}.")
    except OSError as error:
        raise WorkFailed(export_problem(target, error).rstrip(".")) from error
    return 0


def take_in(file: str) -> int:
    """Import the conversations of ``file``."""
    path = Path(file).expanduser()
    try:
        imported = read_conversations(path)
    except ImportProblem as problem:
        raise WorkFailed(str(problem).rstrip(".")) from problem
    with _store() as store:
        added = store.take_in(imported.conversations)
    answer(f"{imported.program}: {added}.\n")
    if imported.left_out:
        notify(imported.left_out)
    return 0


@contextmanager
def _store() -> Iterator[ConversationStore]:
    try:
        store = open_store(ensure("data") / DATABASE)
        for notice in store.notices:
            notify(notice)
        try:
            yield store
        finally:
            store.close()
    except StoreError as error:
        raise WorkFailed(str(error).rstrip(".")) from error


def _row(chat: Conversation) -> PrintedChat:
    return PrintedChat(
        chat.id, one_line(chat.title), one_line(chat.model), chat.created, chat.updated, chat.pinned, chat.archived
    )


def _line(row: PrintedChat) -> str:
    marks = ", ".join(mark for mark, there in (("pinned", row.pinned), ("archived", row.archived)) if there)
    moment = datetime.fromtimestamp(row.updated).strftime("%Y-%m-%d %H:%M")
    return f"{row.id:>5}  {moment}  {row.title or '(no title)'}" + (f"  ({marks})" if marks else "")
