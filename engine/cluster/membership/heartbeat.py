"""The heartbeat: each paired machine is greeted, and then asked for its state twice a second.

Both sides ask, so each notices the other's silence by its own clock. Clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

from discovery.addresses import shown_address
from discovery.names import plain_text
from engine.cluster.membership.client import NobodyListens, NotInTime, PeerClient, Unreachable
from engine.cluster.membership.control_messages import CONTROL_PROTOCOL, Greeting, NodeLoad
from engine.cluster.parts import THE_PRODUCT, TimeConstants
from engine.cluster.transport.addresses import parse_address
from engine.cluster.transport.exchange import PeerLost
from engine.errors import ModelError

_log = logging.getLogger(__name__)

BUSY_S = 20.0
"""Seconds of silence allowed while a process loads a model: importing libraries can keep it from answering."""
FORMING = "forming"
"""Stage of a head that forms a ring. It may be silent for longer."""
NOTIFIED_S = 0.5
"""Maximum seconds for notifying the others that the ring is formed. Later heartbeats report it otherwise."""
HEARTBEAT_TIMEOUT_S = 1.5
HELLO_TIMEOUT_S = 2.0
PATH_S = 0.3
"""Timeout in seconds of a connection that finds out whether a path leads to a machine. The system there accepts it
however busy the program is."""
ASK_AGAIN_S = 10.0
"""Seconds between two questions to an unreachable machine whether it has forgotten this one."""
MOST_ASKED = 2
"""Maximum addresses at which that question is asked, the best first."""
FORGOTTEN = "It has forgotten this machine; pair the two again, or forget it here, too."
COPIED = (
    "Another machine has a copy of its identity and is left out; run `privatellm peers new-identity` on one of the two "
    "and pair it again. If only the other one is left, forget this machine here and pair the two again."
)
SOON_S = 0.01
STALLED_S = 1.0
"""Seconds by which a look at a machine may be late before this process itself counts as stalled."""
MOST_PATHS = 4
"""Maximum other addresses at which a machine is looked for whose path broke, before it counts as lost."""
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
    """Alive, and it answers. A machine that cannot be called may still call this one."""


def leads_there(address: str) -> bool:
    """Whether somebody listens at ``address`` (``HOST:PORT``)."""
    try:
        socket.create_connection(parse_address(address), PATH_S).close()
    except (OSError, ModelError):
        return False
    return True


def silence_allowed(refused: bool, tolerant: bool, times: TimeConstants = THE_PRODUCT.times) -> float:
    """Seconds of silence after which a machine counts as lost."""
    if refused:
        return times.refused_s
    return BUSY_S if tolerant else times.lost_s


class PeerWatch:
    """Keeps the connection to one paired machine in a thread of its own, which :meth:`close` ends.

    ``greet`` and ``load`` make this machine's own messages. ``changed`` is called when anything a screen shows is
    different. ``worked`` gets the address at which the machine was found, and its greeting. ``met`` gets the greeting
    of another machine at an address that a person named. ``forgotten(address)`` returns whether the machine is there
    and does not know this one any more. ``is_copy`` returns whether another machine greets that has a copy of the
    identity.
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
        is_copy: Callable[[Greeting], bool] = lambda greeting: False,
        clock: Callable[[], float] = time.monotonic,
        times: TimeConstants = THE_PRODUCT.times,
    ) -> None:
        self.node_id = node_id
        self.tolerant = False
        """Whether more silence is allowed because the machine loads a model."""
        self._name = name
        self._connect = connect
        self._greet = greet
        self._load = load
        self._changed = changed
        self._worked = worked
        self._met = met
        self._forgotten = forgotten
        self._is_copy = is_copy
        self._named: list[str] = []
        """Addresses that are still to be greeted once, although the machine was found at another one."""
        self._clock = clock
        self._times = times
        self._lock = threading.Lock()
        self._addresses: list[str] = []
        self._lasting: list[str] = []
        """Addresses that hints never displace: the machine was found there, or a person named them."""
        self._client: PeerClient | None = None
        self._former: PeerClient | None = None
        """The connection before the last move, which calls may still use."""
        self._path = ""
        """Address by which the heartbeats are to go from the next one on."""
        self._heard_from = ""
        """Address of the machine's control port by its last heartbeat."""
        self._followed = ""
        """Address at which it was looked for because its heartbeats came from there. That is done once."""
        self._apart: list[PeerClient] = []
        """Connections that :meth:`apart` made."""
        self._greeting: Greeting | None = None
        self._theirs: NodeLoad | None = None
        self._last_contact = -1e9
        self._answered = -1e9
        self._last_sent = -1e9
        """Time of the last heartbeat that the machine answered."""
        self._refused = False
        self._looked = clock()
        """Time of the last look at the silence, or until which the heartbeats were waiting by plan."""
        self._was_alive = False
        self._problem = ""
        self._ask_again = -1e9
        self._poke = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name=f"heartbeat-{node_id[:8]}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def try_addresses(self, addresses: list[str], keep: bool = False, sure: bool = False) -> None:
        """Add addresses at which the machine may be found. The newest hint is tried first.

        ``keep``: these are not hints, and hints never displace them. ``sure``: the machine itself named them.
        Other hints are dialled only if the machine is not at its last address, because a forged hint reveals who dials.
        """
        with self._lock:
            if keep:
                self._lasting = list(dict.fromkeys([*addresses, *self._lasting]))[:MOST_LASTING]
            fresh = [address for address in addresses if address not in self._addresses]
            if not fresh:
                return
            lasting = [address for address in self._addresses if address in self._lasting]
            lasting += [address for address in fresh if address in self._lasting]
            hints = [address for address in fresh + self._addresses if address not in lasting]
            hints = hints[: MOST_ADDRESSES - len(lasting)]
            # Hints and kept addresses alternate: a flood of hints must not displace the address that worked, and old
            # addresses must not delay the right one for long.
            turns = zip_longest(hints, lasting) if sure else zip_longest(lasting, hints)
            self._addresses = [address for turn in turns for address in turn if address is not None]
        self._poke.set()

    def is_another(self, process: str) -> bool:
        """Whether the connection is to another process than ``process``, as with a copied identity."""
        with self._lock:
            return self._client is not None and self._greeting is not None and self._greeting.process != process

    def go_over(self, address: str) -> None:
        """Send heartbeats to ``address`` from now on if the connected machine is there, as the ring's links do."""
        with self._lock:
            if self._client is None or self._client.address == address:
                return
            self._path = address
        self._poke.set()

    def follow(self) -> None:
        """Heartbeats go where those of the machine come from."""
        with self._lock:
            address = self._heard_from
            if self._client is None or address in ("", self._followed):
                return
            self._followed = address
        self.go_over(address)

    def heard_from(self, ip: str) -> None:
        """A heartbeat of the connected machine came from ``ip``."""
        with self._lock:
            if self._greeting is not None:
                self._heard_from = shown_address(ip, self._greeting.port)

    def record_contact(self, load: NodeLoad | None = None) -> None:
        """The machine called this one, or answered.

        A load of another process than the connected one is left out. A copy or a successor is taken only when the
        connected process has ended.
        """
        if load is not None and self.is_another(load.process):
            return
        with self._lock:
            self._last_contact = self._clock()
            if load is not None and self._is_newer(load):
                self._theirs = load
            client = self._client
        if client is None:
            self._poke.set()

    def send_heartbeats(self) -> float:
        """Send a heartbeat at once. Returns the moment for :meth:`notified_since`."""
        now = self._clock()
        self._poke.set()
        return now

    def notified_since(self, moment: float) -> bool:
        """Whether it answered a heartbeat sent at ``moment`` or later, or cannot be reached."""
        with self._lock:
            return self._client is None or self._last_sent >= moment

    def answered_since(self, moment: float) -> bool:
        """Whether the connected machine answered a heartbeat sent at ``moment`` or later."""
        with self._lock:
            return self._client is not None and self._last_sent >= moment

    @property
    def nobody_listens(self) -> bool:
        """Whether the machine's program has ended, as far as its address tells."""
        with self._lock:
            return self._refused

    def view(self) -> PeerView:
        with self._lock:
            silent = self._silence()
            alive = silent < silence_allowed(self._refused, self.tolerant, self._times) and not self._problem
            return PeerView(
                self.node_id,
                self._name,
                alive,
                self._client if alive else None,
                self._greeting,
                self._theirs,
                tuple(self._addresses),
                self._problem,
                alive and (self.tolerant or self._clock() - self._answered < self._times.unanswered_s),
            )

    def apart(self, client: PeerClient) -> PeerClient:
        """A connection like ``client`` for calls that no failed heartbeat may end. Whoever asks closes it;
        :meth:`close` does so, too."""
        made = client.apart()
        with self._lock:
            self._apart = [one for one in self._apart if not one.closed] + [made]
        if self._closed:
            made.close()
        return made

    def close(self) -> None:
        self._closed = True
        self._poke.set()
        with self._lock:
            clients = [*self._apart, *(one for one in (self._client, self._former) if one is not None)]
            self._client = self._former = None
        for one in clients:
            one.close()

    def join(self, timeout: float) -> None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _watch(self) -> None:
        while not self._closed:
            try:
                wait = self._look()
            except Exception:  # whatever a machine answers, the next heartbeat is sent, and its silence is noticed
                _log.exception("a machine was not asked")
                wait = self._times.retry_s
            self._notify_if_changed()
            begun = self._clock()
            self._poke.wait(wait)
            self._poke.clear()
            with self._lock:
                self._looked = max(self._looked, min(self._clock(), begun + wait))
                self._silence()

    def _look(self) -> float:
        """Send a heartbeat, or look for the machine. Returns the seconds until the next one."""
        client = self._client
        if client is None:
            return self._times.heartbeat_s if self._find() else self._within(self._times.retry_s)
        with self._lock:
            path, self._path = self._path, ""
        if path:
            self._move([path])
        client = self._client or client
        self._send_heartbeat(client)
        self._look_for_a_copy()
        return self._times.heartbeat_s if self._client is not None else 0.0

    def _notify_if_changed(self) -> None:
        with self._lock:
            self._looked = self._clock()  # a call that takes until its timeout is no stall
        alive = self.view().alive
        if alive != self._was_alive:
            self._was_alive = alive
            self._changed()

    def _silence(self) -> float:
        """Seconds since the last contact, without those in which this process was stalled. The lock must be held.

        A stalled process cannot tell whether the others were silent: what they sent still waits to be read.
        """
        now = self._clock()
        stalled = max(0.0, now - self._looked - STALLED_S)
        self._looked = now
        self._last_contact = min(now, self._last_contact + stalled)
        self._answered = min(now, self._answered + stalled)
        return now - self._last_contact

    def _is_newer(self, load: NodeLoad) -> bool:
        """Whether ``load`` was made after the one known. A heartbeat may arrive after the answer to a later one."""
        known = self._theirs
        return known is None or known.process != load.process or known.number <= load.number

    def _within(self, seconds: float) -> float:
        """``seconds``, or less if the machine counts as lost earlier, because that must be reported then."""
        with self._lock:
            self._looked = self._clock()
            left = silence_allowed(self._refused, self.tolerant, self._times) - self._silence()
        return seconds if left <= 0 else min(seconds, left + SOON_S)

    def _send_heartbeat(self, client: PeerClient) -> None:
        now = self._clock()
        try:
            answer = client.call("Beat", self._load(), NodeLoad, self._within(HEARTBEAT_TIMEOUT_S))
        except NotInTime:
            # Weights may be on their way over the same connection, and a silence that is not a loss must not end them.
            if not self._may_still_answer():
                self._drop(client, refused=False)
            else:
                self._look_elsewhere(client.address)
            return
        except (Unreachable, ModelError, PeerLost) as error:
            self._drop(client, refused=isinstance(error, NobodyListens))
            return
        with self._lock:
            again = self._greeting is not None and answer.process != self._greeting.process
            news = self._theirs is None or _shown(answer) != _shown(self._theirs)
            self._last_contact, self._refused = self._clock(), False
            if self._is_newer(answer):
                self._theirs = answer
            self._answered = self._last_contact
            self._last_sent = now
        if again:
            # Another process answers at the same address. It must be greeted anew.
            self._drop(client, refused=False)
        elif news:
            self._changed()

    def _look_elsewhere(self, address: str) -> None:
        """Try the machine's other addresses if ``address`` cannot be reached any more."""
        with self._lock:
            others = [other for other in self._addresses if other != address][:MOST_PATHS]
        if others:
            with ThreadPoolExecutor(1 + len(others), thread_name_prefix="looking for a path") as pool:
                here, *found = pool.map(leads_there, [address, *others])
            if not here:
                self._move([other for other, leads in zip(others, found, strict=True) if leads])

    def _move(self, addresses: Sequence[str]) -> None:
        """Go on at the first of ``addresses`` at which the connected process answers, if there is one."""
        for address in addresses:
            client = self._connect(address)
            try:
                greeting = client.call("Hello", self._greet(), Greeting, self._within(HEARTBEAT_TIMEOUT_S))
            except (Unreachable, ModelError, PeerLost):
                client.close()
                continue
            with self._lock:
                same = self._greeting is not None and greeting.process == self._greeting.process
                moved = same and self._client is not None and not self._closed
                if moved:
                    over, self._former, self._client = self._former, self._client, client
                    self._last_contact = self._answered = self._clock()
                    self._addresses = [address] + [other for other in self._addresses if other != address]
            if moved:
                if over is not None:
                    over.close()
                return
            client.close()

    def _may_still_answer(self) -> bool:
        """Whether the machine was heard lately, if only by its own calls."""
        with self._lock:
            heard = self._silence() < silence_allowed(self._refused, self.tolerant, self._times)
            return heard and self._clock() - self._answered < BUSY_S

    def _look_for_a_copy(self) -> None:
        """Greet one more address that a person named: another machine may answer there with the same copied identity.

        One address at a time, so that heartbeats go on.
        """
        with self._lock:
            address = self._named.pop() if self._named and self._client is not None else None
        if address is None:
            return
        client = self._connect(address)
        try:
            self._met(client.call("Hello", self._greet(), Greeting, HEARTBEAT_TIMEOUT_S))
        except (Unreachable, ModelError, PeerLost):
            return  # another machine is there, or none
        finally:
            client.close()

    def _drop(self, client: PeerClient, refused: bool) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
            self._refused = refused
            former, self._former = self._former, None
        client.close()
        if former is not None:
            former.close()

    def _find(self) -> bool:
        """Greet the machine at one address after the other. Returns whether it was found."""
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
                problem = COPIED if self._is_copy(greeting) else self._unfit(greeting)
            except Unreachable:
                client.close()
                self._notify_if_changed()
                unreached.append(address)
                continue
            except (ModelError, PeerLost) as error:
                client.close()
                problem = str(error)
                continue
            if problem == COPIED:
                client.close()
                continue  # the machine itself may be at another address
            if problem:
                client.close()
                self._found(None, greeting, address, problem)
                return False
            self._found(client, greeting, address, "")
            return True
        if not problem and self._is_forgotten(unreached):
            problem = FORGOTTEN
        if problem or self._problem in (FORGOTTEN, COPIED):
            self._found(None, None, "", problem)
        return False

    def _is_forgotten(self, addresses: list[str]) -> bool:
        """Whether the machine has forgotten this one, which is asked now and then while it cannot be reached."""
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
                self._last_contact = self._answered = self._clock()
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
        """A sentence on why the machine cannot be used; empty if it can."""
        if greeting.node_id != self.node_id:
            return "It calls itself by another node id than its certificate says; forget it and pair again."
        return version_problem(greeting, self._greet())


@contextlib.contextmanager
def tolerate_silence(watches: Sequence[PeerWatch]) -> Iterator[None]:
    """Allow these machines more silence inside, because they load a model or receive one."""
    before = [watch.tolerant for watch in watches]
    for watch in watches:
        watch.tolerant = True
    try:
        yield
    finally:
        for watch, was in zip(watches, before, strict=True):
            watch.tolerant = was


def version_problem(peer: Greeting, ours: Greeting) -> str:
    """A sentence with both values if the two machines cannot be in a ring together; else empty.

    The caller adds the machine's name.
    """
    if peer.version != ours.version:
        return (
            f"It has privatellm {plain_text(peer.version, 32)} and this machine has {plain_text(ours.version, 32)}; "
            "install the same version on both."
        )
    if peer.protocol != CONTROL_PROTOCOL:
        return (
            f"It speaks ring protocol {peer.protocol} and this machine {CONTROL_PROTOCOL}; "
            "install the same version on both."
        )
    return ""


def _shown(load: NodeLoad) -> tuple[object, ...]:
    """The parts of a load that a screen shows, coarse enough not to change all the time. Memory in steps of 1 %."""
    step = max(1, load.memory_total // 100)
    return (load.memory_free // step, load.runtime, load.lends, load.head, load.epoch, load.stage)
