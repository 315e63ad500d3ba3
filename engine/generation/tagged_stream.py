"""The arguments of a call between tags while they are written, as JSON text that never has to be taken back."""

from __future__ import annotations

from engine.generation.text import overlap
from engine.generation.tool_arguments import ArgumentTypes, json_text
from engine.models.text.tool_formats import ToolFormat

_CDATA = "<![CDATA["


class TaggedStream:
    """Reads arguments in ``form`` in pieces. ``text`` is what is certain of them, with the types of the schema.

    A string grows letter by letter where it is one by the schema. Any other value is certain when another argument
    follows it. At the first thing that may be read in two ways it waits for the end of the call.
    """

    whole = False
    """The end of a call is not read here."""

    def __init__(self, form: ToolFormat, types: ArgumentTypes) -> None:
        self._form = form
        self._types = types
        self.text = "{"
        self._rest = ""
        """What was read and is not certain."""
        self._key: str | None = None
        """The argument whose value is read."""
        self._in_text = False
        self._keys: set[str] = set()
        self._waits = False
        """Whether the rest is left to the end of the call."""
        others = (form.last.strip(), *form.prefixes, form.begin, form.end, *form.hidden)
        self._stops = (f"\n{form.tags[0]}", form.last.strip() or form.end)
        """What may show that the end mark of a value was forgotten."""
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
        """What is certain, as a whole object."""
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
        """Up to where the rest is certainly the value, and whether another argument follows that."""
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
