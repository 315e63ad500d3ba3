"""Leads a model through an answer that must have a form: its thoughts are free, and the form begins with the answer.

Before the answer a model may open its thoughts, or name the part that follows, as its format of thoughts says. It ends
the answer only where the form is complete.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import ModelError
from engine.generation.constraints import Allowed, FormState
from engine.generation.reasoning import ReasoningParser

LONGEST_FREE_NAME = 64
"""Maximum tokens of the name of a part, after which only its end may come."""
MOST_BLANKS = 2
"""Maximum tokens of empty lines between thoughts and answer."""


@dataclass(frozen=True)
class GuideVocabulary:
    """What a guide knows of the tokens: their bytes, those that end an answer, and how texts are written in them."""

    size: int
    bytes_of: Callable[[int], bytes]
    ends: Collection[int]
    encode: Callable[[str], Sequence[int]]
    """The tokens in which the model writes a mark."""
    spelled: Callable[[str], Sequence[int]]
    """Any tokens whose bytes are those of a text."""
    blanks: Sequence[int] = ()
    """Tokens that are empty lines and nothing else."""

    @property
    def no_ends(self) -> Allowed:
        allowed = np.ones(self.size, np.bool_)
        allowed[self._inside(self.ends)] = False
        return allowed

    def only(self, tokens: Collection[int]) -> Allowed:
        allowed = np.zeros(self.size, np.bool_)
        allowed[self._inside(tokens)] = True
        return allowed

    def _inside(self, tokens: Collection[int]) -> list[int]:
        return [token for token in tokens if token < self.size]


class AnswerGuide:
    """Says which tokens may come next in one answer, or one beam. ``parser`` separates its thoughts; None without."""

    def __init__(self, form: FormState, vocabulary: GuideVocabulary, parser: ReasoningParser | None) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self._parser = parser
        """None as soon as the answer has begun."""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._opening: list[tuple[int, ...]] = []
        """What is left of the marks whose first tokens were chosen."""
        self._name_tokens = 0
        self._blanks = 0

    def copy(self) -> AnswerGuide:
        other = AnswerGuide(self._form.copy(), self._vocabulary, None)
        if self._parser is not None:
            other._parser = copy.deepcopy(self._parser)
            other._text.setstate(self._text.getstate())
            other._opening = list(self._opening)
            other._name_tokens, other._blanks = self._name_tokens, self._blanks
        return other

    @property
    def over(self) -> bool:
        """Whether the answer is complete, and nothing may be added to it."""
        return self._parser is None and self._form.over

    def allowed(self) -> Allowed:
        """The tokens that may come next, those that end the answer included.

        Raises ModelError (bad-input) if no token of the vocabulary may, or the form is too much work.
        """
        allowed = self._allowed()
        if not allowed.any():
            raise ModelError(
                "The form that was asked for goes on with text for which the model has no token.", "bad-input"
            )
        return allowed

    def _allowed(self) -> Allowed:
        vocabulary, parser = self._vocabulary, self._parser
        if self._opening:
            return vocabulary.only([tokens[0] for tokens in self._opening])
        if parser is not None and parser.in_name and self._name_tokens >= LONGEST_FREE_NAME:
            return vocabulary.only([tokens[0] for tokens in self._marks(parser.name_ends)])
        if parser is not None and (parser.thinking or parser.in_name):
            return vocabulary.no_ends
        if parser is not None and not parser.answer_may_begin:
            return vocabulary.only([tokens[0] for tokens in self._marks(parser.openers)])
        allowed = self._form.allowed() & vocabulary.no_ends
        if self._form.complete:
            allowed |= vocabulary.only(vocabulary.ends)
        if parser is not None:
            allowed |= vocabulary.only([tokens[0] for tokens in self._marks(parser.openers)])
            if parser.has_thought and self._blanks < MOST_BLANKS:
                allowed |= vocabulary.only(vocabulary.blanks)
        return allowed

    def _marks(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        found = [tuple(self._vocabulary.encode(text)) for text in texts]
        return [tokens for tokens in found if tokens]

    def take(self, token: int) -> bool:
        """Add ``token``. Returns False, with nothing added, if it ends a mark and begins what no answer begins with."""
        if self._parser is None:
            return token in self._vocabulary.ends or self._form.take([token])
        parser = self._parser
        if not self._opening and parser.answer_may_begin:
            if token in self._vocabulary.ends:
                return True
            if self._form.take([token]):
                self._parser = None
                return True
            if token in self._vocabulary.blanks:
                self._blanks += 1
        return self._take_before_answer(token, parser)

    def _take_before_answer(self, token: int, before: ReasoningParser) -> bool:
        state = self._text.getstate()
        parser = copy.deepcopy(before)
        rest = parser.push(self._text.decode(self._vocabulary.bytes_of(token))).answer
        begun = parser.answer_may_begin and bool(rest.strip("\n"))
        if begun and not self._form.take(self._vocabulary.spelled(rest)):
            self._text.setstate(state)
            return False
        if not (before.thinking or before.in_name):
            started = self._opening or self._marks(before.openers)
            self._opening = [tokens[1:] for tokens in started if tokens[0] == token and len(tokens) > 1]
        self._name_tokens = self._name_tokens + 1 if parser.in_name else 0
        self._parser = None if begun else parser
        return True
