"""Whether the paired machines are there: each is greeted, then asked twice a second how it is.

Both sides ask, so that each notices the other's silence by its own clock; no clock is compared with another machine's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from discovery.names import plain_text
from engine.cluster.membership.client import NobodyListens, PeerClient, Unreachable
from engine.cluster.membership.control_messages import CONTROL_PROTOCOL, Greeting, NodeLoad
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError

_log = logging.getLogger(__name__)

BEAT_S = 0.5
LOST_S = 2.5
"""A machine that was not heard of for so long is gone. One that is killed is noticed earlier: its links end."""
UNANSWERED_S = 2.5
"""A follower that calls but cannot be called for so long is of no use to its head."""
REFUSED_S = 1.0
"""One whose port nobody listens at any more is gone after so long."""
BUSY_S = 20.0
"""While its process loads a model: importing libraries can keep it from answering."""
FORMING = "forming"
"""The stage of a head that forms: it may be silent for longer."""
TOLD_S = 0.5
"""The others hear within so long that it is formed, or else by a later beat."""
BEAT_TIMEOUT_S = 1.5
HELLO_TIMEOUT_S = 2.0
RETRY_S = 1.0
"""Between two rounds of looking for a machine that is not there; news of an address cut it short."""
ASK_AGAIN_S = 10.0
"""Between two questions whether a machine that cannot be reached has forgotten this one."""
MOST_ASKED = 2
"""Addresses, the best first."""
FORGOTTEN = "It has forgotten this machine; pair the two again, or forget it here, too."
SOON_S = 0.01
MOST_ADDRESSES = 16
MOST_LASTING = 8

Connect = Callable[[str], PeerClient]


@dataclass(frozen=True)
class PeerView:
    """A paired machine as it is now. ``client`` is None while it cannot be reached."""

    node_id: str
    name: str
    alive: bool
    client: PeerClient | None
    greeting: Greeting | None
    load: NodeLoad | None
    addresses: tuple[str, ...]
    problem: str
    reachable: bool = True
    """Alive, and it answers: one that cannot be called may be heard of by its own calls all the same."""


def silence_allowed(refused: bool, patient: bool) -> float:
    """Seconds without a word after which a machine counts as lost."""
    if refused:
        return REFUSED_S
    return BUSY_S if patient else LOST_S


class PeerWatch:
    """Keeps the connection to one paired machine; a thread of its own, ended by :meth:`close`.

    ``greet`` and ``load`` make this machine's own words; ``changed`` is told when anything a screen shows is different,
    ``worked`` at which address the machine was found, and how it greeted; ``met`` who greets besides at an address that
    a person named; ``forgotten(address)`` says whether it is there and does not know this machine any more.
    """

    def __init__(
        self,
        node_id: str,
        name: str,
        connect: Connect,
        greet: Callable[[], Greeting],
        load: Callable[[], NodeLoad],
        changed: Callable[[], None],
        worked: Callable[[str, Greeting], None] = lambda address, greeting: None,
        met: Callable[[Greeting], None] = lambda greeting: None,
        forgotten: Callable[[str], bool] = lambda address: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node_id = node_id
        self.patient = False
        """More silence is allowed: it loads a model."""
        self._name = name
        self._connect = connect
        self._greet = greet
        self._load = load
        self._changed = changed
        self._worked = worked
        self._met = met
        self._forgotten = forgotten
        self._named: list[str] = []
        """Addresses that are to be greeted once more, though the machine was found at another."""
        self._clock = clock
        self._lock = threading.Lock()
        self._addresses: list[str] = []
        self._lasting: list[str] = []
        """Addresses that no hint puts out: it was found there, or a person named them."""
        self._client: PeerClient | None = None
        self._greeting: Greeting | None = None
        self._theirs: NodeLoad | None = None
        self._heard = -1e9
        self._answered = -1e9
        self._told = -1e9
        """When it was last told how this machine was."""
        self._refused = False
        self._was_alive = False
        self._problem = ""
        self._ask_again = -1e9
        self._poke = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name=f"beats-{node_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def try_addresses(self, addresses: list[str], keep: bool = False, sure: bool = False) -> None:
        """Where it may be found; of hints the newest is tried first. ``keep``: these are no hints, and none puts them
        out, however many come. ``sure``: the machine itself said so.

        Other hints are dialled only when the machine is not where it was last: who forges one sees who comes.
        """
        with self._lock:
            if keep:
                self._lasting = list(dict.fromkeys([*addresses, *self._lasting]))[:MOST_LASTING]
            fresh = [address for address in addresses if address not in self._addresses]
            if not fresh:
                return
            kept = [address for address in self._addresses if address in self._lasting]
            kept += [address for address in fresh if address in self._lasting]
            hints = [address for address in fresh + self._addresses if address not in kept]
            hints = hints[: MOST_ADDRESSES - len(kept)]
            # In turns: whoever floods the network with hints must not keep this one from where it found the machine,
            # and addresses that are no longer right must not keep it from the right one for long.
            turns = zip_longest(hints, kept) if sure else zip_longest(kept, hints)
            self._addresses = [address for turn in turns for address in turn if address is not None]
        self._poke.set()

    def heard_from(self, load: NodeLoad | None = None) -> None:
        """It called us."""
        with self._lock:
            self._heard = self._clock()
            if load is not None:
                self._theirs = load
            client = self._client
        if client is None:
            self._poke.set()

    def beat_now(self) -> float:
        """Tell it at once how this machine is. See :meth:`told_since` for what is returned."""
        now = self._clock()
        self._poke.set()
        return now

    def told_since(self, moment: float) -> bool:
        """Whether it was told how this machine is at ``moment`` or later, or cannot be told."""
        with self._lock:
            return self._client is None or self._told >= moment

    def view(self) -> PeerView:
        with self._lock:
            silent = self._clock() - self._heard
            alive = silent < silence_allowed(self._refused, self.patient) and not self._problem
            return PeerView(
                self.node_id,
                self._name,
                alive,
                self._client if alive else None,
                self._greeting,
                self._theirs,
                tuple(self._addresses),
                self._problem,
                alive and (self.patient or self._clock() - self._answered < UNANSWERED_S),
            )

    def close(self) -> None:
        self._closed = True
        self._poke.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def join(self, timeout: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _watch(self) -> None:
        while not self._closed:
            try:
                wait = self._look()
            except Exception:  # whatever a machine answers, it is asked again, and its silence is noticed
                _log.exception("a machine was not asked")
                wait = RETRY_S
            self._tell()
            self._poke.wait(wait)
            self._poke.clear()

    def _look(self) -> float:
        """Ask how the machine is, or look for it; the seconds until it is asked again."""
        client = self._client
        if client is None:
            return BEAT_S if self._find() else self._within(RETRY_S)
        self._beat(client)
        self._look_for_a_copy()
        return BEAT_S if self._client is not None else 0.0

    def _tell(self) -> None:
        alive = self.view().alive
        if alive != self._was_alive:
            self._was_alive = alive
            self._changed()

    def _within(self, seconds: float) -> float:
        """``seconds``, or less if this machine counts as lost before: that must be told then."""
        with self._lock:
            left = silence_allowed(self._refused, self.patient) - (self._clock() - self._heard)
        return seconds if left <= 0 else min(seconds, left + SOON_S)

    def _beat(self, client: PeerClient) -> None:
        now = self._clock()
        try:
            theirs = client.call("Beat", self._load(), NodeLoad, BEAT_TIMEOUT_S)
        except (Unreachable, ModelError, PeerLost) as error:
            self._drop(client, refused=isinstance(error, NobodyListens))
            return
        with self._lock:
            again = self._greeting is not None and theirs.process != self._greeting.process
            news = self._theirs is None or _shown(theirs) != _shown(self._theirs)
            self._heard, self._theirs, self._refused = self._clock(), theirs, False
            self._answered = self._heard
            self._told = now
        if again:
            # Another process answers at the same place: it has to be greeted anew.
            self._drop(client, refused=False)
        elif news:
            self._changed()

    def _look_for_a_copy(self) -> None:
        """Where a person named several addresses, another machine may answer there with the same (copied) identity.
        One address at a time, so that the beats go on."""
        with self._lock:
            address = self._named.pop() if self._named and self._client is not None else None
        if address is None:
            return
        client = self._connect(address)
        try:
            self._met(client.call("Hello", self._greet(), Greeting, BEAT_TIMEOUT_S))
        except (Unreachable, ModelError, PeerLost):
            return  # somebody else is there, or nobody
        finally:
            client.close()

    def _drop(self, client: PeerClient, refused: bool) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
            self._refused = refused
        client.close()

    def _find(self) -> bool:
        """Greet it at one address after the other."""
        with self._lock:
            addresses = list(self._addresses)
        problem = ""
        unreached: list[str] = []
        for address in addresses:
            if self._closed:
                return False
            client = self._connect(address)
            try:
                greeting = client.call("Hello", self._greet(), Greeting, self._within(HELLO_TIMEOUT_S))
                problem = self._unfit(greeting)
            except Unreachable:
                client.close()
                self._tell()
                unreached.append(address)
                continue
            except (ModelError, PeerLost) as error:
                client.close()
                problem = str(error)
                continue
            if problem:
                client.close()
                self._found(None, greeting, address, problem)
                return False
            self._found(client, greeting, address, "")
            return True
        if not problem and self._is_forgotten(unreached):
            problem = FORGOTTEN
        if problem or self._problem == FORGOTTEN:
            self._found(None, None, "", problem)
        return False

    def _is_forgotten(self, addresses: list[str]) -> bool:
        """A machine that does not let this one in may have been told to forget it; now and then it is asked."""
        now = self._clock()
        if self._problem != FORGOTTEN and now < self._ask_again:
            return False
        self._ask_again = now + ASK_AGAIN_S
        return any(not self._closed and self._forgotten(address) for address in addresses[:MOST_ASKED])

    def _found(self, client: PeerClient | None, greeting: Greeting | None, address: str, problem: str) -> None:
        with self._lock:
            if self._closed and client is not None:
                client.close()
                client = None
            news = problem != self._problem
            self._client, self._problem = client, problem
            if greeting is not None:
                self._greeting = greeting
                self._name = plain_text(greeting.name, 64) or self._name
                self._heard = self._answered = self._clock()
                self._refused = False
                own = {address, *greeting.listening}
                self._named = [other for other in self._lasting if other not in own]
            if address:
                self._addresses = [address] + [other for other in self._addresses if other != address]
                self._lasting = [address, *(other for other in self._lasting if other != address)][:MOST_LASTING]
        if client is not None and greeting is not None:
            self._worked(address, greeting)
        if news or client is not None:
            self._changed()

    def _unfit(self, greeting: Greeting) -> str:
        """Why this machine cannot be used, in a sentence; empty if it can."""
        if greeting.node_id != self.node_id:
            return "It calls itself by another node id than its certificate says; forget it and pair again."
        return version_problem(greeting, self._greet())


@contextlib.contextmanager
def patience(watches: Sequence[PeerWatch]) -> Iterator[None]:
    """Within it these machines may be silent for longer, as they load a model."""
    for watch in watches:
        watch.patient = True
    try:
        yield
    finally:
        for watch in watches:
            watch.patient = False


def version_problem(theirs: Greeting, ours: Greeting) -> str:
    """A sentence with both values if the two cannot be in a ring together; else empty. Whoever says it names the
    machine."""
    if theirs.version != ours.version:
        return (
            f"It has privatellm {plain_text(theirs.version, 32)} and this machine has {plain_text(ours.version, 32)}; "
            "install the same version on both."
        )
    if theirs.protocol != CONTROL_PROTOCOL:
        return (
            f"It speaks ring protocol {theirs.protocol} and this machine {CONTROL_PROTOCOL}; "
            "install the same version on both."
        )
    return ""


def _shown(load: NodeLoad) -> tuple[object, ...]:
    """What of a load a screen shows, coarse enough not to change all the time. Memory in steps of 1 %."""
    step = max(1, load.memory_total // 100)
    return (load.memory_free // step, load.runtime, load.lends, load.head, load.epoch, load.stage)
