"""The token history: the tokens of a conversation as they were generated, beside its text.

The tokenizer often splits the text of a sampled answer into other tokens than were sampled. A prompt tokenized from its
text alone would then differ from the cache, and everything after the first difference would be run again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.ipc.messages import Message, Tool
from engine.models.text.reasoning_formats import ReasoningFormat
from engine.models.text.token_bytes import TokenBytes
from engine.models.text.tool_formats import ToolFormat

TRIES = 4
"""Number of boundaries tried, the latest first, before the whole prompt is tokenized from its text."""

MOST_LINES = 32
"""Maximum conversations whose generated tokens are remembered."""

REMEMBERED_TOKENS = 2_000_000
"""Maximum tokens of remembered prompts, four bytes each."""


class ChatTokenizer(Protocol):
    """The part of :class:`engine.models.text.tokenizer.Tokenizer` that a session uses."""

    reasoning: ReasoningFormat | None
    tool_format: ToolFormat | None

    @property
    def token_bytes(self) -> TokenBytes: ...

    def render_chat(
        self,
        messages: Sequence[Message],
        continue_last: bool = False,
        should_stop: Callable[[], bool] = ...,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str: ...

    def takes_several_calls(self, should_stop: Callable[[], bool] = ...) -> bool: ...

    def exceeds(self, text: str, limit: int) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]: ...

    def decode_exactly(self, ids: Sequence[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_with_calls(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class _Boundary:
    """The end of a prompt or of an answer, counted in characters and in tokens."""

    characters: int
    tokens: int


@dataclass
class ConversationLine:
    """The text of one conversation, up to its last prompt or answer, and its tokens."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    boundaries: list[_Boundary] = field(default_factory=list)

    def same(self, text: str) -> list[_Boundary]:
        """The boundaries up to which ``text`` equals the line's text."""
        boundaries: list[_Boundary] = []
        for boundary in self.boundaries:
            if not text.startswith(self.text[: boundary.characters]):
                break
            boundaries.append(boundary)
        return boundaries

    def add_boundary(self) -> None:
        boundary = _Boundary(len(self.text), len(self.tokens))
        if boundary not in self.boundaries:
            self.boundaries.append(boundary)


class TokenHistory:
    """The histories of the latest conversations, each up to its last answer.

    They change only how a text is split into tokens, never the text.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lines = [ConversationLine()]
        """The latest one last."""
        self._asked: OrderedDict[bytes, array[int]] = OrderedDict()
        """The tokens of earlier prompts by a hash of their text, so that a repeated prompt gets the same tokens."""
        self._asked_tokens = 0

    def prompt(self, text: str) -> ConversationLine:
        """A conversation that the chat template rendered as ``text``, with its token ids.

        Recorded tokens are used as far as the text is the same, and the tokenizer's for the rest.
        """
        found = [line.same(text) for line in self._lines]
        best = max(range(len(found)), key=lambda index: (found[index][-1].characters if found[index] else 0, index))
        line, same = self._lines[best], found[best]
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._asked:
            self._asked.move_to_end(key)
            tokens = self._asked[key].tolist()
            boundaries = [boundary for boundary in same if tokens[: boundary.tokens] == line.tokens[: boundary.tokens]]
        else:
            tokens, boundaries = self._tokenized(text, line, same)
            self._remember(key, tokens)
        if text.startswith(line.text):
            # It goes on; any other conversation stays as it was.
            del self._lines[best]
        asked = ConversationLine(text, tokens, boundaries)
        asked.add_boundary()
        self._lines = [*self._lines[1 - MOST_LINES :], asked]
        return asked

    def _tokenized(self, text: str, line: ConversationLine, same: list[_Boundary]) -> tuple[list[int], list[_Boundary]]:
        """The tokens of ``text``, and the boundaries of ``same`` up to which they equal those of ``line``."""
        fresh = self._tokenizer.encode_rendered(text)
        for boundary in same[: -TRIES - 1 : -1]:
            rest = text[boundary.characters :]
            tail = self._tokenizer.encode_rendered(rest, beginning=False) if rest else []
            # A boundary is used only if the tokens after it do not depend on the text before it.
            if fresh[len(fresh) - len(tail) :] == tail:
                return line.tokens[: boundary.tokens] + tail, same[: same.index(boundary) + 1]
        return fresh, []

    def _remember(self, key: bytes, tokens: Sequence[int]) -> None:
        self._asked[key] = array("i", tokens)
        self._asked_tokens += len(tokens)
        while self._asked_tokens > REMEMBERED_TOKENS and len(self._asked) > 1:
            self._asked_tokens -= len(self._asked.popitem(last=False)[1])

    def answered(self, line: ConversationLine, text: str, tokens: Sequence[int]) -> None:
        """Record the answer ``text`` to the prompt of ``line`` and its ``tokens``, without an end-of-turn token.

        Nothing is recorded if the tokens do not decode to the text, because of a special token or a stop string.
        """
        if tokens and self._tokenizer.decode_exactly(tokens) == text:
            line.text += text
            line.tokens += tokens
            line.add_boundary()
