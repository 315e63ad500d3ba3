"""No single address may take all the connections that strangers have to the control port.

gRPC accepts connections itself and limits only their sum. So shortly after one came, this process looks at its own
sockets, and of an address that has too many on which nobody has proved yet who it is, ends the oldest.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import psutil

from engine.cluster.transport.addresses import plain_ip

MOST_EACH = 16
"""Connections of one address on which nothing was proved."""
LOOK_S = 0.1
"""After the first connection of a burst."""
_MOST_PROVED = 1024

End = tuple[str, int]
"""The other end of a connection: IP address and port."""


class CrowdLimit:
    """Of the connections to the listening ``port``. From any thread."""

    def __init__(self) -> None:
        self._proved: dict[End, None] = {}
        self._lock = threading.Lock()
        self._looking: threading.Timer | None = None
        self._closed = False

    def came(self, port: int) -> None:
        """Somebody connected to ``port``."""
        with self._lock:
            if self._looking is None and not self._closed:
                self._looking = threading.Timer(LOOK_S, self._look, (port,))
                self._looking.daemon = True
                self._looking.start()

    def proved(self, address: str, port: int) -> None:
        """A paired machine called from there."""
        with self._lock:
            self._proved[plain_ip(address), port] = None
            if len(self._proved) > _MOST_PROVED:
                del self._proved[next(iter(self._proved))]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            looking = self._looking
        if looking is not None:
            looking.cancel()

    def _look(self, port: int) -> None:
        with self._lock:
            self._looking = None
            proved = set(self._proved)
        with contextlib.suppress(psutil.Error, OSError):
            ends: dict[int, End] = {}
            for one in psutil.Process().net_connections("tcp"):
                if one.fd >= 0 and one.raddr and one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED:
                    ends[one.fd] = (plain_ip(one.raddr.ip), one.raddr.port)
            for descriptor in too_many(ends, proved):
                _end(descriptor, port, ends[descriptor])


def too_many(ends: Mapping[int, End], proved: Collection[End], most: int = MOST_EACH) -> Sequence[int]:
    """The descriptors, of those whose other ``ends`` are given, that are to be ended. Pure."""
    strangers: defaultdict[str, list[int]] = defaultdict(list)
    for descriptor, end in sorted(ends.items()):
        if end not in proved:
            strangers[end[0]].append(descriptor)
    return [descriptor for each in strangers.values() for descriptor in each[:-most]]


def _end(descriptor: int, port: int, end: End) -> None:
    """Shut the connection down, if the descriptor is still the one that was meant; its owner closes it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, number = connection.getpeername()[:2]
        if (plain_ip(str(host)), number) == end and connection.getsockname()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
