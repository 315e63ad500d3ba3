"""Frames on a pipe: a 4-byte big-endian length, then msgpack. Nothing is unpickled."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from engine.ipc.messages.events import AnyEvent, Event
from engine.ipc.messages.requests import AnyRequest

FRAME_LIMIT = 64 * 1024 * 1024
"""Largest frame accepted, in bytes: a long conversation fits many times over, a corrupt length does not."""

PROTOCOL_VERSION = 1


class ProtocolError(Exception):
    """A frame was too large, truncated, or not a known message, or a message cannot be put into a frame.

    ``before`` holds the messages that arrived whole in the same piece of the stream, before that frame.
    """

    def __init__(self, text: str, before: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.before = tuple(before)


_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct(">I")


def pack(message: AnyRequest | Event) -> bytes:
    """One frame: 4-byte big-endian length and msgpack.

    Raises ProtocolError if the message is larger than FRAME_LIMIT, or holds what msgpack cannot: an integer of more
    than 64 bits, half a surrogate pair, an object of another type.
    """
    try:
        body = _encoder.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > FRAME_LIMIT:
        raise ProtocolError(f"message of {len(body)} bytes is over the limit of {FRAME_LIMIT}")
    return _LENGTH.pack(len(body)) + body


T = TypeVar("T")


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages; feed it whatever arrives, in pieces of any size.

    Use :func:`request_reader` in the engine and :func:`event_reader` in the app.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages completed by ``data``. Raises ProtocolError on an oversized or unknown frame."""
        self._buffer += data
        messages: list[T] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_LIMIT:
                raise ProtocolError(f"frame of {length} bytes is over the limit of {FRAME_LIMIT}", messages)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                messages.append(self._decoder.decode(body))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"not a message of protocol {PROTOCOL_VERSION}: {error}", messages) from error
        return messages


def request_reader() -> FrameReader[AnyRequest]:
    return FrameReader(msgspec.msgpack.Decoder(AnyRequest))


def event_reader() -> FrameReader[AnyEvent]:
    return FrameReader(msgspec.msgpack.Decoder(AnyEvent))
