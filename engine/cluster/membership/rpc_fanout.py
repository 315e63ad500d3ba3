"""Calls to several machines at once. A failure is attributed to one machine, and the waiting caller can end the
calls."""

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
"""Seconds between two reports to the waiting caller, who may end the wait at each of them."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Candidate:
    """A machine that could be in the ring."""

    node_id: str
    name: str
    client: PeerClient
    listeners: tuple[str, ...]
    process: str


class NodeRefused(Exception):
    """One node cannot be in the ring. The others may be able to form one without it. ``gone``: it does not answer."""

    def __init__(self, node_id: str, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.node_id = node_id
        self.gone = gone


def ask(machine: Candidate, call: Callable[[], Answer]) -> Answer:
    """The result of ``call``. Raises NodeRefused for every failure of the node, Cancelled."""
    try:
        return call()
    except Cancelled:
        raise
    except (PeerLost, Unreachable) as error:
        raise NodeRefused(machine.node_id, f"{error}.".replace("..", "."), gone=True) from error
    except (ModelError, DiscoveryError) as error:
        raise NodeRefused(machine.node_id, str(error)) from error


def most_likely(refused: Sequence[NodeRefused]) -> NodeRefused:
    """The most likely cause among nodes that failed at the same time.

    An unreachable node comes first, because it makes others fail. Nodes whose work was ended come last.
    """

    def order(one: NodeRefused) -> int:
        return 0 if isinstance(one.__cause__, Unreachable) else 2 if isinstance(one.__cause__, PeerLost) else 1

    return min(refused, key=order)


def check_all(asked: Iterable[Future[Any]]) -> None:
    """Raises what one of the finished ``asked`` has raised: the :func:`most_likely` cause. Does not wait."""
    failed = [error for future in asked if future.done() and (error := future.exception()) is not None]
    refused = [error for error in failed if isinstance(error, NodeRefused)]
    if refused:
        raise most_likely(refused)
    if failed:
        raise failed[0]


def connected_or_refused(future: Future[Connected]) -> Connected | NodeRefused:
    """The node's answer, or its refusal. Raises everything else that went wrong."""
    try:
        return future.result()
    except NodeRefused as refused:
        return refused


def until_done(asked: Collection[Future[Any]], notify: Callable[[], None]) -> None:
    """Wait for all of ``asked`` and call ``notify`` meanwhile.

    Raises as :func:`check_all` as soon as one has failed, and what ``notify`` raises.
    """
    while True:
        check_all(asked)
        if all(future.done() for future in asked):
            return
        notify()
        wait(asked, POLL_S, FIRST_EXCEPTION)


@contextlib.contextmanager
def stopped_by(notify: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Let ``notify`` end the work inside, which cannot check for itself.

    Another thread calls ``notify`` meanwhile. If that raises, the thread calls ``stop``, which must make the work fail.
    The exception of ``notify`` is then raised instead of that failure.
    """
    over = threading.Event()
    raised: list[BaseException] = []

    def watch() -> None:
        while not over.wait(POLL_S):
            try:
                notify()
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
