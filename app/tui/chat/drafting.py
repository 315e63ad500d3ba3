"""What is in the prompt while conversations change and earlier messages are edited: no unsent text is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.chat.controller import ChatController
from app.chat.drafts import DraftKeeper
from app.chat.queue import NewQuestion
from app.conversations.drafts import Draft
from app.conversations.store import StoreError
from app.tui.chat.prompt import Prompt
from app.tui.chat.question_search import COMMAND


class Drafting:
    """Fills the prompt with the draft of the conversation that is shown, and keeps what is typed in it.

    The questions that wait in the queue are kept as the beginning of the draft, so that no crash loses them.
    """

    def __init__(self, prompt: Prompt, controller: ChatController) -> None:
        self._prompt = prompt
        self._controller = controller
        self._keeper = DraftKeeper(controller.store)
        self._set_aside: Draft | None = None
        self.being_read: Callable[[], Sequence[str]] = lambda: ()
        """Gives the questions that were sent and whose files are being read."""
        self._brought: list[list[str]] | None = None
        """What was put before the draft since the editor was opened; None: no editor is open."""
        prompt.earlier.source = self.questions

    def shown(self) -> None:
        """A conversation is shown, perhaps another than before."""
        if self._controller.thread is self._keeper.thread:
            return
        if self._keeper.thread is not None:
            self._keeper.note(self._typed())
        self._set_aside = None
        self._prompt.restore(self._keeper.open(self._controller.thread))

    def changed(self) -> None:
        """What is typed changed, or the queue did."""
        if self._controller.thread is self._keeper.thread:
            self._keeper.note(self._typed())

    def write(self) -> None:
        """Write to disk what is typed, after what was sent and is still waiting for its files."""
        if self._keeper.thread is not None:
            typed = self._typed()
            self._keeper.note(self._prompt.joined(self.being_read(), typed.text) if self.being_read() else typed)
            self._keeper.write()

    def begin_editing(self, text: str) -> None:
        """Put an earlier message into the prompt. What was typed is set aside."""
        if self._set_aside is None:
            self._set_aside = self._prompt.draft
        self._prompt.fill(text)

    def end_editing(self) -> None:
        """Put back what was typed before the editing."""
        if self._set_aside is not None:
            draft, self._set_aside = self._set_aside, None
            self._prompt.restore(draft)

    def bring_back(self, questions: Sequence[NewQuestion]) -> None:
        """Put ``questions`` that were not asked before what is typed."""
        texts = [question.text for question in questions]
        if self._set_aside is None:
            self._prompt.put_before(texts)
            if self._brought is not None:
                self._brought.append(texts)
        else:
            self._set_aside = self._prompt.joined(texts, self._set_aside.text)

    def _typed(self) -> Draft:
        draft = self._prompt.draft if self._set_aside is None else self._set_aside
        queued = self._controller.queue.items if self._controller.thread is self._keeper.thread else ()
        return self._prompt.joined([question.text for question in queued], draft.text) if queued else draft

    def questions(self, beginning: str, limit: int) -> list[str]:
        """At most ``limit`` earlier questions that begin with ``beginning``, newest first; none if reading fails."""
        try:
            return self._controller.store.questions(beginning, limit)
        except StoreError:
            return []

    async def open_editor(self) -> None:
        """Open the draft in the person's editor. Answers go on meanwhile, and are shown when it is closed."""
        from textual.app import SuspendNotSupported

        from app.editor import EditorProblem, edited

        if self._brought is not None:
            return
        self._brought = []
        thread, edits_message = self._controller.thread, self._set_aside is not None
        try:
            text = await edited(self._prompt.whole_text, self._prompt.app.suspend)
        except EditorProblem as problem:
            self._controller.notify(str(problem), "warning")
        except SuspendNotSupported:
            self._controller.notify("An editor cannot be opened on this terminal.", "warning")
        else:
            if thread is self._controller.thread and edits_message == (self._set_aside is not None):
                self._prompt.put_edited(text)
            else:
                # Another draft is in the prompt than the one that was opened, such as that of a chat that took long
                # to read.
                self._prompt.put_before([text])
            for texts in self._brought:
                self._prompt.put_before(texts)
        finally:
            self._brought = None
        self._prompt.focus()

    def history(self, words: str = "") -> None:
        """Offer earlier questions; with ``words`` none was found."""
        if words:
            self._controller.notify(f"No earlier question has the words {words}.", "warning")
        else:
            self._prompt.fill(COMMAND)
            self._prompt.focus()
