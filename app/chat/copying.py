"""What of a conversation is copied to the clipboard: a message, or one code block after the other. No Textual."""

from __future__ import annotations

from collections.abc import Callable

from app.chat.state import Entry
from app.chat.thread import Thread
from app.conversations.exporting import quoted


class Copying:
    """Copies from the shown conversation.

    ``thread`` returns it. ``copy`` is called with a text and its name in the notice (``The answer``), ``warn`` with why
    there is nothing to copy.
    """

    def __init__(
        self, thread: Callable[[], Thread], copy: Callable[[str, str], object], warn: Callable[[str], object]
    ) -> None:
        self._thread = thread
        self._copy = copy
        self._warn = warn
        self._copied: dict[int, int] = {}
        """The code block of each message, by its key, that was copied last."""

    def last_answer(self) -> None:
        """Copy the newest answer that has text."""
        answers = [entry for entry in self._thread().path if entry.role == "assistant" and entry.content]
        if answers:
            self._copy(answers[-1].content, "The answer")
        else:
            self._warn("There is no answer to copy yet.")

    def last_code(self) -> None:
        """Copy the newest code block of the conversation."""
        for entry in reversed(self._thread().path):
            blocks = code_blocks(entry.content)
            if blocks:
                self._copy(blocks[-1], "The code")
                return
        self._warn("There is no code block to copy.")

    def message(self, entry: Entry, *, with_thoughts: bool) -> None:
        """Copy the text of ``entry``, and what the model thought before it if wanted."""
        thoughts = quoted(entry.thoughts.text) + "\n\n" if with_thoughts else ""
        self._copy(thoughts + entry.content, "The message")

    def next_code(self, entry: Entry) -> None:
        """Copy the code block of ``entry`` after the one that was copied last."""
        blocks = code_blocks(entry.content)
        if not blocks:
            self._warn("This message has no code block.")
            return
        index = self._copied.get(entry.key, -1) + 1
        self._copied[entry.key] = index
        number = f"Block {index % len(blocks) + 1} of {len(blocks)}" if len(blocks) > 1 else "The code"
        self._copy(blocks[index % len(blocks)], number)


def code_blocks(source: str) -> list[str]:
    """The code of each fence of the Markdown ``source``, in order."""
    from markdown_it import MarkdownIt

    # What is within a line is of no interest, and hostile nesting of it would take long.
    tokens = MarkdownIt("commonmark", {"html": False}).disable("inline").parse(source)
    return [token.content.rstrip("\n") for token in tokens if token.type in ("fence", "code_block")]
