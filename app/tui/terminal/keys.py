"""What a terminal sends, as events: Textual's parser with some keys and pastes added."""

from __future__ import annotations

import os
from collections.abc import Iterable

from textual import events
from textual._parser import Read1
from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.message import Message

from app.text_safety import sanitize

ESCAPE_S = 0.02
"""Seconds after which a lone ESC is the escape key and not the beginning of another key. A terminal sends all of one
key at once. The environment variable ESCDELAY, in milliseconds, overrides this."""

_BREAKS = ("\x1b\r", "\x1b\n")
_KEPT = len(BRACKETED_PASTE_START) - 1
"""Number of characters of a paste marker that may be at the end of the data read before."""


class KeyParser(XTermParser):
    """Textual's parser with these differences:

    - The escape key is recognised after :data:`ESCAPE_S`.
    - ESC followed by enter is one key, ``alt+enter``.
    - Characters that Python does not call printable (joiners, wide spaces, new emoji) arrive as a paste, because
      widgets ignore them as keys.
    - ``sequences`` gets what was sent last for each key, by the key's name.
    - A paste is one text. Escape sequences in it are removed and never act as keys.
    """

    def __init__(self, debug: bool = False, sequences: dict[str, str] | None = None) -> None:
        self._sequences = sequences if sequences is not None else {}
        self._after_escape = 0
        self._before = ""
        self._paste: list[str] | None = None
        super().__init__(debug)

    @property
    def due(self) -> float | None:
        """When :meth:`tick` is due, on the monotonic clock; None while nothing waits for it."""
        return self._timeout_time

    def read1(self, timeout: float | None = None) -> Read1:  # type: ignore[override]
        """What the parser waits for next, at most ``timeout`` seconds."""
        self._after_escape = 0 if timeout is None else self._after_escape + 1
        if self._after_escape == 1 and "ESCDELAY" not in os.environ:
            return Read1(ESCAPE_S)
        return Read1(timeout)

    def feed(self, data: str) -> Iterable[Message]:
        """The events that ``data`` completes; an empty text is the end of all input."""
        if not data:
            yield from super().feed("")
        while data:
            if self._paste is None:
                keys, data = self._up_to_paste(data)
                yield from map(_as_widgets_take_it, super().feed(keys))
                continue
            pasted, data = self._up_to_end_of_paste(data)
            if pasted is not None:
                # The parser has seen the beginning of a paste and must see its end. It makes an empty paste of both.
                for _ in super().feed(BRACKETED_PASTE_END):
                    pass
                yield events.Paste(as_text(pasted))

    def tick(self) -> Iterable[Message]:
        return map(_as_widgets_take_it, super().tick())

    def _up_to_paste(self, data: str) -> tuple[str, str]:
        """``data`` up to and including the marker of a paste's beginning, and the rest."""
        known = self._before + data
        start = known.find(BRACKETED_PASTE_START)
        if start < 0:
            self._before = known[-_KEPT:]
            return data, ""
        self._before, self._paste = "", []
        end = start + len(BRACKETED_PASTE_START) - (len(known) - len(data))
        return data[:end], data[end:]

    def _up_to_end_of_paste(self, data: str) -> tuple[str | None, str]:
        """The whole paste if it ends in ``data``, otherwise None; and the rest of ``data``."""
        assert self._paste is not None
        known = self._before + data
        end = known.find(BRACKETED_PASTE_END)
        if end < 0:
            keep = max(0, len(known) - _KEPT)
            self._paste.append(known[:keep])
            self._before = known[keep:]
            return None, ""
        pasted = "".join([*self._paste, known[:end]])
        self._before, self._paste = "", None
        return pasted, known[end + len(BRACKETED_PASTE_END) :]

    def _sequence_to_key_events(self, sequence: str, alt: bool = False) -> Iterable[events.Key]:
        if sequence in _BREAKS:
            found = [events.Key("alt+enter", None)]
        else:
            found = list(super()._sequence_to_key_events(sequence, alt))
        for event in found:
            self._sequences[event.key] = f"\x1b{sequence}" if alt else sequence
        return found


def as_text(pasted: str) -> str:
    """The pasted text without what acts on a terminal. Most terminals send a carriage return at the end of a line."""
    return sanitize(pasted.replace("\r\n", "\n").replace("\r", "\n"))


def _as_widgets_take_it(event: Message) -> Message:
    if not isinstance(event, events.Key) or not event.character or event.is_printable:
        return event
    text = event.character
    return events.Paste(text) if text >= "\xa0" and sanitize(text) == text else event
