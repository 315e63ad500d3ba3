"""A conversation's text with the tokens it was really said in.

A sampled answer is often not cut into tokens as the tokenizer would cut its text. If the next question's prompt were
tokenized from text alone, the cache would hold another prefix from the first such place on, and everything after it
would be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.messages import Message

TRIES = 4
"""Places to go on from that are tried, the latest first, before the whole prompt is tokenized from its text."""


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
        fresh = self._tokenizer.encode_rendered(text)
        same = [place for place in self._places if text.startswith(self._text[: place.characters])]
        kept: list[_Place] = []
        tokens = fresh
        for place in same[: -TRIES - 1 : -1]:
            rest = text[place.characters :]
            tail = self._tokenizer.encode_rendered(rest, beginning=False) if rest else []
            # Only where the tokenizer itself puts the same tokens after this place, whatever stands before it.
            if fresh[len(fresh) - len(tail) :] == tail:
                tokens = self._tokens[: place.tokens] + tail
                kept = same[: same.index(place) + 1]
                break
        self._text, self._tokens, self._places = text, list(tokens), kept
        self._add_place()
        return list(tokens)

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
