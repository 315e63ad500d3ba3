"""The link listener: one TCP port for pairing and for links. A connecting machine states its purpose in one small
frame."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from discovery.errors import LinkListenerError
from discovery.frames import Deadline, FrameError, receive_exactly

_log = logging.getLogger(__name__)

USUAL_PORT = 47820
"""Usual control port. The link listener is at the next one."""
_PAIRS_TRIED = 20
MAX_BODY = 1024
MAX_KIND = 16
PREAMBLE_SECONDS = 5.0
_PREAMBLE = struct.Struct("!4sBBH")
"""Header: magic, version, bytes of the kind, bytes of the body."""
_MAGIC = b"pvLM"
_VERSION = 1
_POLL_S = 0.25
"""Seconds between two checks whether the link listener was closed."""
_CLOSE_S = 5.0
_MAX_CONNECTIONS = 32
_MAX_PER_ADDRESS = 16
"""Maximum connections on which nothing was agreed yet. One machine cannot take all places."""

Handler = Callable[[socket.socket, bytes, tuple[str, int]], None]
"""Handler of a kind of connection, called in a thread of its own with (connection, body, the other end's address).

The handler owns the connection: it closes it or passes it on. Until it returns, nothing counts as agreed on the
connection.
"""


@dataclass(frozen=True)
class PortPair:
    """A free port for the control plane, and a listening socket on the next one."""

    control: int
    listener: socket.socket


def bind_pair(host: str = "", port: int | None = None) -> PortPair:
    """Find the two ports.

    ``host`` empty: all addresses of this machine, IPv4 and IPv6. ``port`` None: the usual one or the next free pair; 0:
    any; otherwise exactly this one. Raises LinkListenerError.
    """
    if port is None:
        candidates = [USUAL_PORT + 2 * step for step in range(_PAIRS_TRIED)]
    elif port == 0:
        candidates = [0] * _PAIRS_TRIED
    elif port < 65535:
        candidates = [port]
    else:
        raise LinkListenerError(
            f"Port {port} cannot be used, the next one is needed too: choose one from 1024 to 65534."
        )
    failure: OSError | None = None
    for candidate in candidates:
        try:
            return _bind_pair(host, candidate)
        except OSError as error:
            failure = error
            if error.errno != errno.EADDRINUSE:
                break
    assert failure is not None
    raise LinkListenerError(_why_not(host, candidates, failure)) from failure


class LinkListener:
    """Accepts connections on a bound socket until closed. Thread-safe."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._handlers: dict[str, Handler] = {}
        self._open: dict[socket.socket, str] = {}
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        listener.settimeout(_POLL_S)
        listener.listen(_MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, name="link-listener", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, host: str = "", port: int = 0) -> LinkListener:
        """Open a link listener on its own port (0: any). Raises LinkListenerError."""
        try:
            return cls(_listen(host, port))
        except OSError as error:
            raise LinkListenerError(_why_not(host, [port], error)) from error

    def register(self, kind: str, handler: Handler) -> None:
        """Pass connections of this kind to ``handler`` from now on. A kind that nobody registered is closed without an
        answer."""
        if not 0 < len(kind.encode()) <= MAX_KIND:
            raise ValueError(f"the kind {kind!r} has to have 1 to {MAX_KIND} bytes")
        with self._mutex:
            self._handlers[kind] = handler

    def close(self) -> None:
        """Stop listening and cut the connections on which nothing was agreed yet. May be called twice."""
        with self._mutex:
            self._closed.set()
            connections = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, though not on every system
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._accept_one()
            except TimeoutError:
                continue
            except OSError:
                self._closed.wait(0.1)  # out of file descriptors, or a connection that was gone before it was accepted
            except Exception:  # whatever one connection does, the link listener stays open for the others
                _log.exception("a connection was not taken")
                self._closed.wait(0.1)

    def _accept_one(self) -> None:
        connection, address = self._listener.accept()
        taken = False
        try:
            # Darwin gives a connection that was reset before it was accepted, without an address.
            if address and self._admit(connection, str(address[0])):
                arguments = (connection, (str(address[0]), int(address[1])))
                threading.Thread(target=self._serve, args=arguments, name="link-connection", daemon=True).start()
                taken = True
        finally:
            if not taken:
                with self._mutex:
                    self._open.pop(connection, None)
                connection.close()

    def _admit(self, connection: socket.socket, host: str) -> bool:
        with self._mutex:
            full = len(self._open) >= _MAX_CONNECTIONS or Counter(self._open.values())[host] >= _MAX_PER_ADDRESS
            if full or self._closed.is_set():
                return False
            self._open[connection] = host
            return True

    def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind, body = _read_preamble(connection)
            with self._mutex:
                handler = self._handlers.get(kind)
            if handler is None:
                connection.close()
                return
            connection.settimeout(None)
            handler(connection, body, address)
        except (FrameError, OSError):
            connection.close()
        except Exception:  # what one connection brings about is that connection's end, and nobody else's
            _log.exception("a connection was cut")
            connection.close()
        finally:
            with self._mutex:
                self._open.pop(connection, None)


def dial(address: tuple[str, int], kind: str, body: bytes = b"", seconds: float = 5.0) -> socket.socket:
    """Connect to a link listener. It closes the connection if it does not know the kind.

    Raises LinkListenerError if nobody listens there.
    """
    if len(body) > MAX_BODY:
        raise ValueError(f"a body of {len(body)} bytes where {MAX_BODY} are allowed")
    name = kind.encode()
    try:
        connection = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        permission = permission_lacked(error, os.environ, sys.platform)
        running = "is privatellm running there with its network open, and does its firewall let this port in?"
        remedy = f"{permission}; else, {running}" if permission else running
        raise LinkListenerError(
            f"Nobody answers at {address[0]} port {address[1]} ({error.strerror or error}): {remedy}"
        ) from error
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_PREAMBLE.pack(_MAGIC, _VERSION, len(name), len(body)) + name + body)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise LinkListenerError(
            f"{address[0]} port {address[1]} closed the connection ({error.strerror or error})."
        ) from error
    return connection


def _read_preamble(connection: socket.socket) -> tuple[str, bytes]:
    deadline = Deadline(PREAMBLE_SECONDS)
    magic, version, kind_length, body_length = _PREAMBLE.unpack(receive_exactly(connection, _PREAMBLE.size, deadline))
    sound = magic == _MAGIC and version == _VERSION and 0 < kind_length <= MAX_KIND and body_length <= MAX_BODY
    if not sound:
        raise FrameError("not a preamble of ours")
    kind = receive_exactly(connection, kind_length, deadline)
    return kind.decode("ascii", "replace"), receive_exactly(connection, body_length, deadline)


def _bind_pair(host: str, port: int) -> PortPair:
    control = _listen(host, port)
    try:
        number: int = control.getsockname()[1]
        if number >= 65535:
            raise OSError(errno.EADDRINUSE, "the next port does not exist")
        return PortPair(number, _listen(host, number + 1))
    finally:
        control.close()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. SO_REUSEADDR ignores connections that ended a moment ago, but not another listener."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port))


def _why_not(host: str, candidates: list[int], error: OSError) -> str:
    where = host or "this machine"
    if error.errno == errno.EADDRINUSE and len(candidates) == 1:
        return (
            f"Port {candidates[0]} or {candidates[0] + 1} of {where} is in use: choose another with --listen HOST:PORT "
            "or end the program that uses it (is privatellm running twice?)."
        )
    if error.errno == errno.EADDRINUSE:
        return f"No two neighbouring ports from {candidates[0]} on are free on {where}: use --listen HOST:PORT."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"“{host}” is not an address of this machine ({error.strerror}): give one of its own, or none for all."
    return f"Port {candidates[0]} of {where} cannot be listened on ({error.strerror or error}): choose another."


# --- the local network on macOS --------------------------------------------------------------------------------------


_NAMES = {"iTerm.app": "iTerm", "vscode": "Visual Studio Code", "ghostty": "Ghostty", "WarpTerminal": "Warp"}
"""The names of apps in System Settings, where they differ from what ``TERM_PROGRAM`` says."""


def may_use_local_network(environment: Mapping[str, str]) -> bool:
    """Whether macOS asks for no permission: Terminal.app and remote logins have it."""
    return environment.get("TERM_PROGRAM") == "Apple_Terminal" or "SSH_CONNECTION" in environment


def local_network_permission(terminal: str) -> str:
    """Instructions for giving the permission to ``terminal``, the value of ``TERM_PROGRAM``, or empty."""
    known = terminal and terminal.isprintable() and terminal not in ("tmux", "screen")
    name = _NAMES.get(terminal, terminal) if known else "your terminal app"
    return (
        f"allow {name} under System Settings > Privacy & Security > Local Network (if it is not in the list: "
        "start the app anew and try again)"
    )


def permission_lacked(error: OSError, environment: Mapping[str, str], system: str) -> str:
    """Instructions for giving the permission, if ``error`` of a connection on ``system`` may come from its lack; else
    empty.

    macOS then reports that there is no route to the host.
    """
    if system != "darwin" or error.errno != errno.EHOSTUNREACH or may_use_local_network(environment):
        return ""
    return local_network_permission(environment.get("TERM_PROGRAM", ""))
