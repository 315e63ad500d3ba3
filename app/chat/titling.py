"""Titles that the model gives to chats after their first answers, while nothing else is asked of it. No Textual."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from app.chat.engine_link import EngineLink
from app.chat.saving import rename
from app.chat.state import TitleChanged, Update
from app.chat.thread import Thread, prompt_messages
from app.conversations.deleting import TITLE_LENGTH, title_from
from app.conversations.kept_prefixes import prefix_owner
from app.conversations.store import ConversationStore, StoreError
from app.engine_client import Engine, EngineDied
from app.settings.schema import Settings
from app.text_safety import one_line, sanitize
from engine.ipc.messages import Finished, Generate, Message, ModelFacts, Piece, Prefill, Sampling, Timing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from engine.ipc.messages import AnyEvent

_REQUEST = "Give this conversation a title of at most six words, in its language. Write only the title."
LEAST_PARAMETERS = 1_000_000_000
"""Parameters of the smallest model that is asked for titles. What smaller ones write is mostly noise."""
_MOST_TOKENS = 24
_MOST_READ = 1_000
"""Maximum tokens of the conversation that are read again for a title."""
_MOST_WORDS = 8
_MARKS = "\"'“”„«»‘’`*#_-•:. "


def can_title(facts: ModelFacts | None) -> bool:
    """Whether the model is asked for titles.

    It is not if it always thinks first, nor if the conversation would have to be read again after the title. A ring is
    left alone: each request may form it again.
    """
    if facts is None or facts.parameters < LEAST_PARAMETERS or facts.state_bytes or not facts.has_chat_template:
        return False
    if facts.ring is not None:
        return False
    return facts.reasoning is None or facts.reasoning.switch


def clean_title(text: str) -> str:
    """The title in a model's answer ``text``: its first line, without marks around it. Empty if that is not a title."""
    lines = [found for line in sanitize(text).splitlines() if (found := one_line(line))]
    if len(lines) != 1:
        return ""
    line = lines[0].strip(_MARKS)
    label, colon, rest = line.partition(":")
    if colon and label.strip(_MARKS).casefold() in ("title", "titel", "titre", "título", "titolo"):
        line = rest.strip(_MARKS)
    words = line.split()
    readable = any(character.isalpha() for character in line) and 2 * len(set(words)) >= len(words)
    sentence = len(line) > TITLE_LENGTH or len(words) > _MOST_WORDS
    return line if readable and not sentence and "<" not in line and line.casefold() not in _REQUEST.casefold() else ""


class TitleWriter:
    """The chats that wait for a title. ``emit`` is called when one has got it.

    A chat that the person has named keeps its name, and so does one for which the model finds no title. A title that is
    given up because of a question is asked for after its answer; one that fails is not asked for again.
    """

    def __init__(
        self,
        engine: Engine,
        link: EngineLink,
        store: ConversationStore,
        options: Callable[[], Settings],
        emit: Callable[[Update], None],
    ) -> None:
        self._engine = engine
        self._link = link
        self._store = store
        self._options = options
        self._emit = emit
        self._wanted: list[Thread] = []

    def answered(self, thread: Thread) -> None:
        """An answer in ``thread`` is complete. After its first one it waits for a title; a temporary chat does not."""
        first = [entry.role for entry in thread.path] == ["user", "assistant"] and thread.path[-1].state == "complete"
        if first and thread.memory is None and thread not in self._wanted:
            self._wanted.append(thread)

    async def write(self) -> None:
        """Ask for the titles that are wanted, one after the other. Whoever has something to ask cancels this."""
        for thread in list(self._wanted):
            if not (
                self._options().chat_titles and self._link.has(self._options()) and can_title(self._link.status.facts)
            ):
                self._wanted.clear()
                return
            with suppress(EngineDied, StoreError):
                if self._named_by_itself(thread):
                    title = await self._ask(thread)
                    if title and self._named_by_itself(thread):
                        await rename(self._store, thread, title)
                        self._emit(TitleChanged())
            self._wanted.remove(thread)

    def _named_by_itself(self, thread: Thread) -> bool:
        """Whether the title is the one made of the first question. Raises StoreError."""
        if thread.conversation is None or not thread.path or thread.path[0].record is None:
            return False
        questions = self._store.siblings(thread.path[0].record)
        return self._store.conversation(thread.conversation).title in {title_from(each.content) for each in questions}

    async def _ask(self, thread: Thread) -> str:
        facts = self._link.status.facts
        # With the pictures, which were read for the first answer already.
        said = prompt_messages(thread.system, thread.path, sees=facts is not None and facts.sight is not None)
        request = Generate(
            id=self._engine.new_id(),
            messages=[*said, Message("user", _REQUEST)],
            sampling=Sampling(temperature=0.0),
            max_tokens=_MOST_TOKENS,
            thinking=False,
            program="chat",
            conversation="" if thread.conversation is None else prefix_owner(thread.conversation),
        )
        events: AsyncGenerator[AnyEvent, None] = self._engine.stream(request)  # type: ignore[assignment]
        async with aclosing(events):
            async for event in events:
                match event:
                    case Prefill() if event.total - event.reused > _MOST_READ:
                        return ""
                    case Prefill() | Piece() | Timing():
                        continue
                    case Finished(finish_reason="stop"):
                        return clean_title(event.text)
                    case _:
                        # Another program is answered, or it failed.
                        return ""
        return ""
