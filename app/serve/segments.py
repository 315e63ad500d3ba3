"""An answer as a row of segments: thoughts, text, calls of tools. Two protocols number them and mark their ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from engine.ipc.messages import Piece, Sample, ToolCallPiece

Kind = Literal["thoughts", "text", "call"]


@dataclass(frozen=True)
class AnswerSegment:
    """``text``: all of it so far; for a call, its arguments as JSON text. ``id`` and ``name`` are those of a call."""

    number: int
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class SegmentChange:
    """A change to a segment: it ``began``, got ``added`` text, or ``ended``. Only one is open at a time."""

    what: Literal["began", "added", "ended"]
    segment: AnswerSegment
    added: str = ""


class AnswerSegments:
    """Cuts the pieces of one answer into segments. ``done`` are those that have ended."""

    def __init__(self) -> None:
        self.done: list[AnswerSegment] = []
        self._open: AnswerSegment | None = None
        self._call: int = -1

    def take(self, piece: Piece) -> Iterator[SegmentChange]:
        """The changes by ``piece``. Text that turned out to be thoughts cannot be taken back, and is not repeated."""
        if piece.reasoning and not piece.withdrawn:
            yield from self._add("thoughts", piece.reasoning)
        if piece.text:
            yield from self._add("text", piece.text)
        for call in piece.tool_calls:
            yield from self._add_call(call)

    def end(self) -> Iterator[SegmentChange]:
        """The end of the open segment, if there is one."""
        if self._open is not None:
            ended, self._open = self._open, None
            self.done.append(ended)
            yield SegmentChange("ended", ended)

    def _add(self, kind: Kind, text: str) -> Iterator[SegmentChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(AnswerSegment(len(self.done), kind))
        yield from self._grow(text)

    def _add_call(self, call: ToolCallPiece) -> Iterator[SegmentChange]:
        if self._open is None or self._open.kind != "call" or self._call != call.index:
            self._call = call.index
            yield from self._begin(AnswerSegment(len(self.done), "call", id=call.id, name=call.name))
        if call.arguments:
            yield from self._grow(call.arguments)

    def _begin(self, segment: AnswerSegment) -> Iterator[SegmentChange]:
        yield from self.end()
        self._open = replace(segment, number=len(self.done))
        yield SegmentChange("began", self._open)

    def _grow(self, text: str) -> Iterator[SegmentChange]:
        assert self._open is not None
        self._open = replace(self._open, text=self._open.text + text)
        yield SegmentChange("added", self._open, text)


def segments_of(answer: Sample) -> list[AnswerSegment]:
    """The segments of a whole answer."""
    found = [AnswerSegment(0, "thoughts", answer.reasoning)] if answer.reasoning else []
    if answer.text:
        found.append(AnswerSegment(0, "text", answer.text))
    found += [AnswerSegment(0, "call", call.arguments, call.id, call.name) for call in answer.tool_calls]
    return [replace(segment, number=number) for number, segment in enumerate(found)]
