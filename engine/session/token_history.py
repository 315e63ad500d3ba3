"""The tokens of a conversation as they were generated, beside its text.

The tokens of a sampled answer are often not those that the tokenizer makes of its text. If the next question's prompt
were tokenized from text alone, the cache would hold another prefix from the first such boundary on, and everything
after it would be run again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.ipc.messages import Message

TRIES = 4
"""Boundaries that are tried, the latest first, before the whole prompt is tokenized from its text."""

REMEMBERED_TOKENS = 2_000_000
"""Maximum tokens of remembered prompts; each token takes four bytes."""


class ChatTokenizer(Protocol):
    """The part of :class:`engine.models.tokenizer.Tokenizer` that a session uses."""

    def render_chat(
        self, messages: Sequence[Message], continue_last: bool = False, should_stop: Callable[[], bool] = ...
    ) -> str: ...

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]: ...

    def decode_exactly(self, ids: Sequence[int]) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class _Boundary:
    """The end of a prompt or of an answer, counted in characters and in tokens."""

    characters: int
    tokens: int


class TokenHistory:
    """The conversation up to the last answer. It only chooses among tokens of the same text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._tokens: list[int] = []
        self._boundaries: list[_Boundary] = []
        self._asked: OrderedDict[bytes, array[int]] = OrderedDict()
        """The tokens of earlier prompts by a hash of their text: a repeated prompt gets the same tokens."""
        self._asked_tokens = 0

    def prompt(
        self,
        messages: Sequence[Message],
        continue_last: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """The token ids of ``messages`` through the chat template: the recorded tokens as far as the text is the same,
        the tokenizer's for the rest. Raises ModelError if the template refuses the messages, Cancelled as soon as
        ``should_stop()``."""
        text = self._tokenizer.render_chat(messages, continue_last, should_stop)
        same = [boundary for boundary in self._boundaries if text.startswith(self._text[: boundary.characters])]
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._asked:
            self._asked.move_to_end(key)
            tokens = self._asked[key].tolist()
            kept = [boundary for boundary in same if tokens[: boundary.tokens] == self._tokens[: boundary.tokens]]
        else:
            tokens, kept = self._tokenized(text, same)
            self._remember(key, tokens)
        self._text, self._tokens, self._boundaries = text, list(tokens), kept
        self._add_boundary()
        return tokens

    def _tokenized(self, text: str, same: list[_Boundary]) -> tuple[list[int], list[_Boundary]]:
        """The tokens of ``text``, and the boundaries of ``same`` up to which they are the recorded ones."""
        fresh = self._tokenizer.encode_rendered(text)
        for boundary in same[: -TRIES - 1 : -1]:
            rest = text[boundary.characters :]
            tail = self._tokenizer.encode_rendered(rest, beginning=False) if rest else []
            # Only where the tokenizer itself makes the same tokens after this boundary, whatever precedes it.
            if fresh[len(fresh) - len(tail) :] == tail:
                return self._tokens[: boundary.tokens] + tail, same[: same.index(boundary) + 1]
        return fresh, []

    def _remember(self, key: bytes, tokens: Sequence[int]) -> None:
        self._asked[key] = array("i", tokens)
        self._asked_tokens += len(tokens)
        while self._asked_tokens > REMEMBERED_TOKENS and len(self._asked) > 1:
            self._asked_tokens -= len(self._asked.popitem(last=False)[1])

    def answered(self, text: str, tokens: Sequence[int]) -> None:
        """``tokens`` (without one that ends the turn) answered the last prompt with ``text``.

        They are not recorded if they decode to more or less than the text: a special token, or a cut at a stop string.
        """
        if tokens and self._tokenizer.decode_exactly(tokens) == text:
            self._text += text
            self._tokens += tokens
            self._add_boundary()

    def _add_boundary(self) -> None:
        boundary = _Boundary(len(self._text), len(self._tokens))
        if boundary not in self._boundaries:
            self._boundaries.append(boundary)
