"""A message of the conversation in the prompt, to be changed there."""

from __future__ import annotations

from app.chat.controller import ChatController
from app.chat.state import Entry
from app.tui.chat.drafting import Drafting
from app.tui.chat.prompt import Prompt
from app.tui.keymap import key


class Editing:
    """Says in the prompt's frame what is written there: a new question, or another text of a message."""

    def __init__(self, prompt: Prompt, drafting: Drafting, controller: ChatController) -> None:
        self.entry: Entry | None = None
        """The message that is edited."""
        self._prompt = prompt
        self._drafting = drafting
        self._controller = controller

    def begin(self, entry: Entry) -> None:
        """Edit ``entry``. What was typed comes back when that has ended."""
        self.entry = entry
        self._drafting.begin_editing(entry)
        self.show()
        self._prompt.focus()

    def last_question(self) -> None:
        """Edit the newest question."""
        questions = [entry for entry in self._controller.thread.path if entry.role == "user"]
        if questions:
            self.begin(questions[-1])
        else:
            self._controller.notify("There is no question to edit yet.", "warning")

    def end(self, *, sent: bool = False) -> None:
        """Edit nothing any more. A new text that was not ``sent`` is there again when the message is edited next."""
        self.entry = None
        self._drafting.end_editing(sent=sent)
        self.show()

    def show(self) -> None:
        """Say in the prompt's frame what it is for now."""
        temporary = self._controller.thread.memory is not None
        self._prompt.set_class(temporary, "-temporary")
        if self.entry is not None:
            what = "question" if self.entry.role == "user" else "answer"
            self._prompt.border_title = f"Editing {'an' if what == 'answer' else 'a'} {what} · {key('stop')} cancels"
            self._prompt.placeholder = f"Edit the {what}"
        else:
            self._prompt.border_title = "◌ temporary" if temporary else ""
            self._prompt.placeholder = "Ask something"
