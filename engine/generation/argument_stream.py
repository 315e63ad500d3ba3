"""The arguments of a call while they are being written, as JSON text that is never withdrawn."""

from __future__ import annotations

import json
import re

from engine.generation.text import overlap
from engine.generation.tool_arguments import ArgumentTypes, json_text, read_json
from engine.models.text.tool_formats import ToolFormat

LONGEST_KEY = 1000
"""Maximum characters within which an argument's name must be complete."""
_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)', re.DOTALL)
_SCALAR = re.compile(r'("(?:[^"\\]|\\.)*"|[^"\s,}\]]+)(?=[\s,}\]])', re.DOTALL)
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]", re.DOTALL)
_HALF = re.compile(r"\\(u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?")
"""An incomplete escape, or half of a character whose other half may follow."""

_CLOSING = re.compile(r"[\s\]})`;,]*")


class ArgumentStream:
    """Reads a JSON object of arguments in pieces. ``text`` is the certain part of it, with the schema's types.

    Arguments that are strings by the schema grow letter by letter. Any other value is certain when it is complete. For
    a valid object with distinct names, the final ``text`` equals the result of :meth:`ArgumentTypes.typed`.
    """

    def __init__(self, types: ArgumentTypes) -> None:
        self._types = types
        self.text = ""
        self.whole = False
        self._broken = False
        self._rest = ""
        """Text that was read and is not certain yet."""
        self._in_string = False
        self._between = True
        """Whether no value was read since the last comma or the beginning."""
        self._scanned, self._open, self._quoted = 0, 0, False
        """State of the list or object at the beginning of the rest: characters scanned, brackets open, and whether in a
        string."""

    def push(self, piece: str) -> None:
        """Read ``piece``. The first piece starts with the opening brace."""
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
        """All that was written, up to the mark ``end``: the certain part, and the rest unchanged."""
        rest = self._rest.partition(end)[0] if end else self._rest
        if not rest.strip() or self.whole or self._in_string:
            return self.text + ("" if self.whole or not self._in_string else rest.partition("\\")[0])
        return self.text + (", " if self._between and self.text != "{" else "") + rest.strip()

    def behind(self, end: str = "") -> str:
        """Text after the arguments, up to the mark ``end``, without what closes them; empty if they are incomplete."""
        rest = self._rest.partition(end)[0] if end else self._rest
        return rest[_CLOSING.match(rest).end() :] if self.whole else ""  # type: ignore[union-attr]

    def closed(self) -> str:
        """The certain part as a complete object."""
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
        """The end of the value that begins at ``begin``; -1 if it is not known yet."""
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


# --- arguments between tags ------------------------------------------------------------------------------------------


_CDATA = "<![CDATA["


class TaggedStream:
    """Reads arguments in ``form`` in pieces. ``text`` is the certain part of them, with the schema's types.

    Arguments that are strings by the schema grow letter by letter. Any other value is certain when another argument
    follows it. At the first ambiguity the parser waits for the end of the call.
    """

    whole = False
    """False: the end of a call is read elsewhere."""

    def __init__(self, form: ToolFormat, types: ArgumentTypes) -> None:
        self._form = form
        self._types = types
        self.text = "{"
        self._rest = ""
        """Text that was read and is not certain yet."""
        self._key: str | None = None
        """Name of the argument whose value is being read."""
        self._in_text = False
        self._keys: set[str] = set()
        self._waits = False
        """Whether the rest is left until the end of the call."""
        others = (form.last.strip(), *form.prefixes, form.begin, form.end, *form.hidden)
        self._stops = (f"\n{form.tags[0]}", form.last.strip() or form.end)
        """Marks that show that a value's end mark was forgotten."""
        self._followers = tuple(mark for mark in (form.tags[0], form.tags[0].replace('"', "'"), *others) if mark)

    def push(self, piece: str) -> None:
        self._rest += piece
        before = None
        while not self._waits and before != (state := (len(self._rest), len(self.text), self._key)):
            before = state
            if self._key is None:
                self._read_key()
            elif self._in_text:
                self._read_text()
            else:
                self._read_value()

    def begun(self, end: str = "") -> str:
        """All that was written, up to the mark ``end``."""
        rest = self._rest.partition(end)[0] if end else self._rest
        return self.text + (json_text(rest)[1:-1] if self._in_text else "")

    def behind(self, end: str = "") -> str:
        return ""

    def closed(self) -> str:
        """The certain part as a complete object."""
        return self.text + ('"}' if self._in_text else "}")

    def _read_key(self) -> None:
        key_begin, key_end, value_begin, _ = self._form.tags
        rest = self._rest.lstrip()
        if not rest.startswith(key_begin):
            self._waits = not key_begin.startswith(rest)
            return
        name, mark, value = rest[len(key_begin) :].partition(key_end)
        if value_begin:
            value = value.lstrip()
        if not mark or (value_begin and not value.startswith(value_begin)):
            self._waits = bool(mark) and not value_begin.startswith(value)
            return
        value = value.removeprefix(value_begin)
        if not value or _CDATA.startswith(value.lstrip()):
            return
        if (
            value.lstrip().startswith(_CDATA)
            or '"' in name
            or "&" in name
            or "\n" in name
            or name.strip() in self._keys
        ):
            self._waits = True
            return
        if not self._keys and self._types.may_wrap(name.strip()):
            self._waits = True
            return
        self._key = name.strip()
        self._keys.add(self._key)
        self._rest = value
        if self._types.is_text(self._key):
            self._rest = value.removeprefix("\n") if self._form.lines else value
            self._in_text = True
            self._add('"')

    def _add(self, value: str) -> None:
        assert self._key is not None
        self.text += f"{', ' if self.text != '{' else ''}{json_text(self._key)}: {value}"

    def _value_end(self) -> tuple[int, bool]:
        """The end of the text that certainly belongs to the value, and whether another argument follows it."""
        key_begin, _, _, value_end = self._form.tags
        rest, start = self._rest, 0
        forgotten = min((at for mark in self._stops if (at := rest.find(mark)) >= 0), default=-1)
        while (end := rest.find(value_end, start)) >= 0:
            follows = rest[end + len(value_end) :].lstrip()
            if 0 <= forgotten < end:
                break
            if follows.startswith(key_begin):
                return end, True
            if any(mark.startswith(follows) or follows.startswith(mark) for mark in self._followers):
                return end, False
            start = end + len(value_end)
        if forgotten >= 0:
            self._waits = True
            return forgotten, False
        return len(rest) - max(overlap(rest, mark) for mark in (value_end, *self._stops)), False

    def _read_text(self) -> None:
        end, is_over = self._value_end()
        text = self._rest[:end]
        if self._form.lines and text.endswith("\n"):
            # It may be the one that belongs to the end mark.
            text = text[:-1]
        self.text += json_text(text)[1:-1]
        if is_over:
            self.text += '"'
            self._rest, self._key, self._in_text = self._rest[end + len(self._form.tags[3]) :], None, False
        else:
            self._rest = self._rest[len(text) :]

    def _read_value(self) -> None:
        assert self._key is not None
        end, is_over = self._value_end()
        if not is_over:
            return
        value = self._rest[:end]
        if self._form.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        self._add(json_text(self._types.from_text(self._key, value)))
        self._rest, self._key = self._rest[end + len(self._form.tags[3]) :], None
