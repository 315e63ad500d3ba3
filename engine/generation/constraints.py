"""Constrained decoding: the tokens that may come next in an answer that must have a given form.

The grammars are llguidance's, which is imported for the first constraint. Its limits bound the time and memory that a
hostile schema, regular expression or grammar can take.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, shown
from engine.generation.reasoning import ReasoningParser
from engine.ipc.messages import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Allowed = NDArray[np.bool_]
"""Whether each token of the vocabulary may come next."""

LARGEST_CONSTRAINT = 128 * 1024
"""Maximum bytes of a schema, a regular expression or a grammar."""
DEEPEST = 64
"""Maximum nesting of brackets in a constraint's text."""
WHITE_SPACE = r"( |\n[ \t]{0,40})"
"""Regular expression of the white space between two parts of JSON. It is bounded, because a model might never end
it."""

_NAMES = {
    "json": "The JSON constraint",
    "schema": "The JSON schema",
    "regex": "The regular expression",
    "grammar": "The grammar",
}
_PLAINLY = {"NoExtensionBias": "a part of it is defined by nothing but itself"}
"""Explanations for reasons of the library that a person would not understand."""
_ANY_OBJECT = '{"type": "object"}'


class FormState:
    """The progress of one answer, or one beam, within a form."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, name: str) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._name = name

    def copy(self) -> FormState:
        return FormState(self._matcher.deep_copy(), self._vocabulary, self._name)

    def allowed(self) -> Allowed:
        """The tokens that may come next, without those that end the answer.

        Raises ModelError (bad-input) if the form takes too much work to follow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._refused(self._matcher.get_error())
        return np.unpackbits(packed, count=self._vocabulary, bitorder="little").view(np.bool_)

    def accepts(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return bool(self._matcher.validate_tokens([token]))

    def take(self, tokens: Sequence[int]) -> bool:
        """Add ``tokens`` to the answer. Returns False, with nothing added, if they may not come next."""
        if self._matcher.validate_tokens(list(tokens)) != len(tokens):
            return False
        return self._matcher.consume_tokens(list(tokens))

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    @property
    def over(self) -> bool:
        """Whether the answer is complete and nothing may be added to it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _refused(self, reason: str) -> ModelError:
        return refused(self._name, reason)


class ConstraintVocabulary:
    """A model's vocabulary in the form that llguidance needs: ``token_bytes`` of each token.

    Tokens in ``control`` occur in no answer. Making the vocabulary takes about a second for 250,000 tokens.
    """

    def __init__(self, token_bytes: Sequence[bytes], control: Collection[int]) -> None:
        import llguidance

        self._size = len(token_bytes)
        # The token after the last one stands for the end of an answer, of which a model may have several or none.
        self._tokens = _Tokens([*token_bytes, b"<end>"], [*sorted(control), self._size])
        self._library: LLTokenizer = llguidance.LLTokenizer(cast(Any, self._tokens))

    def begin(self, constraint: Constraint) -> FormState:
        """The state before the first token of an answer.

        Raises ModelError (bad-input) if the constraint is malformed, too large, or uses something unsupported.
        """
        import llguidance

        name = _NAMES[constraint.kind]
        grammar = _grammar(constraint)
        self._tokens.gaps = False
        matcher = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise refused(name, matcher.get_error())
        state = FormState(matcher, self._size, name)
        # What every answer of the form begins with is written in tokens at once.
        if not state.allowed().any() or self._tokens.gaps:
            reason = "only an empty answer has this form" if state.complete else "the model has no token to begin with"
            raise refused(name, reason)
        return state

    def spelled(self, text: str) -> list[int]:
        """Tokens whose bytes are those of ``text``, not necessarily the tokens that the model would choose."""
        return self._tokens(text)


class _Tokens:
    """The tokenizer interface that llguidance calls."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1
        left_out = set(special)
        self._numbers = {token: number for number, token in enumerate(tokens) if token and number not in left_out}
        self._longest = max(map(len, self._numbers), default=0)
        self.gaps = False
        """Whether some bytes had no token."""
        self._text = b""
        self._found: list[int] = []
        """Tokens of ``_text``."""
        self._after: dict[int, int] = {0: 0}
        """Number of tokens before each token boundary in ``_text``, by position."""
        self._last_gap = -1
        """The last position in ``_text`` whose byte is in no token; -1 if there is none."""

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of ``text``, the longest first. Bytes without a token are left out."""
        data = text.encode() if isinstance(text, str) else text
        rest = len(self._text) - len(data)
        if not (rest in self._after and self._text.endswith(data)):
            self._split(data)
            rest = 0
        self.gaps = self.gaps or self._last_gap >= rest
        return self._found[self._after[rest] :]

    def _split(self, data: bytes) -> None:
        """Record the tokens of ``data``.

        At each step the library asks for all text that must follow. That is the text of the step before, without the
        tokens written since, so its tokens are reused.
        """
        self._text, self._found, self._after, self._last_gap = data, [], {}, -1
        begin = 0
        while begin < len(data):
            self._after[begin] = len(self._found)
            end = min(begin + self._longest, len(data))
            while end > begin + 1 and data[begin:end] not in self._numbers:
                end -= 1
            if data[begin:end] in self._numbers:
                self._found.append(self._numbers[data[begin:end]])
            else:
                self._last_gap = begin
            begin = max(begin + 1, end)
        self._after[len(data)] = len(self._found)


def _limits() -> LLParserLimits:
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000, max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False
    )


def _grammar(constraint: Constraint) -> str:
    import llguidance

    name, text = _NAMES[constraint.kind], constraint.text
    if constraint.kind == "json":
        text = _ANY_OBJECT
    _check_size(name, text)
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if constraint.kind == "grammar":
        return llguidance.LLMatcher.grammar_from_lark(text)
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(name, f"it is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise refused(name, "it is no JSON object")
    # A schema could set the options itself by this key.
    schema.pop("x-guidance", None)
    options: Any = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": True}
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise refused(name, str(error)) from error


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise refused(name, "it has half of a surrogate pair in it, which is no text") from error
    if not text.strip():
        raise refused(name, "it is empty")
    if size > LARGEST_CONSTRAINT:
        raise refused(name, f"it has {size:,} bytes, and at most {LARGEST_CONSTRAINT:,} are allowed")
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth > DEEPEST:
            raise refused(name, f"more than {DEEPEST} brackets are open at once")


def refused(name: str, reason: str) -> ModelError:
    """The error for a constraint that cannot be followed. ``name``: what a sentence calls it."""
    reason = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(". ")
    reason = _PLAINLY.get(reason, reason)
    return ModelError(f"{name} cannot be used: {shown(reason, 300)}.", kind="bad-input")


# --- thoughts, and then a form ---------------------------------------------------------------------------------------


LONGEST_FREE_NAME = 64
"""Maximum tokens of a part's name, after which only its end may come."""
MOST_BLANKS = 2
"""Maximum tokens of empty lines between thoughts and answer."""


@dataclass(frozen=True)
class GuideVocabulary:
    """A guide's view of the vocabulary: the tokens' bytes, the tokens that end an answer, and functions from text to
    tokens."""

    size: int
    bytes_of: Callable[[int], bytes]
    ends: Collection[int]
    encode: Callable[[str], Sequence[int]]
    """Function that gives the model's own tokens for a mark."""
    spelled: Callable[[str], Sequence[int]]
    """Function that gives any tokens whose bytes are those of a text."""
    blanks: Sequence[int] = ()
    """Tokens that consist only of empty lines."""

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
    """Guide that says which tokens may come next in one answer, or one beam. ``parser`` separates its thoughts; None
    without."""

    def __init__(self, form: FormState, vocabulary: GuideVocabulary, parser: ReasoningParser | None) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self._parser = parser
        """Parser of the thoughts; None once the answer has begun."""
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._opening: list[tuple[int, ...]] = []
        """Remaining tokens of the marks whose first tokens were chosen."""
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
        """Whether the answer is complete and nothing may be added to it."""
        return self._parser is None and self._form.over

    def allowed(self) -> Allowed:
        """The tokens that may come next, including those that end the answer.

        Raises ModelError (bad-input) if no token may come next, or the form takes too much work.
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
