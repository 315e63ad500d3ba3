"""The bytes of single tokens, by the way in which a tokenizer's decoder turns tokens into text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""Character that stands for a space in vocabularies of SentencePiece."""


class TokenBytes:
    """The bytes of a tokenizer's tokens. ``added`` are the tokens that were added to the vocabulary, by id.

    Concatenated, they are the UTF-8 of the decoded text, except for a space that decoders leave out at the very
    beginning of a text, and white space that some tidy up.
    """

    def __init__(self, library: Library, added: Mapping[int, Any]) -> None:
        self._library = library
        self._added = {number: token.content for number, token in added.items()}
        self.special = frozenset(number for number, token in added.items() if token.special)
        """Ids of the special tokens. Their bytes are their names."""
        self._kinds = frozenset(_kinds(_decoder(library)))

    @property
    def exact(self) -> bool:
        """Whether the bytes are known of every token, and not only those of its text by itself."""
        return bool({"ByteLevel", "ByteFallback", "Metaspace"} & self._kinds)

    def of(self, token: int) -> bytes:
        """The bytes of ``token``; empty if there is no such token."""
        if token in self._added:
            name: str = self._added[token]
            return name.encode()
        text = self._library.id_to_token(token)
        if text is None:
            return b""
        if "ByteLevel" in self._kinds:
            return _of_letters(text)
        if not self.exact:
            decoded: str = self._library.decode([token], skip_special_tokens=False)
            return decoded.encode()
        if "ByteFallback" in self._kinds and (found := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(found[1], 16)])
        return text.replace(_SPACE, " ").encode()

    def all(self, count: int) -> list[bytes]:
        """The bytes of tokens 0 to ``count`` - 1."""
        return [self.of(token) for token in range(count)]


def _decoder(library: Library) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {} if library.decoder is None else json.loads(library.decoder.__getstate__())
    return found


def _kinds(decoder: Mapping[str, Any]) -> Collection[str]:
    """The types of a decoder and of its steps."""
    return {str(decoder.get("type", "")), *(kind for step in decoder.get("decoders", ()) for kind in _kinds(step))}


@functools.cache
def _letters() -> Mapping[str, int]:
    """The letters by which byte-level vocabularies write bytes: those that can be seen as they are, the others from
    U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _of_letters(text: str) -> bytes:
    letters = _letters()
    try:
        return bytes([letters[letter] for letter in text])
    except KeyError:
        return text.encode()
