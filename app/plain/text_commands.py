"""The commands of the chat in lines that bring text in or take it out: earlier questions, the editor, copying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from app.chat.drafts import with_words
from app.chat.thread import Copying
from app.clipboard import Clipboard, copies_file
from app.conversations.store import StoreError
from app.editor import EditorProblem, edited
from app.text_safety import one_line

if TYPE_CHECKING:
    from app.plain.chat import PlainChat

Pick = Callable[["PlainChat", Sequence[str], str], int | str | None]
"""Lets the person pick one of some lines."""
_MOST_LISTED = 20
"""Number of earlier questions in a list to pick from."""
_LONGEST_LINE = 300
"""Characters of a question that are written in a list."""


def history(chat: PlainChat, words: str, pick: Pick) -> None:
    """List the earlier questions of all chats that have ``words``, and ask the one that is picked."""
    try:
        found = with_words(chat.controller.store.questions, words, _MOST_LISTED)
    except StoreError as error:
        chat.speaker.say(str(error), "Error")
        return
    if not found:
        chat.speaker.say("No earlier question was found." if words else "There are no earlier questions yet.")
        return
    picked = pick(
        chat, [one_line(question[:_LONGEST_LINE]) for question in found], "Number of the question to ask, or words"
    )
    if isinstance(picked, str):
        history(chat, picked, pick)
    elif picked is not None:
        chat.console.write_line(f"You: {found[picked]}")
        chat.ask(found[picked])


def editor(chat: PlainChat, _: str) -> None:
    """Ask the question that is written in the person's own editor."""
    if not chat.console.interactive:
        chat.speaker.say("An editor cannot be opened: there is no terminal.", "Warning")
        return
    chat.console.end_line()
    try:
        text = asyncio.run(edited("", nullcontext))
    except EditorProblem as problem:
        chat.speaker.say(str(problem), "Warning")
        return
    if text.strip():
        chat.console.write_line(f"You: {text}")
        chat.ask(text)
    else:
        chat.speaker.say("Nothing was written, so nothing is asked.")


def copy_answer(chat: PlainChat, _: str) -> None:
    _copying(chat).last_answer()


def copy_code(chat: PlainChat, _: str) -> None:
    _copying(chat).last_code()


def _copying(chat: PlainChat) -> Copying:
    """Copies without a sequence for the terminal, which might print it, and writes no file of a temporary chat."""

    def copy(text: str, what: str) -> None:
        may_write = chat.controller.thread.memory is None
        clipboard = Clipboard(None, copies_file if may_write else None)
        chat.speaker.say(chat.background.run(clipboard.copy(text, what)))

    return Copying(lambda: chat.controller.thread, copy, lambda problem: chat.speaker.say(problem, "Warning"))
