"""The contents of the prompt while conversations change and earlier messages are edited: no unsent text is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.chat.controller import ChatController
from app.chat.drafts import NO_DRAFT, DraftKeeper
from app.chat.state import Entry, NewQuestion
from app.chat.thread import Thread
from app.conversations.drafts import Draft
from app.conversations.store import StoreError
from app.tui.chat.completion import COMMAND
from app.tui.chat.prompt import Prompt
from app.tui.keymap import key


class Drafting:
    """Fills the prompt with the draft of the conversation that is shown, and keeps what is typed in it.

    The questions that wait in the queue are kept as the beginning of the draft, so that no crash loses them.
    """

    def __init__(self, prompt: Prompt, controller: ChatController) -> None:
        self._prompt = prompt
        self._controller = controller
        self._keeper = DraftKeeper(controller.store)
        self._edits = DraftKeeper(controller.store)
        self._edited: Entry | None = None
        """The message in the prompt whose new text is kept; None if there is none, or it is on no disk itself."""
        self._set_aside: Draft | None = None
        self._left: dict[Thread, Draft] = {}
        """Texts typed in conversations that were left while questions waited in them."""
        self.being_read: Callable[[], Sequence[str]] = lambda: ()
        """Gives the questions that were sent and whose files are being read."""
        self._brought: list[list[str]] | None = None
        """Texts put before the draft since the editor was opened; None: no editor is open."""
        prompt.earlier.source = self.questions

    def shown(self) -> None:
        """A conversation is shown, perhaps another than before."""
        if self._controller.thread is self._keeper.thread:
            return
        left, thread = self._keeper.thread, self._controller.thread
        if left is not None:
            typed = self._draft_of_prompt
            if left.queue.items:
                self._left[left] = typed
            self._keeper.note(self._with_queue(left, typed))
        self._set_aside = None
        kept = self._keeper.open(thread)
        # The questions of an unfinished conversation still wait: only what was typed belongs in the prompt.
        self._prompt.restore(self._left.pop(thread, kept))
        self.changed()

    def changed(self) -> None:
        """Handle a change of the typed text or the queue."""
        if self._controller.thread is self._keeper.thread:
            self._keeper.note(self._typed())
        self._note_edit()

    def queue_changed(self, thread: Thread) -> None:
        """A question of ``thread`` waits, or does no longer."""
        if thread is self._keeper.thread:
            self.changed()
        elif thread in self._left:
            self._keeper.keep(thread, self._with_queue(thread, self._left[thread]))
            if not thread.queue.items:
                del self._left[thread]

    def write(self) -> None:
        """Write to disk what is typed, after what was sent and is still waiting for its files."""
        if self._keeper.thread is not None:
            typed = self._typed()
            self._keeper.note(self._prompt.joined(self.being_read(), typed.text) if self.being_read() else typed)
            self._keeper.write()
        self._note_edit()
        self._edits.write()

    def begin_editing(self, entry: Entry) -> None:
        """Put an earlier message into the prompt, as it was being changed last. What was typed is set aside."""
        self._note_edit()
        if self._set_aside is None:
            self._set_aside = self._prompt.draft
        self._edited = entry if entry.record is not None else None
        kept = self._edits.open(self._controller.thread, entry) if self._edited is not None else None
        if kept is not None and kept.text:
            self._prompt.restore(kept)
            self._controller.notify("What you had begun to change is here again.")
        else:
            self._prompt.fill(entry.content)

    def end_editing(self, *, sent: bool) -> None:
        """Put back what was typed before the editing. Unless it was ``sent``, the new text is kept as a draft."""
        if self._edited is not None:
            if sent:
                self._edits.note(NO_DRAFT)
            else:
                self._note_edit()
            self._edits.write()
            self._edited = None
        if self._set_aside is not None:
            draft, self._set_aside = self._set_aside, None
            self._prompt.restore(draft)

    def bring_back(self, questions: Sequence[NewQuestion], thread: Thread | None = None) -> None:
        """Put ``questions`` that were not asked before what is typed in ``thread`` (default: the shown one)."""
        texts = [question.text for question in questions]
        if thread is not None and thread is not self._keeper.thread:
            if thread is self._controller.thread:
                # It is about to be shown.
                self._left[thread] = self._prompt.joined(texts, self._left.get(thread, Draft("")).text)
            else:
                self._keeper.keep(thread, self._prompt.joined(texts, self._keeper.kept(thread).text))
        elif self._set_aside is None:
            self._prompt.put_before(texts)
            if self._brought is not None:
                self._brought.append(texts)
        else:
            self._set_aside = self._prompt.joined(texts, self._set_aside.text)

    def _note_edit(self) -> None:
        """Keep another text of the message that is edited, if it is another."""
        if self._edited is not None:
            draft = self._prompt.draft
            self._edits.note(NO_DRAFT if draft.text == self._edited.content else draft)

    def _typed(self) -> Draft:
        thread = self._keeper.thread
        draft = self._draft_of_prompt
        return self._with_queue(thread, draft) if thread is not None else draft

    @property
    def _draft_of_prompt(self) -> Draft:
        return self._prompt.draft if self._set_aside is None else self._set_aside

    def _with_queue(self, thread: Thread, draft: Draft) -> Draft:
        """``draft`` after the questions that wait in ``thread``."""
        queued = [question.text for question in thread.queue.items]
        return self._prompt.joined(queued, draft.text) if queued else draft

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


# --- editing a message -----------------------------------------------------------------------------------------------


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

    def end(self, *, sent: bool = False) -> None:
        """Edit nothing any more. A new text that was not ``sent`` is there again when the message is edited next."""
        self.entry = None
        self._drafting.end_editing(sent=sent)
        self.show()

    def show(self) -> None:
        """Show the prompt's present purpose in its frame."""
        temporary = self._controller.thread.memory is not None
        self._prompt.set_class(temporary, "-temporary")
        if self.entry is not None:
            what = "question" if self.entry.role == "user" else "answer"
            self._prompt.border_title = f"Editing {'an' if what == 'answer' else 'a'} {what} · {key('stop')} cancels"
            self._prompt.placeholder = f"Edit the {what}"
        else:
            self._prompt.border_title = "◌ temporary" if temporary else ""
            self._prompt.placeholder = "Ask something"
