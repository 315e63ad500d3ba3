"""Sending the nodes of a ring the weights that they lack of their shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from engine.cluster.membership.client import CallGroup
from engine.cluster.membership.control_messages import PIECE_BYTES, DataPiece, Received, Wants
from engine.cluster.membership.rpc_fanout import Candidate, NodeRefused, ask, until_done
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.weights.source import Source, SourceFailed
from engine.cluster.weights.transfer import Offer, decode_wanted, encode_offer
from engine.errors import Cancelled, ModelError
from engine.ipc.progress import ProgressCallback
from engine.planning.ring_plan import RingDecision

OFFER_S = 600.0
"""Timeout in seconds for the answer to an offer. A node with a whole copy of the model reads it once to compare."""
SURE_S = 3.0
"""Seconds of sending after which the remaining time is estimated."""


class ShardUpload:
    """Sends the shards that ``decision`` assigns to ``followers`` (by rank), from ``source``."""

    def __init__(self, source: Source, decision: RingDecision, followers: Mapping[int, Candidate]) -> None:
        assert decision.placement is not None
        self._source = source
        self._placement = decision.placement
        self._trunk = decision.mode != "central"
        self._followers = followers
        self._calls = CallGroup()
        self._lock = threading.Lock()
        self._sent = self._to_send = 0
        self._began = 0.0

    def send(self, progress: ProgressCallback) -> dict[int, int]:
        """Send everything that is missing. Returns, per rank, the bytes that the node already had.

        A node keeps what it received, which is not sent again. Raises NodeRefused, ModelError, and Cancelled from
        ``progress``.
        """
        offers = {rank: self._offer(rank) for rank in self._followers}
        with ThreadPoolExecutor(len(self._followers), thread_name_prefix="sending weights") as pool:
            try:
                wants = {rank: pool.submit(self._compare, rank, offers[rank]) for rank in self._followers}
                until_done(wants.values(), lambda: progress("comparing weights", 0, 0, ""))
                wants_by_rank = {rank: future.result() for rank, future in wants.items()}
                self._to_send = sum(want.nbytes for want in wants_by_rank.values())
                sending = [
                    pool.submit(self._deliver, rank, offers[rank], wants_by_rank[rank]) for rank in self._followers
                ]
                until_done(sending, lambda: progress(self._doing(wants_by_rank), self._sent, self._to_send, "bytes"))
            except BaseException:
                self._calls.end()
                raise
        return {rank: want.has_bytes for rank, want in wants_by_rank.items()}

    def _doing(self, wants: Mapping[int, Wants]) -> str:
        """The stage as shown, such as ``sending weights to studio, attic · 40 s left``."""
        names = [one.name for rank, one in self._followers.items() if wants[rank].nbytes]
        text = f"sending weights to {', '.join(names)}" if names else "sending weights"
        if not self._sent:
            self._began = time.monotonic()
            return text
        took = time.monotonic() - self._began
        left = took * (self._to_send - self._sent) / self._sent
        if took < SURE_S or left < 1:
            return text
        return f"{text} · {round(left)} s left" if left < 90 else f"{text} · {round(left / 60)} min left"

    def _offer(self, rank: int) -> Offer:
        held = {layer: self._placement.held(rank, layer) for layer in self._placement.layers}
        return self._source.offered.part(held, self._trunk)

    def _compare(self, rank: int, offered: Offer) -> Wants:
        one = self._followers[rank]
        data = encode_offer(offered)
        pieces = [DataPiece(data=data[start : start + PIECE_BYTES]) for start in range(0, len(data), PIECE_BYTES)]
        return ask(one, lambda: one.client.upload("Offer", pieces, Wants, self._calls, OFFER_S))

    def _deliver(self, rank: int, offered: Offer, wants: Wants) -> None:
        """Send a node the items it wants. Raises NodeRefused, and ModelError if an item is not available."""
        machine = self._followers[rank]
        failed: list[ModelError | SourceFailed] = []

        def pieces() -> Iterator[DataPiece]:
            try:
                for chunk in self._source.chunks(offered, decode_wanted(wants.wanted), self._check):
                    yield DataPiece(data=chunk)
                    with self._lock:
                        self._sent += len(chunk)
            except (ModelError, SourceFailed) as error:
                failed.append(error)
                raise

        while wants.nbytes:
            try:
                ask(machine, lambda: machine.client.upload("Receive", pieces(), Received, self._calls))
                return
            except SourceFailed:
                # The node kept what it received; another source has the rest.
                wants = self._compare(rank, offered)
            except NodeRefused:
                if failed and not isinstance(failed[0], RingProtocolError):
                    # The source failed, not that machine.
                    raise failed[0] from None
                raise

    def _check(self) -> None:
        """Raises Cancelled once sending was stopped."""
        if self._calls.ended.is_set():
            raise Cancelled("Sending weights was stopped.")
