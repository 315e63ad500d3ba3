"""Bodies of requests: read with limits on size and time, and decoded into typed structs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from app.serve.refusals import Refused
from engine.planning.units import byte_size

LARGEST = 16_000_000
"""Maximum bytes of a body. A context of a million tokens takes about 5 MB."""
SECONDS = 30.0
"""Seconds within which a body must be complete."""
MOST_HELD = 256_000_000
"""Maximum bytes of the bodies of all requests that are being read, wait, or are being answered."""
_DRAINED = 16
"""Multiple of :data:`LARGEST` that is read and dropped, so that a client that sends too much can read the refusal."""
_WHERE = re.compile(r" - at `\$\.?([^`]*)`$")

_HELD = "privatellm.held_body"
"""Key of a scope for what counts the request's body."""

T = TypeVar("T")


class HeldBodies:
    """Counts the bytes of bodies that are in memory, so that many clients together do not fill it."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def request(self, scope: Scope) -> Iterator[None]:
        """One request, whose body :func:`body_of` counts until the end of the context."""
        held = scope[_HELD] = _HeldBody(self)
        try:
            yield
        finally:
            held.add(-held.size)


class _HeldBody:
    def __init__(self, bodies: HeldBodies) -> None:
        self.size = 0
        self._bodies = bodies

    def add(self, size: int) -> None:
        """Raises Refused if there is too much already."""
        if size > 0 and self._bodies.total + size > MOST_HELD:
            raise Refused("Other requests take all the room there is for requests: try again later.", 429)
        self.size += size
        self._bodies.total += size


async def body_of(request: Request, kind: type[T]) -> T:
    """The body of ``request`` as a ``kind``. Fields that ``kind`` does not have are ignored.

    Raises Refused for a body that is too large, too slow, no JSON, or of wrong types; ClientDisconnect if its sender
    leaves.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise Refused(f"The body must be JSON: send it with Content-Type: application/json, not {media[:100]!r}.", 415)
    try:
        async with asyncio.timeout(SECONDS):
            body = await _read(request, LARGEST, request.scope[_HELD])
    except TimeoutError:
        raise Refused(f"The body did not arrive within {SECONDS:.0f} seconds.", 408) from None
    return decoded(body, kind)


def decoded(body: bytes, kind: type[T]) -> T:
    """Raises Refused, with the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _WHERE.search(text)
        where = found.group(1) if found else ""
        what = text[: found.start()] if found else text
        raise Refused(
            f"{where or 'The body'}: {what.replace('`', '')}.", parameter=where.split("[")[0] or None
        ) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"The body is not JSON: {error}.") from None


async def _read(request: Request, largest: int, held: _HeldBody) -> bytes:
    body = bytearray()
    dropped = 0
    async for chunk in request.stream():
        if not dropped and len(body) + len(chunk) <= largest:
            held.add(len(chunk))
            body += chunk
            continue
        dropped += len(body) + len(chunk)
        body.clear()
        if dropped > _DRAINED * largest:
            break
    if dropped:
        raise Refused(f"The body is larger than {byte_size(largest)}, the limit here.", 413)
    return bytes(body)
