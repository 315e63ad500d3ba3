"""A conversation's text with the tokens it was really said in.

A sampled answer is often not cut into tokens as the tokenizer would cut its text. If the next question's prompt were
tokenized from text alone, the cache would hold another prefix from the first such place on, and everything after it
would be run again.
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
"""Places to go on from that are tried, the latest first, before the whole prompt is tokenized from its text."""

REMEMBERED_TOKENS = 2_000_000
"""Tokens of the prompts that are remembered word by word; each takes four bytes."""


class ChatTokenizer(Protocol):
    """What is needed of :class:`engine.models.tokenizer.Tokenizer`."""

    def render_chat(
        self, messages: Sequence[Message], continue_last: bool = False, should_stop: Callable[[], bool] = ...
    ) -> str: ...

    def encode_rendered(self, text: str, beginning: bool = True) -> list[int]: ...

    def decode_exactly(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class _Place:
    """The end of a prompt or of an answer: so many characters, in so many tokens."""

    characters: int
    tokens: int


class SpokenTokens:
    """The conversation up to the last answer. Only ever a choice among tokens for the same text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._tokens: list[int] = []
        self._places: list[_Place] = []
        self._asked: OrderedDict[bytes, array[int]] = OrderedDict()
        """The tokens of prompts by their text: one that is asked again is asked in the same tokens."""
        self._asked_tokens = 0

    def prompt(
        self,
        messages: Sequence[Message],
        continue_last: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """The token ids of ``messages`` through the chat template: as said before as far as the text is the same, the
        rest as the tokenizer has it. Raises ModelError if the template refuses the messages, Cancelled as soon as
        ``should_stop()``."""
        text = self._tokenizer.render_chat(messages, continue_last, should_stop)
        same = [place for place in self._places if text.startswith(self._text[: place.characters])]
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._asked:
            self._asked.move_to_end(key)
            tokens = self._asked[key].tolist()
            kept = [place for place in same if tokens[: place.tokens] == self._tokens[: place.tokens]]
        else:
            tokens, kept = self._tokenized(text, same)
            self._remember(key, tokens)
        self._text, self._tokens, self._places = text, list(tokens), kept
        self._add_place()
        return tokens

    def _tokenized(self, text: str, same: list[_Place]) -> tuple[list[int], list[_Place]]:
        """The tokens of ``text``, and the places of ``same`` up to which they are those that were said."""
        fresh = self._tokenizer.encode_rendered(text)
        for place in same[: -TRIES - 1 : -1]:
            rest = text[place.characters :]
            tail = self._tokenizer.encode_rendered(rest, beginning=False) if rest else []
            # Only where the tokenizer itself puts the same tokens after this place, whatever stands before it.
            if fresh[len(fresh) - len(tail) :] == tail:
                return self._tokens[: place.tokens] + tail, same[: same.index(place) + 1]
        return fresh, []

    def _remember(self, key: bytes, tokens: Sequence[int]) -> None:
        self._asked[key] = array("i", tokens)
        self._asked_tokens += len(tokens)
        while self._asked_tokens > REMEMBERED_TOKENS and len(self._asked) > 1:
            self._asked_tokens -= len(self._asked.popitem(last=False)[1])

    def answered(self, text: str, tokens: Sequence[int]) -> None:
        """``tokens`` (without one that ends the turn) answered the last prompt with ``text``.

        They are not used again if they say more or less than the text: a special token, or a cut at a stop string.
        """
        if tokens and self._tokenizer.decode_exactly(tokens) == text:
            self._text += text
            self._tokens += tokens
            self._add_place()

    def _add_place(self) -> None:
        place = _Place(len(self._text), len(self._tokens))
        if place not in self._places:
            self._places.append(place)
