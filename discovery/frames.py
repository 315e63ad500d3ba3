"""Frames on a plain socket: a length of two bytes and that many bytes, limited in size and time."""

from __future__ import annotations

import socket
import time

MAX_FRAME = 8 * 1024
_LENGTH = 2


class FrameError(Exception):
    """The other end closed the connection, was too slow, or sent something too large."""


class Deadline:
    """A time limit for a whole conversation, which nobody can stretch byte by byte."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left. Raises FrameError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise FrameError("the other machine took too long")
        return left


def send_frame(connection: socket.socket, frame: bytes, deadline: Deadline) -> None:
    """Send one frame. Raises FrameError, and ValueError if it is larger than any may be."""
    if len(frame) > MAX_FRAME:
        raise ValueError(f"a frame of {len(frame)} bytes")
    try:
        connection.settimeout(deadline.left())
        connection.sendall(len(frame).to_bytes(_LENGTH, "big") + frame)
    except OSError as error:
        raise FrameError(_words(error)) from error


def receive_frame(connection: socket.socket, deadline: Deadline, limit: int = MAX_FRAME) -> bytes:
    """The next frame. Raises FrameError."""
    length = int.from_bytes(receive_exactly(connection, _LENGTH, deadline), "big")
    if length > limit:
        raise FrameError(f"the other machine sent a frame of {length} bytes where {limit} are allowed")
    return receive_exactly(connection, length, deadline)


def receive_exactly(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    """The next ``count`` bytes. Raises FrameError if the other end closes before, or is too slow."""
    received = bytearray()
    while len(received) < count:
        try:
            connection.settimeout(deadline.left())
            piece = connection.recv(count - len(received))
        except OSError as error:
            raise FrameError(_words(error)) from error
        if not piece:
            raise FrameError("the other machine closed the connection")
        received += piece
    return bytes(received)


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "the other machine took too long"
    if isinstance(error, ConnectionError):
        return "the other machine closed the connection"
    return str(error.strerror or error)
