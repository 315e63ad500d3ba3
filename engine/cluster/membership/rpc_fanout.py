"""Asking several machines at once: what goes wrong is told as the fault of one, and whoever waits can end it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from discovery.errors import DiscoveryError
from engine.cluster.membership.client import PeerClient, Unreachable
from engine.cluster.membership.control_messages import Connected
from engine.cluster.transport.exchange import PeerLost
from engine.errors import Cancelled, ModelError

POLL_S = 0.1
"""Between two words to whoever waits: within so long it can end the waiting."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Candidate:
    """A machine that could be in the ring."""

    node_id: str
    name: str
    client: PeerClient
    doors: tuple[str, ...]
    process: str


class NodeRefused(Exception):
    """One node cannot be in the ring; the others perhaps can do without it. ``gone``: it does not answer."""

    def __init__(self, node_id: str, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.node_id = node_id
        self.gone = gone


def ask(one: Candidate, call: Callable[[], Answer]) -> Answer:
    """``call``, with whatever goes wrong as this node's. Raises NodeRefused, Cancelled."""
    try:
        return call()
    except Cancelled:
        raise
    except (PeerLost, Unreachable) as error:
        raise NodeRefused(one.node_id, f"{error}.".replace("..", "."), gone=True) from error
    except (ModelError, DiscoveryError) as error:
        raise NodeRefused(one.node_id, str(error)) from error


def most_likely(refused: Sequence[NodeRefused]) -> NodeRefused:
    """Of several that failed at the same time: one that cannot be reached, because others fail for its sake; last of
    all those whose work was ended."""

    def order(one: NodeRefused) -> int:
        return 0 if isinstance(one.__cause__, Unreachable) else 2 if isinstance(one.__cause__, PeerLost) else 1

    return min(refused, key=order)


def check_all(asked: Iterable[Future[Any]]) -> None:
    """Raises what one of ``asked`` that are done has raised, :func:`most_likely` the cause; waits for nothing."""
    failed = [error for future in asked if future.done() and (error := future.exception()) is not None]
    refused = [error for error in failed if isinstance(error, NodeRefused)]
    if refused:
        raise most_likely(refused)
    if failed:
        raise failed[0]


def connected_or_refused(future: Future[Connected]) -> Connected | NodeRefused:
    """How the node connected, or that the node refused; raises whatever else went wrong."""
    try:
        return future.result()
    except NodeRefused as refused:
        return refused


def until_done(asked: Collection[Future[Any]], tell: Callable[[], None]) -> None:
    """Wait for all of ``asked``, calling ``tell`` meanwhile. Raises as :func:`check_all` as soon as one has failed, and
    what ``tell`` raises."""
    while True:
        check_all(asked)
        if all(future.done() for future in asked):
            return
        tell()
        wait(asked, POLL_S, FIRST_EXCEPTION)


@contextlib.contextmanager
def stopped_by(tell: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Around work that cannot ask for itself: another thread calls ``tell`` meanwhile. If that raises, it calls
    ``stop``, which must make the work fail; what was raised is raised in the place of that failure."""
    over = threading.Event()
    raised: list[BaseException] = []

    def watch() -> None:
        while not over.wait(POLL_S):
            try:
                tell()
            except BaseException as error:
                raised.append(error)
                stop()
                return

    watching = threading.Thread(target=watch, name="asking whether to stop", daemon=True)
    watching.start()
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    over.set()
    watching.join()
    if raised:
        raise raised[0] from failure
    if failure is not None:
        raise failure
