"""Encoding of control tokens that are spelled out in a message: they are text, not control tokens.

Before the chat template runs, a mark is inserted after the first character of every control token in a message.
Whatever the template does to the message, a control token without a mark in the rendered text was then written by the
template. Text without marks is encoded in one piece. Text with marks is encoded in one piece by a copy of the tokenizer
that treats control tokens as text and has secret names for the template's own. Everything around them is encoded as it
would be without the marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MARK = "\ufdd0"
"""Code point that is not a character and does not occur in normal text. In a message it is replaced by U+FFFD."""


class ControlTokens:
    """The control tokens of a tokenizer: all special ones, and those among the others that ``template_texts``, the text
    that the chat template itself writes, has in it."""

    def __init__(self, library: Library, template_texts: Iterable[str]) -> None:
        self._library = library
        added = library.get_added_tokens_decoder()
        written = "\0".join(template_texts)
        special = {token.content for token in added.values() if token.special and token.content}
        others = {token.content for token in added.values() if token.content in written and not token.content.isspace()}
        self._tokens = {token.content: (number, token) for number, token in added.items()}
        self._special = _any_of(special)
        self._all = _any_of(special | (others - {""}))
        self._as_text: _AsText | None = None

    def mark(self, content: str, *, own_words: bool = False) -> str:
        """``content`` with marks.

        ``own_words``: the model wrote it. It may then contain tokens that are not special, such as those around its
        reasoning, which templates look for.
        """
        content = content.replace(MARK, "\ufffd")
        pattern = self._special if own_words else self._all
        return pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], content)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered text."""
        if MARK not in text:
            return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)
        if self._as_text is None:
            self._as_text = _AsText(self._library, self._all, self._tokens)
        return self._as_text.encode(text, add_special_tokens)


class _AsText:
    """A copy of a tokenizer in which control tokens are text, and other names stand for them."""

    def __init__(self, library: Library, pattern: re.Pattern[str], tokens: dict[str, tuple[int, Any]]) -> None:
        from tokenizers import AddedToken, Tokenizer

        self._pattern = pattern
        self._tokens = tokens
        self._copy = Tokenizer.from_str(library.to_str())
        control = [token for text, (_, token) in tokens.items() if pattern.fullmatch(text)]
        self._copy.add_special_tokens([_like(token, token.content, special=True) for token in control])
        secret = secrets.token_hex(16)
        self._names = {token.content: f"{MARK}{secret}:{place}{MARK}" for place, token in enumerate(control)}
        self._break = f"{MARK}{secret}:{MARK}"
        names = [_like(token, self._names[token.content], special=False) for token in control]
        self._copy.add_tokens([*names, AddedToken(self._break, special=False, normalized=False)])
        self._copy.encode_special_tokens = True
        self._numbers = {self._copy.token_to_id(name): tokens[text][0] for text, name in self._names.items()}
        self._forbidden = frozenset(self._numbers.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        named = self._pattern.sub(self._name, text)
        # A name is enclosed in its own marks, which stay.
        ids = self._encode(_without_marks(named, ""), add_special_tokens)
        if ids is None:
            # The vocabulary may contain the characters of a control token as a word, so they must be kept apart.
            ids = self._encode(_without_marks(named, self._break), add_special_tokens, whatever=True)
        assert ids is not None
        return ids

    def _name(self, found: re.Match[str]) -> str:
        text = found[0]
        if self._tokens[text][1].single_word and _within_a_word(found):
            return text
        return self._names[text]

    def _encode(self, text: str, add_special_tokens: bool, whatever: bool = False) -> list[int] | None:
        """None if a control token came out that the template did not write, unless ``whatever``: what is unknown to the
        vocabulary is encoded as such a token, too."""
        plain = self._copy.encode(text, add_special_tokens=False).ids
        if not whatever and not self._forbidden.isdisjoint(plain):
            return None
        end = self._copy.token_to_id(self._break)
        ids = self._copy.encode(text, add_special_tokens=add_special_tokens).ids if add_special_tokens else plain
        return [self._numbers.get(number, number) for number in ids if number != end]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of ``tokens`` that is not marked, a longer one before one that it begins with; no token: nothing."""
    longest_first = sorted(tokens, key=lambda text: (-len(text), text))
    # A token of one character has its mark behind it.
    return re.compile(f"(?:{'|'.join(map(re.escape, longest_first))})(?!{MARK})" if longest_first else "(?!)")


_NAME_OR_MARK = re.compile(f"({MARK}[0-9a-f]{{32}}:[0-9]*{MARK})|{MARK}")


def _without_marks(text: str, instead: str) -> str:
    return _NAME_OR_MARK.sub(lambda found: found[1] or instead, text)


def _within_a_word(found: re.Match[str]) -> bool:
    before, after = found.string[: found.start()][-1:], found.string[found.end() :][:1]
    return bool(re.match(r"\w", before) or re.match(r"\w", after))


def _like(token: Any, content: str, special: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(
        content,
        single_word=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
