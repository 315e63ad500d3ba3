"""Constrained decoding: which tokens may come next in an answer that must have a given form.

The grammars are llguidance's, which is imported when the first constraint is asked for. Its limits bound the time and
memory that a hostile schema, regular expression or grammar can take.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelError, shown
from engine.ipc.messages import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Allowed = NDArray[np.bool_]
"""For each token of the vocabulary, whether it may come next."""

LARGEST_CONSTRAINT = 128 * 1024
"""Maximum bytes of a schema, a regular expression or a grammar."""
DEEPEST = 64
"""Maximum brackets that are open at once in a constraint's text."""
WHITE_SPACE = r"( |\n[ \t]{0,40})"
"""Regular expression of the white space between two parts of JSON. It is short, as a model might never end it."""

_NAMES = {
    "json": "The JSON constraint",
    "schema": "The JSON schema",
    "regex": "The regular expression",
    "grammar": "The grammar",
}
_PLAINLY = {"NoExtensionBias": "a part of it is defined by nothing but itself"}
"""The library's reasons that say nothing to a person."""
_ANY_OBJECT = '{"type": "object"}'


class FormState:
    """How far an answer of a form has come. One answer, or one beam, has one."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, name: str) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._name = name

    def copy(self) -> FormState:
        return FormState(self._matcher.deep_copy(), self._vocabulary, self._name)

    def allowed(self) -> Allowed:
        """The tokens that may come next; none of them ends the answer.

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
        """Whether the answer is complete, and nothing may be added to it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _refused(self, reason: str) -> ModelError:
        return refused(self._name, reason)


class ConstraintVocabulary:
    """A model's vocabulary in the form that llguidance needs: ``token_bytes`` of each token. Those in ``control`` are
    in no answer. Making one takes about a second for 250,000 tokens."""

    def __init__(self, token_bytes: Sequence[bytes], control: Collection[int]) -> None:
        import llguidance

        self._size = len(token_bytes)
        # The token after the last one stands for the end of an answer, of which a model may have several or none.
        self._tokens = _Tokens([*token_bytes, b"<end>"], [*sorted(control), self._size])
        self._library: LLTokenizer = llguidance.LLTokenizer(cast(Any, self._tokens))

    def begin(self, constraint: Constraint) -> FormState:
        """The state before the first token of an answer.

        Raises ModelError (bad-input) if the constraint is malformed, too large, or has what is not supported.
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
        """Tokens whose bytes are those of ``text``, not necessarily those that the model would choose."""
        return self._tokens(text)


class _Tokens:
    """What llguidance asks a tokenizer for."""

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
        """For each place of ``_text`` between two tokens, the number of those before it."""
        self._last_gap = -1
        """The last place of ``_text`` whose byte no token has; -1 if there is none."""

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of ``text``, the longest ones first. Bytes that no token has are left out."""
        data = text.encode() if isinstance(text, str) else text
        rest = len(self._text) - len(data)
        if not (rest in self._after and self._text.endswith(data)):
            self._split(data)
            rest = 0
        self.gaps = self.gaps or self._last_gap >= rest
        return self._found[self._after[rest] :]

    def _split(self, data: bytes) -> None:
        """Keep the tokens of ``data``. At each step of an answer the library asks for all text that must follow, which
        is what it asked for before, less the tokens written since."""
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
    """The error of a constraint that cannot be followed; ``name`` is how a sentence calls it."""
    reason = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(". ")
    reason = _PLAINLY.get(reason, reason)
    return ModelError(f"{name} cannot be used: {shown(reason, 300)}.", kind="bad-input")
