"""The terminal's input as events: Textual's parser with some keys and pastes added."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from time import monotonic

from textual import constants, events
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._parser import ParseTimeout
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

from app.text_safety import sanitize
from app.tui.terminal.graphics import REPORT, REPORT_BEGUN, TerminalReport

ESCAPE_S = 0.02
"""Seconds after which a lone ESC is the escape key and not the beginning of another key. A terminal sends all of one
key at once. The environment variable ESCDELAY, in milliseconds, overrides this."""
SEQUENCE_S = 1.0
"""Seconds that the rest of a sequence is waited for. Slow links deliver sequences in pieces."""

_BREAKS = ("\x1b\r", "\x1b\n")
_KEPT = len(BRACKETED_PASTE_END) - 1
"""Number of characters of a paste's end that may be at the end of the data read before."""
_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[(?:M[\s\S]{3}|<[^mM\x1b]{0,40}[mM]|\[[A-Za-z]|[0-9;:]*\$|(?!<)[0-?]*[ -/]*[@-LN-Z\\-~])"
    r"|O[ -~]|[^\[O\x1b])"
)
"""A whole sequence: of a key, of the mouse, of a report, of a paste's beginning or end."""
_BEGUN = re.compile(r"\x1b(?:\[(?:M[\s\S]{0,2}|<[^mM\x1b]{0,40}|\[|[0-?]*[ -/]*)?|O)?\Z")
"""The beginning of a sequence, at the end of what has arrived."""
_OTHER_KEY = re.compile(r"\x1b\[27;(\d+);(\d+)~")
"""A key with modifiers as xterm's modifyOtherKeys writes it."""


class KeyParser(XTermParser):
    """Textual's parser, which is given whole sequences only, with these differences:

    - The escape key is recognised after :data:`ESCAPE_S`. The rest of a sequence is waited for :data:`SEQUENCE_S`, and
      what stays incomplete or is not known is dropped, never typed.
    - ESC followed by enter is one key, ``alt+enter``. A key with alt types nothing.
    - Characters that Python does not call printable (joiners, wide spaces, new emoji) arrive as a paste, because
      widgets ignore them as keys.
    - ``sequences`` gets what was sent last for each key, by the key's name.
    - A paste is one text. Escape sequences in it are removed and never act as keys.
    - What the terminal answers to questions is a :class:`TerminalReport`. While ``awaits_reports()``, one that comes in
      pieces is waited for, like a key.

    ``clock`` gives seconds.
    """

    def __init__(
        self,
        debug: bool = False,
        sequences: dict[str, str] | None = None,
        clock: Callable[[], float] = monotonic,
        awaits_reports: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sequences = sequences if sequences is not None else {}
        self._clock = clock
        self._awaits_reports = awaits_reports
        self._begun = ""
        """The beginning of a sequence whose rest has not arrived."""
        self._due: float | None = None
        self._escaped: float | None = None
        """When an ESC was taken for the escape key; None if something else followed."""
        self._before = ""
        self._paste: list[str] | None = None
        super().__init__(debug)

    @property
    def due(self) -> float | None:
        """When :meth:`tick` is due, by the clock; None while nothing waits for it."""
        return self._due

    def feed(self, data: str) -> Iterable[Message]:
        """The events that ``data`` completes; an empty text is the end of all input."""
        if not data:
            self._due = self._clock() if self._begun else None
            yield from self.tick()
            yield from super().feed("")
            return
        late = self._is_late(data)
        data, self._begun, self._due = ("\x1b" if late else self._begun) + data, "", None
        while data:
            if self._paste is not None:
                pasted, data = self._up_to_end_of_paste(data)
                if pasted is not None:
                    yield events.Paste(as_text(pasted))
                continue
            if data[0] != "\x1b":
                end = data.find("\x1b") if "\x1b" in data else len(data)
                yield from map(_as_widgets_take_it, super().feed(data[:end]))
                data = data[end:]
                continue
            if report := REPORT.match(data):
                data = data[report.end() :]
                yield TerminalReport(report.group())
            elif REPORT_BEGUN.match(data) and self._awaits_reports():
                self._begun, data = data, ""
                self._due = self._clock() + SEQUENCE_S
            elif found := _SEQUENCE.match(data):
                data = data[found.end() :]
                yield from self._of_sequence(found.group(), late)
            elif _BEGUN.match(data):
                self._begun, data = data, ""
                self._due = self._clock() + (_escape_s() if self._begun == "\x1b" else max(SEQUENCE_S, _escape_s()))
            else:
                yield events.Key("escape", "\x1b")
                data = data[1:]
            late = False

    def tick(self) -> Iterable[Message]:
        """The events of what has waited long enough."""
        if self._due is None or self._clock() < self._due:
            return
        begun, self._begun, self._due = self._begun, "", None
        if begun == "\x1b":
            self._escaped = self._clock()
            yield events.Key("escape", "\x1b")
        elif begun in ("\x1b[", "\x1bO", "\x1bP", "\x1b_"):
            yield from self._with_alt(begun[1])

    def _is_late(self, data: str) -> bool:
        """Whether ``data`` is the rest of a sequence whose ESC was taken for the escape key. One hand does not type two
        characters at once."""
        escaped, self._escaped = self._escaped, None
        if escaped is None or self._begun or self._clock() > escaped + SEQUENCE_S or len(data) < 2:
            return False
        whole = f"\x1b{data}"
        return data[0] == "[" and bool(_BEGUN.match(whole) or _SEQUENCE.match(whole))

    def _of_sequence(self, sequence: str, late: bool) -> Iterable[Message]:
        if sequence == BRACKETED_PASTE_START:
            self._before, self._paste = "", []
            return
        if sequence == BRACKETED_PASTE_END:
            return
        if other := _OTHER_KEY.fullmatch(sequence):
            # Textual would type the character.
            key_events = list(super().feed(f"\x1b[{other[2]};{other[1]}u"))
            self._sequences.update((event.key, sequence) for event in key_events if isinstance(event, events.Key))
        elif len(sequence) == 2 and sequence not in (*ANSI_SEQUENCES_KEYS, *_BREAKS):
            key_events = list(self._with_alt(sequence[1]))
        else:
            key_events = list(super().feed(sequence))
            if self._timeout_time is not None:
                # Textual waits for more: it does not know the sequence, and would type it.
                self._timeout_time = None
                self._awaiting = self._gen.throw(ParseTimeout())
                self._tokens.clear()
                if late and sequence[2].isalpha():
                    key_events = list(super().feed(sequence[1:]))
        yield from map(_as_widgets_take_it, key_events)

    def _with_alt(self, character: str) -> Iterable[Message]:
        """A key that was pressed with alt."""
        for event in self._sequence_to_key_events(character, alt=True):
            yield events.Key(event.key if event.key.startswith("alt+") else f"alt+{event.key}", None)

    def _up_to_end_of_paste(self, data: str) -> tuple[str | None, str]:
        """The whole paste if it ends in ``data``, otherwise None; and the rest of ``data``."""
        assert self._paste is not None
        text = self._before + data
        end = text.find(BRACKETED_PASTE_END)
        if end < 0:
            keep = max(0, len(text) - _KEPT)
            self._paste.append(text[:keep])
            self._before = text[keep:]
            return None, ""
        pasted = "".join([*self._paste, text[:end]])
        self._before, self._paste = "", None
        return pasted, text[end + len(BRACKETED_PASTE_END) :]

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if sequence in _BREAKS:
            key_events = [events.Key("alt+enter", None)]
        else:
            key_events = list(super()._sequence_to_key_events(sequence, alt))
        for event in key_events:
            self._sequences[event.key] = f"\x1b{sequence}" if alt else sequence
        return key_events


def _escape_s() -> float:
    """Seconds after which a lone ESC is the escape key."""
    return constants.ESCAPE_DELAY if "ESCDELAY" in os.environ else ESCAPE_S


def as_text(pasted: str) -> str:
    """The pasted text without what acts on a terminal. Most terminals send a carriage return at the end of a line."""
    return sanitize(pasted.replace("\r\n", "\n").replace("\r", "\n"))


def _as_widgets_take_it(event: Message) -> Message:
    if not isinstance(event, events.Key) or not event.character or event.is_printable:
        return event
    text = event.character
    return events.Paste(text) if text >= "\xa0" and sanitize(text) == text else event
