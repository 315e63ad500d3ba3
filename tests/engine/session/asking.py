"""Somebody who asks a session: what was said, what the cache holds then, and a tokenizer of single letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.ipc.messages import AnyEvent, Finished, Generate, Message, Tool
from engine.models.text.reasoning_formats import ReasoningFormat
from engine.models.text.tool_formats import ToolFormat
from engine.session.session import Session


class LetterBytes:
    """The bytes of a LetterTokenizer's tokens."""

    exact = True
    special: frozenset[int] = frozenset()

    def of(self, token: int) -> bytes:
        return chr(33 + token % 90).encode()

    def all(self, count: int) -> list[bytes]:
        return [self.of(token) for token in range(count)]


class LetterTokenizer:
    """Token i of 160 is one letter, the same one for i and i + 90; a message is its letters between role marks."""

    has_chat_template = True
    reasoning: ReasoningFormat | None = None
    tool_format: ToolFormat | None = None

    def encode_chat(self, messages: Sequence[Message], continue_last: bool = False) -> list[int]:
        return self.encode_rendered(self.render_chat(messages, continue_last))

    def render_chat(
        self,
        messages: Sequence[Message],
        continue_last: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        text = "".join(f"{chr(1000 + len(message.role) % 7)}{message.content}\u0400" for message in messages)
        return text[:-1] if continue_last else f"{text}\u03ea"

    def takes_several_calls(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        return True

    def exceeds(self, text: str, limit: int) -> bool:
        return len(text) > limit * 9 // 8

    def encode(self, text: str) -> list[int]:
        return self.encode_rendered(text)

    @property
    def token_bytes(self) -> LetterBytes:
        return LetterBytes()

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]:
        marks = {"\u0400": 159, **{chr(1000 + kind): 150 + kind for kind in range(7)}}
        return [marks.get(letter, (ord(letter) - 33) % 90) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(33 + token % 90) for token in ids)

    def decode_with_calls(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def decode_exactly(self, ids: Sequence[int]) -> str:
        return self.decode(ids)


class Ask:
    """A session, its events, and somebody at the controls."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.events: list[AnyEvent] = []
        self.cancel_when: Callable[[list[AnyEvent]], bool] = lambda events: False
        self.panel_open = False
        self.checks = 0
        self.owner = "somebody"

    def cancelled(self) -> bool:
        self.checks += 1
        return self.cancel_when(self.events)

    def watching(self) -> bool:
        return self.panel_open

    def __call__(self, prompt: list[int] | None = None, **options: Any) -> Finished:
        self.events.clear()
        request = Generate(id=7, prompt_ids=prompt, **options)
        found = self.session.generate(request, self.events.append, self)
        self.check_cache()
        assert all(event.id == 7 for event in self.events)
        return found

    def check_cache(self) -> None:
        rows = self.session._cache.rows
        assert (rows.length if rows is not None else 0) == len(self.session.cached_tokens)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
