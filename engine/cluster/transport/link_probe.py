"""Trying and measuring a link between two machines, over a separate connection.

The dialler asks, and the acceptor answers: it returns frames unchanged, or counts their bytes up to the last one.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from discovery.errors import DiscoveryError
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import parse_address
from engine.cluster.transport.connecting import dial_link
from engine.cluster.transport.epochs import CONNECT_S, HANDSHAKE_S, Epoch, Member
from engine.cluster.transport.exchange import Link, PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import FramedLink
from engine.errors import ModelError

ECHO_BYTES = 12 * 1024
"""Bytes of one exchange of a decoding step of the paper's model and size."""
ROUNDS = 30
WARM_ROUNDS = 5
PAUSE_S = 0.0005
"""Seconds of pause before each round. Between the exchanges of a step both ends wait for a layer's experts, and an end
that must wake up answers later than one that is still awake."""
PIECE_BYTES = 1 << 18
MOST_BYTES = 32 << 20
_LARGEST = PIECE_BYTES + 1
_MOST_ECHOES = 1000
_ECHO, _COUNT, _TOTAL = b"e", b"c", b"t"


@dataclass(frozen=True)
class LinkSpeed:
    """A measured link. ``latency_s``: half the median round trip of 12 KiB. ``bytes_per_s``: rate of the dialler's
    payload in one direction."""

    latency_s: float
    bytes_per_s: float
    address: str = ""


def measure_link(links: Links, epoch: Epoch, member: Member, address: str, seconds: float = CONNECT_S) -> LinkSpeed:
    """Measure the link to ``member`` through its link listener at ``address`` (``HOST:PORT``).

    ``epoch`` need not exist on the other side, but that side must know this node's certificate. Raises ModelError
    (network).
    """
    try:
        framed = dial_link(links, epoch, member, "measure", "tls", address, time.monotonic() + seconds)
        link = FramedLink(framed)
        try:
            return LinkSpeed(
                measure_latency(link), measure_bandwidth(link, most_seconds=links.parts.effort.link_s), address
            )
        finally:
            link.close()
    except (PeerLost, RingProtocolError, DiscoveryError, OSError) as error:
        raise ModelError(f"The link to {member.called} at {address} cannot be measured: {error}", "network") from None


def measure_latency(link: Link, nbytes: int = ECHO_BYTES, rounds: int = ROUNDS) -> float:
    """Half the median round trip of ``nbytes`` in seconds. Raises PeerLost, RingProtocolError."""
    payload = bytes(nbytes)
    times = []
    for _ in range(WARM_ROUNDS + rounds):
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        link.send(_ECHO, payload)
        if len(link.receive(nbytes)) != nbytes:
            raise RingProtocolError("A measured link gave back something else.", kind="network")
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_ROUNDS:]) / 2


def measure_bandwidth(link: Link, most_bytes: int = MOST_BYTES, most_seconds: float = 0.3) -> float:
    """Bytes per second to the other side, measured with at most that many bytes or seconds. Raises PeerLost,
    RingProtocolError."""
    piece = bytes(PIECE_BYTES)
    sent = 0
    began = time.perf_counter()
    while sent < most_bytes and time.perf_counter() - began < most_seconds:
        link.send(_COUNT, piece)
        sent += PIECE_BYTES
    link.send(_TOTAL)
    counted = int.from_bytes(link.receive(8), "big")
    if counted != sent:
        raise RingProtocolError(f"{counted} of {sent} bytes arrived on a measured link.", kind="network")
    return sent / (time.perf_counter() - began)


def answer_measuring(link: Link) -> None:
    """Answer measurements until the link ends. Raises PeerLost (the usual end), RingProtocolError."""
    counted = echoes = 0
    while counted <= MOST_BYTES and echoes <= _MOST_ECHOES:
        frame = link.receive(_LARGEST)
        kind, payload = bytes(frame[:1]), frame[1:]
        if kind == _ECHO:
            echoes += 1
            link.send(payload)
        elif kind == _COUNT:
            counted += len(payload)
        elif kind == _TOTAL:
            link.send(counted.to_bytes(8, "big"))
            counted = 0
        else:
            raise RingProtocolError("A measured link carried something else.", kind="network")


# --- links that are only tried ---------------------------------------------------------------------------------------

TAKEN_S = 2.0
"""Timeout in seconds of a connection. The kernel accepts it however busy the program is, and repeats after a lost
packet within a second."""
LATER_S = 0.15
"""Seconds by which each further address is tried later, so that the first working one is used."""
AGAIN_S = 0.1
REFUSED_S = 2.0
"""Seconds for which a link that is closed again is asked for again: the other node may not know yet who will come."""
MOST_TRIED = 8
"""Maximum addresses that are tried."""


def try_link(links: Links, epoch: str, member: Member, addresses: Sequence[str], stop: threading.Event) -> str:
    """The first of ``addresses`` of its link listener, the best first, at which ``member`` accepts a link for a
    measurement.

    Ends when ``stop`` is set. Raises ModelError (network) with the reason alone, without the member's name.
    """
    tried = list(dict.fromkeys(addresses))[:MOST_TRIED]
    if not tried:
        raise ModelError("it has no address", kind="network")
    here = Member(0, links.identity.node_id, links.identity.certificate_pem)
    attempt = _Attempt(links, Epoch(epoch, 0, (here, member), b""), member, stop)
    pool = ThreadPoolExecutor(len(tried), thread_name_prefix="trying a link")
    try:
        waiting = {pool.submit(attempt.at, address, LATER_S * index) for index, address in enumerate(tried)}
        reasons = []
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                address, reason = future.result()
                if not reason:
                    return address
                reasons.append(f"{address}: {reason}")
        raise ModelError(", ".join(reasons), kind="network")
    finally:
        attempt.over.set()
        pool.shutdown(wait=False, cancel_futures=True)


class _Attempt:
    """Tries one link at several addresses, each in its own thread. ``over`` is set when one of them works."""

    def __init__(self, links: Links, epoch: Epoch, member: Member, stop: threading.Event) -> None:
        self.over = threading.Event()
        self._links = links
        self._epoch = epoch
        self._member = member
        self._stop = stop

    def at(self, address: str, later: float) -> tuple[str, str]:
        """``address``, and why it does not work there; empty if it works."""
        if self.over.wait(later):
            return address, "not tried"
        try:
            socket.create_connection(parse_address(address), TAKEN_S).close()
        except (OSError, ModelError) as error:
            return address, getattr(error, "strerror", None) or str(error)
        taken = time.monotonic()
        by = taken + HANDSHAKE_S
        while True:
            try:
                dial_link(self._links, self._epoch, self._member, "measure", "tls", address, by).close()
                return address, ""
            except (PeerLost, RingProtocolError, DiscoveryError, OSError) as error:
                late = time.monotonic() >= taken + REFUSED_S
                if late or self._stop.is_set() or self.over.wait(AGAIN_S):
                    return address, str(error).rstrip(".")
