"""Pairing over the link listener: the side that shows a code and the side on which it is typed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from discovery.errors import DiscoveryError, PairingError
from discovery.frames import Deadline, FrameError, receive_frame, send_frame
from discovery.identity import Identity
from discovery.link_listener import dial
from discovery.pairing import Code, PairedPeer, PairingRefused, Reason, ShowingSide, TypingSide, refusal, typed_digits
from discovery.peers import Peer, PeersFile, new_peer

KIND = "pair"
"""Kind of connection at the link listener: ``listener.register(KIND, service.handle)``."""
RUN_SECONDS = 10.0
"""Timeout in seconds of a whole pairing, on the side on which the code was typed."""
STEP_SECONDS = 2.0
"""Timeout in seconds of each frame of the other side, for which no person is needed. A slower machine is cut off."""
MOST_RUNS = 8
_MOST_EACH = 4
"""Maximum pairings of one address at a time, which cannot take all places."""
_SIDE_WAITS = 3.0
"""Seconds that a pairing waits for a place."""


class PairingService:
    """The machine that shows a code. One code at a time may have several pairings under way. Thread-safe.

    ``on_paired(peer)`` is called after the peer was stored, ``on_failed(sentence, tries_left)`` when somebody tried and
    failed. Both are called in the connection's thread.
    """

    def __init__(
        self,
        identity: Identity,
        peers: PeersFile,
        name: str,
        on_paired: Callable[[Peer], None] = lambda peer: None,
        on_failed: Callable[[str, int], None] = lambda sentence, tries_left: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._peers = peers
        self._name = name
        self._on_paired = on_paired
        self._on_failed = on_failed
        self._clock = clock
        self._code: Code | None = None
        self._runs: Counter[str] = Counter()
        """Pairings under way by the address of the other side."""
        self._ended = threading.Condition()

    def show(self) -> Code:
        """Show a new code. The previous one is no longer valid."""
        self.hide()
        self._code = code = Code(self._clock)
        return code

    def hide(self) -> None:
        """Hide the code. None is valid any more."""
        code, self._code = self._code, None
        if code is not None:
            code.void()

    @property
    def code(self) -> Code | None:
        """The code that can be typed now."""
        code = self._code
        return code if code is not None and code.is_valid else None

    @property
    def has_expired(self) -> bool:
        """Whether the last code became too old before it was used, used up or hidden."""
        code = self._code
        return code is not None and code.has_expired

    def handle(self, connection: socket.socket, body: bytes, address: tuple[str, int]) -> None:
        """Handle a connection of the link listener, which is closed when this returns."""
        with contextlib.closing(connection), contextlib.suppress(FrameError):
            first = _received(connection)
            if not self._enter(address[0]):
                _send(connection, refusal("busy"))
                return
            try:
                self._pair(connection, first)
            finally:
                self._leave(address[0])

    def _enter(self, host: str) -> bool:
        """Wait for a place."""
        with self._ended:
            free = self._ended.wait_for(
                lambda: self._runs.total() < MOST_RUNS and self._runs[host] < _MOST_EACH, _SIDE_WAITS
            )
            if free:
                self._runs[host] += 1
            return free

    def _leave(self, host: str) -> None:
        with self._ended:
            self._runs[host] -= 1
            self._runs += Counter()  # forgets those that have none
            self._ended.notify_all()

    def _pair(self, connection: socket.socket, first: bytes) -> None:
        code = self._code
        try:
            if code is None:
                raise PairingRefused("none")
            side = ShowingSide(self._identity.certificate_der, self._name, code)
            _send(connection, side.on_start(first))
            _send(connection, side.on_proof(_received(connection)))
            peer = self._store(side.on_farewell(_received(connection)))
        except PairingRefused as refused:
            if not refused.sent:
                _send(connection, refusal(refused.reason))
            self._tell(refused.reason, code)
            return
        # What is stored here but not there is harmless, and told on the other screen.
        with contextlib.suppress(FrameError):
            _send(connection, side.stored())
        self._on_paired(peer)

    def _store(self, paired: PairedPeer) -> Peer:
        peer = new_peer(paired.certificate_der, paired.name)
        try:
            self._peers.add(peer)
        except DiscoveryError as error:
            self._on_failed(str(error), 0)
            raise FrameError(str(error)) from error
        return peer

    def _tell(self, reason: Reason, code: Code | None) -> None:
        """Report a failure. Attempts without a code are not reported: any port scanner makes them."""
        if reason == "wrong" and code is not None:
            tries = "one more try" if code.tries_left == 1 else f"{code.tries_left} more tries"
            self._on_failed(f"A wrong code was typed on another machine; {tries} and it is void.", code.tries_left)
        elif reason == "exhausted":
            self._on_failed("A wrong code was typed too often: the code is void, show a new one.", 0)
        elif reason == "same":
            self._on_failed(str(PairingRefused("same")), code.tries_left if code else 0)


def _send(connection: socket.socket, frame: bytes) -> None:
    send_frame(connection, frame, Deadline(STEP_SECONDS))


def _received(connection: socket.socket) -> bytes:
    return receive_frame(connection, Deadline(STEP_SECONDS))


def pair_with(
    host: str,
    listener_port: int,
    code: str,
    identity: Identity,
    peers: PeersFile,
    my_name: str,
    address: str = "",
) -> Peer:
    """Pair with the machine that shows ``code``, at the address of its link listener. It is stored in ``peers``.

    ``address`` (``HOST:PORT`` of its control port) is remembered with it. Raises PairingError, LinkListenerError,
    PeersError.
    """
    side = TypingSide(identity.certificate_der, my_name, typed_digits(code))
    deadline = Deadline(RUN_SECONDS)
    with contextlib.closing(dial((host, listener_port), KIND, seconds=RUN_SECONDS / 2)) as connection:
        try:
            send_frame(connection, side.start(), deadline)
            frame = side.on_reply(receive_frame(connection, deadline))
            send_frame(connection, frame, deadline)
            frame = side.on_proof(receive_frame(connection, deadline))
            send_frame(connection, frame, deadline)
            paired = side.on_stored(receive_frame(connection, deadline))
        except PairingRefused as refused:
            if not refused.sent:
                with contextlib.suppress(FrameError):
                    send_frame(connection, refusal(refused.reason), deadline)
            raise
        except FrameError as error:
            raise PairingError(
                f"The pairing with {host} was broken off, {error}: try again; if it stays so, see whether both run the "
                "same version of privatellm and whether something between them filters connections."
            ) from error
    peer = new_peer(paired.certificate_der, paired.name, address)
    peers.add(peer)
    return peer
