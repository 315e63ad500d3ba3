"""Following the followers' progress while they load their shards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from discovery.names import plain_text
from engine.cluster.membership.client import AnswerStream
from engine.cluster.membership.control_messages import Forming, LoadShard
from engine.cluster.membership.rpc_fanout import Candidate, ask, check_all
from engine.cluster.transport.exchange import PeerLost
from engine.ipc.messages.ring import ExchangeName
from engine.ipc.progress import ProgressCallback

POLL_S = 0.1
"""Seconds between two progress reports."""
Loaded = TypeVar("Loaded")
SHOWN_NOTICES = 3
"""Maximum notices shown of one node, as a node may send any number."""


class LoadingNodes:
    """The loading of ``followers`` (by rank), each of which is followed in its own thread.

    ``on_alive`` is called with the node id whenever a follower reports.
    """

    def __init__(
        self,
        followers: Mapping[int, Candidate],
        epoch: str,
        exchange: ExchangeName,
        on_alive: Callable[[str], None],
    ) -> None:
        self._followers = followers
        self._on_alive = on_alive
        self._wanted = LoadShard(epoch=epoch, exchange=exchange)
        self._calls: list[AnswerStream[Forming]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._stages: dict[int, Forming] = {}

    def beside(
        self, load_here: Callable[[ProgressCallback], Loaded], progress: ProgressCallback
    ) -> tuple[Loaded, dict[int, Forming]]:
        """Have all followers load while ``load_here`` does. Returns what that returns, and the final report of each.

        Raises NodeRefused as soon as one fails, and what ``load_here`` or ``progress`` raises.
        """
        with ThreadPoolExecutor(len(self._followers), thread_name_prefix="loading nodes") as pool:
            asked = {rank: pool.submit(self._follow, rank) for rank in self._followers}
            try:
                loaded = load_here(self._noticing(asked, progress))
                self._wait(asked, progress)
            except BaseException:
                self._cancel()
                raise
        return loaded, {rank: one.result() for rank, one in asked.items()}

    def _follow(self, rank: int) -> Forming:
        """Have a follower load its shard. Returns its final report. Raises NodeRefused."""
        machine = self._followers[rank]

        def run() -> Forming:
            call = machine.client.stream("Form", self._wanted, Forming)
            with self._lock:
                self._calls.append(call)
                stopped = self._stopped
            if stopped:
                call.cancel()
            for news in call:
                self._stages[rank] = news
                self._on_alive(machine.node_id)
                if news.ready:
                    return news
            raise PeerLost("it stopped loading its share without giving a reason")

        return ask(machine, run)

    def _wait(self, asked: Mapping[int, Future[Forming]], progress: ProgressCallback) -> None:
        """Wait until all are ready. Raises NodeRefused as soon as one fails, and what ``progress`` raises."""
        noticing = self._noticing(asked, progress)
        for rank, future in asked.items():
            while not future.done():
                news = self._stages.get(rank)
                stage = f"{self._followers[rank].name}: {plain_text(news.stage, 100) if news else 'loading'}"
                noticing(stage, news.done if news else 0, news.total if news else 0, news.unit if news else "")
                time.sleep(POLL_S)
        check_all(asked.values())

    def _noticing(self, asked: Mapping[int, Future[Forming]], progress: ProgressCallback) -> ProgressCallback:
        """``progress``, wrapped to raise NodeRefused if a follower has failed meanwhile."""

        def checked(stage: str, done: int, total: int, unit: str) -> None:
            check_all(asked.values())
            progress(stage, done, total, unit)

        return checked

    def _cancel(self) -> None:
        """End all calls. Thread-safe."""
        with self._lock:
            self._stopped = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()


def notices_of(name: str, notices: Sequence[str]) -> list[str]:
    """A line for each of the first :data:`SHOWN_NOTICES` notices of the node ``name``, and one with the number of the
    others."""
    lines = [f"{name}: {plain_text(line)}" for line in notices[:SHOWN_NOTICES]]
    more = len(notices) - len(lines)
    return [*lines, f"{name}: and {more} more"] if more else lines
