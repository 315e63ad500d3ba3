"""A conversation on the screen: its path, alternatives to a message, the prompt made of it, its export. No Textual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path

from app.attachments.attachment import question_message, with_attachments
from app.chat.state import TOO_LONG, Entry, QuestionQueue
from app.conversations.exporting import export_form, json_text, quoted, write_export
from app.conversations.records import NO_THOUGHTS, Conversation, MessageRecord, State, Thoughts
from app.conversations.store import ConversationStore
from app.settings.layers import ChatValues
from engine.ipc.messages import Message, PictureFile


@dataclass(eq=False)
class Thread:
    """A conversation that is shown, or whose questions wait for answers while another one is.

    ``conversation``: its id in its store, None until its first question is kept.
    """

    conversation: int | None = None
    title: str = ""
    system: str = ""
    model: str = ""
    path: list[Entry] = field(default_factory=list)
    values: ChatValues = field(default_factory=ChatValues)
    memory: ConversationStore | None = None
    """The store in memory of a temporary conversation, of which nothing may be written to disk; None: it is saved."""
    queue: QuestionQueue = field(default_factory=QuestionQueue)
    """The questions that wait for the answers of this conversation."""

    def store_in(self, disk: ConversationStore) -> ConversationStore:
        """The store of the conversation: its own in memory, or ``disk``."""
        return self.memory or disk

    @staticmethod
    def of(conversation: Conversation, memory: ConversationStore | None = None) -> Thread:
        """The thread of a stored conversation, without its messages. ``memory``: its store if it is temporary."""
        values = ChatValues.restored(conversation.own_values)
        return Thread(
            conversation.id, conversation.title, conversation.system, conversation.model, values=values, memory=memory
        )


def prompt_messages(system: str, path: list[Entry], *, sees: bool = False) -> list[Message]:
    """The messages for the model: the system prompt if there is one, then the path. ``sees``: with its pictures.

    Empty answers are left out and consecutive questions are joined, because chat templates require alternating roles. A
    question that did not fit in the context is left out, as with it no later one would fit.
    """
    messages: list[Message] = [Message("system", system)] if system.strip() else []
    for entry, answer in zip_longest(path, path[1:]):
        if not entry.content.strip() or (answer is not None and answer.finish_reason == TOO_LONG):
            continue
        new = Message("assistant", entry.content)
        if entry.role == "user":
            new = question_message(entry.content, entry.attachments, sees=sees)
        if messages and messages[-1].role == entry.role:
            new = _joined(messages.pop(), new)
        messages.append(new)
    return messages


def _joined(first: Message, second: Message) -> Message:
    """Two messages of the same role as one."""
    before = f"{first.content}\n\n"
    moved = [PictureFile(picture.data, len(before) + picture.place) for picture in second.pictures]
    return Message(first.role, before + second.content, pictures=[*first.pictures, *moved])


def alternative(store: ConversationStore, record: int, offset: int) -> int:
    """Id of the alternative ``offset`` places after ``record``, wrapping around. Raises StoreError."""
    alternatives = store.siblings(record)
    position = next(index for index, found in enumerate(alternatives) if found.id == record)
    return alternatives[(position + offset) % len(alternatives)].id


def answer_place(path: Sequence[Entry], question: Entry) -> int | None:
    """Index in ``path`` of the answer to ``question``, present or not; None if the question is not in it.

    After a change of branches the same question may be another object with the same id in the store.
    """
    found = (i for i, entry in enumerate(path) if entry is question or (entry.record or 0) == question.record)
    place = next(found, None)
    return None if place is None else place + 1


def stored_alternative(
    store: ConversationStore, shown: Entry | None, text: str, thoughts: str = ""
) -> MessageRecord | None:
    """The alternative to ``shown`` with this ``text`` and these ``thoughts`` in the store; None if there is none.

    Raises StoreError.
    """
    if shown is None or shown.record is None:
        return None
    wanted = text, thoughts
    alternatives = store.siblings(shown.record)
    return next((record for record in alternatives if (record.content, record.thoughts.text) == wanted), None)


def export_thread(disk: ConversationStore, thread: Thread, path: Path, *, thoughts: bool = False) -> Path:
    """Write ``thread`` to ``path``: JSON if it ends in ``.json``, else Markdown. ``thoughts``: with the model's.

    A conversation in a store is exported by it, in JSON with all branches; one that could not be saved is written from
    the screen. An existing file is never overwritten. Raises OSError, StoreError.
    """
    form = export_form(path)
    saved = thread.conversation is not None and all(entry.record and not entry.dirty for entry in thread.path)
    if saved and thread.conversation is not None:
        text = thread.store_in(disk).export(thread.conversation, form, thoughts=thoughts)
    else:
        text = _from_screen(thread, form, thoughts)
    return write_export(path, text)


def _from_screen(thread: Thread, form: str, thoughts: bool) -> str:
    if form == "json":
        messages = []
        for entry in thread.path:
            message: dict[str, object] = {"role": entry.role, "content": entry.content}
            if thoughts:
                message["thoughts"] = asdict(entry.thoughts)
            if entry.attachments:
                message["attachments"] = [asdict(attachment) for attachment in entry.attachments]
            messages.append(message)
        return json_text({"title": thread.title, "system": thread.system, "messages": messages})
    parts = [f"# {thread.title or 'Conversation'}"]
    for entry in thread.path:
        parts.append(f"## {'You' if entry.role == 'user' else entry.model or 'Model'}")
        if thoughts and entry.thoughts.text:
            parts.append(quoted(entry.thoughts.text))
        parts.append(with_attachments(entry.content, entry.attachments))
    return "\n\n".join(parts) + "\n"


# --- copying ---------------------------------------------------------------------------------------------------------


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


# --- answers that are continued --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BegunAnswer:
    """The part of an answer that was there before a turn. Empty for a new answer."""

    text: str = ""
    thoughts: Thoughts = NO_THOUGHTS
    tokens: int = 0
    state: State = "complete"

    @staticmethod
    def of(answer: Entry) -> BegunAnswer:
        return BegunAnswer(answer.content, answer.thoughts, answer.tokens, answer.state)

    @property
    def messages(self) -> list[Message]:
        """Messages for the model, at the end of which it continues."""
        return [Message("assistant", self.text, self.thoughts.text)] if self.text else []

    def with_thoughts(self, new: Thoughts) -> Thoughts:
        """The thoughts before, and ``new`` ones."""
        old = self.thoughts
        text = "\n\n".join(filter(None, [old.text, new.text]))
        return Thoughts(text, old.tokens + new.tokens, old.seconds + new.seconds)


NOTHING = BegunAnswer()
"""The beginning of a new answer."""


def why_not(answer: Entry | None) -> str:
    """Why ``answer`` cannot be gone on with, as a sentence; empty if it can."""
    if answer is None or answer.role != "assistant":
        return "There is no answer to go on with; only an answer can be continued."
    if answer.state == "writing":
        return "This answer is still being written."
    if not answer.content.strip():
        return "This answer has no text to go on from. Use /again for another answer."
    return ""
