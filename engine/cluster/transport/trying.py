"""Whether a link to another node can be made now: tried at all of its addresses at once, and closed again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from discovery.errors import DiscoveryError
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import parse_address
from engine.cluster.transport.connecting import dial_link
from engine.cluster.transport.epochs import HANDSHAKE_S, Epoch, Member
from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.errors import ModelError

TAKEN_S = 2.0
"""A connection is taken within so long, or not at all: the kernel takes it, however busy the program is, and after a
lost packet asks once more within a second."""
LATER_S = 0.15
"""By which each further address is tried later, so that of those that work the first is taken."""
AGAIN_S = 0.1
REFUSED_S = 2.0
"""A link that is closed again is asked for again, for so long: the other node may not know yet who will come."""
MOST_TRIED = 8
"""Addresses."""


def try_link(links: Links, epoch: str, member: Member, addresses: Sequence[str], stop: threading.Event) -> str:
    """The first of ``addresses`` (of its door, the best first) at which ``member`` takes a link for a measurement.

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
    """Tries one link at several addresses, each from a thread of its own. ``over``: one of them has it."""

    def __init__(self, links: Links, epoch: Epoch, member: Member, stop: threading.Event) -> None:
        self.over = threading.Event()
        self._links = links
        self._epoch = epoch
        self._member = member
        self._stop = stop

    def at(self, address: str, later: float) -> tuple[str, str]:
        """``address``, and why it does not work there; empty: it does."""
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
