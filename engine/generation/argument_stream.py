"""The arguments of a call while they are written, as JSON text that never has to be taken back."""

from __future__ import annotations

import json
import re

from engine.generation.tool_arguments import ArgumentTypes, json_text, read_json

LONGEST_KEY = 1000
"""Maximum characters in which an argument's name must be whole."""
_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)', re.DOTALL)
_SCALAR = re.compile(r'("(?:[^"\\]|\\.)*"|[^"\s,}\]]+)(?=[\s,}\]])', re.DOTALL)
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]", re.DOTALL)
_HALF = re.compile(r"\\(u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?")
"""An escape that is not whole, or half of a character whose other half may follow."""

_CLOSING = re.compile(r"[\s\]})`;,]*")


class ArgumentStream:
    """Reads a JSON object of arguments in pieces. ``text`` is what is certain of it, with the types of the schema.

    A string grows letter by letter where it is one by the schema; any other value is certain when it is whole. For an
    object that is JSON, with each name once, ``text`` ends as what :meth:`ArgumentTypes.typed` makes of all of it.
    """

    def __init__(self, types: ArgumentTypes) -> None:
        self._types = types
        self.text = ""
        self.whole = False
        self._broken = False
        self._rest = ""
        """What was read and is not certain."""
        self._in_string = False
        self._between = True
        """Whether no value was read since the last comma, or since the beginning."""
        self._scanned, self._open, self._quoted = 0, 0, False
        """How much of a list or an object at the beginning of the rest was looked at, and what is open there."""

    def push(self, piece: str) -> None:
        """Read ``piece``, the first of which begins with the opening brace."""
        self._rest += piece
        if not self.text and self._rest:
            self.text, self._rest = "{", self._rest[1:]
        while not self.whole and not self._broken:
            before = len(self._rest), len(self.text)
            if self._in_string:
                self._read_string()
            elif self._between:
                self._read_member()
            else:
                self._read_end()
            if before == (len(self._rest), len(self.text)):
                break

    def begun(self, end: str = "") -> str:
        """All that was written, up to the mark ``end``: what is certain, and the rest as it is."""
        rest = self._rest.partition(end)[0] if end else self._rest
        if not rest.strip() or self.whole or self._in_string:
            return self.text + ("" if self.whole or not self._in_string else rest.partition("\\")[0])
        return self.text + (", " if self._between and self.text != "{" else "") + rest.strip()

    def behind(self, end: str = "") -> str:
        """The text behind the arguments, up to the mark ``end``, that closes nothing; none if they are not whole."""
        rest = self._rest.partition(end)[0] if end else self._rest
        return rest[_CLOSING.match(rest).end() :] if self.whole else ""  # type: ignore[union-attr]

    def closed(self) -> str:
        """What is certain, as a whole object."""
        return self.text if self.whole else self.text + ('"}' if self._in_string else "}")

    def _read_member(self) -> None:
        rest = self._rest
        if self.text == "{" and rest.lstrip()[:1] == "}":
            self.text, self.whole = "{}", True
            return
        key = _KEY.match(rest)
        if key is None:
            self._broken = rest.lstrip()[:1] not in ("", '"') or len(rest) > LONGEST_KEY
            return
        name = read_json(key[1])
        if not isinstance(name, str):
            self._broken = True
        elif self.text == "{" and self._types.may_wrap(name):
            return
        elif rest[key.end()] == '"' and self._types.keeps_strings(name):
            self._rest, self._in_string = rest[key.end() + 1 :], True
            self._add(name, '"')
        elif (end := self._value_end(key.end())) >= 0:
            written = rest[key.end() : end]
            value = read_json(written)
            self._broken = value is None and written != "null"
            if not self._broken:
                self._rest = rest[end:]
                self._add(name, json_text(self._types.member(name, value)))

    def _add(self, name: str, value: str) -> None:
        self.text += f"{', ' if self.text != '{' else ''}{json_text(name)}: {value}"
        self._between, self._scanned, self._open = False, 0, 0

    def _value_end(self, begin: int) -> int:
        """Where the value ends that begins at ``begin``; -1 if that is not known yet."""
        rest = self._rest
        if rest[begin] not in "{[":
            found = _SCALAR.match(rest, begin)
            return -1 if found is None else found.end()
        place = max(begin, self._scanned)
        while place < len(rest):
            letter = rest[place]
            if self._quoted:
                if letter == "\\" and place + 1 == len(rest):
                    break
                place += letter == "\\"
                self._quoted = letter != '"'
            else:
                self._quoted = letter == '"'
                self._open += (letter in "{[") - (letter in "}]")
                if self._open == 0:
                    return place + 1
            place += 1
        self._scanned = place
        return -1

    def _read_string(self) -> None:
        rest = self._rest
        if rest[:1] == '"':
            self.text += '"'
            self._rest, self._in_string = rest[1:], False
        elif (found := _PLAIN.match(rest)) is not None:
            self.text += json_text(found[0])[1:-1]
            self._rest = rest[found.end() :]
        elif rest and _HALF.fullmatch(rest) is None:
            escape = _ESCAPE.match(rest)
            try:
                written = json_text(json.loads(f'"{escape[0]}"'))[1:-1] if escape is not None else ""
            except (ValueError, RecursionError):
                written = ""
            self._broken = not written
            self.text += written
            self._rest = rest[escape.end() if escape is not None else 0 :]

    def _read_end(self) -> None:
        rest = self._rest.lstrip()
        if rest[:1] == ",":
            self._rest, self._between = rest[1:], True
        elif rest[:1] == "}":
            self.text += "}"
            self._rest, self.whole = rest[1:], True
        else:
            self._broken = rest != ""
