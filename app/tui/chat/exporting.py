"""Writes a conversation to a file the person names. No Textual."""

from __future__ import annotations

import json
import re
from pathlib import Path

from app.conversations.store import ConversationStore
from app.tui.chat.saving import Thread


def suggested_path(title: str) -> Path:
    """A name in the current folder that is not taken."""
    stem = re.sub(r"[^\w-]+", "-", title.lower()).strip("-")[:50] or "conversation"
    path = Path.cwd() / f"{stem}.md"
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stem}-{number}.md")
    return path


def export_thread(store: ConversationStore, thread: Thread, path: Path) -> Path:
    """Write ``thread`` to ``path``: JSON if it ends in ``.json``, else Markdown.

    What the store has comes from there, with all branches in JSON; a conversation that could not be saved is written
    from the screen. An existing file is never overwritten. Raises OSError, StoreError.
    """
    form = _form(path)
    saved = thread.conversation is not None and all(entry.record and not entry.dirty for entry in thread.path)
    if saved and thread.conversation is not None:
        text = store.export(thread.conversation, form)
    else:
        text = _from_screen(thread, form)
    return _write(path, text)


def export_conversation(store: ConversationStore, conversation: int, path: Path) -> Path:
    """As :func:`export_thread`, for a conversation that is on disk. Raises OSError, StoreError."""
    return _write(path, store.export(conversation, _form(path)))


def why_not_exported(path: Path, error: Exception) -> str:
    """One sentence for what :func:`export_thread` raised."""
    folder = path.expanduser().absolute().parent
    if isinstance(error, FileNotFoundError) and not folder.exists():
        shown = str(path.parent) if path.parent != Path() else str(folder)
        return f"Export failed: the folder {shown} does not exist."
    if isinstance(error, FileExistsError):
        return f"Export failed: {path} is there already; choose another name."
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
    return f"Export to {path} failed: {reason}."


def _form(path: Path) -> str:
    return "json" if path.suffix.lower() == ".json" else "markdown"


def _write(path: Path, text: str) -> Path:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def _from_screen(thread: Thread, form: str) -> str:
    if form == "json":
        messages = [{"role": entry.role, "content": entry.content} for entry in thread.path]
        return json.dumps({"title": thread.title, "system": thread.system, "messages": messages}, indent=2) + "\n"
    parts = [f"# {thread.title or 'Conversation'}"]
    parts += [f"## {'You' if entry.role == 'user' else entry.model or 'Model'}\n\n{entry.content}"
              for entry in thread.path]  # fmt: skip
    return "\n\n".join(parts) + "\n"
