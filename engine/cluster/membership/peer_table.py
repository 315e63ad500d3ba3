"""The machines this node knows of: paired ones with their connections, and others that only announce themselves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from discovery.acquaintance import is_known
from discovery.addresses import shown_address
from discovery.errors import DiscoveryError
from discovery.identity import Identity, fingerprint_words, short
from discovery.names import plain_text
from discovery.peers import Peer, PeersFile
from discovery.tls import TLS_NAME, grpc_material
from engine.cluster.membership.client import PeerClient
from engine.cluster.membership.control_messages import MOST_ADDRESSES, Greeting, NodeLoad
from engine.cluster.membership.heartbeat import PeerView, PeerWatch, version_problem
from engine.cluster.membership.server import Caller, Credentials
from engine.cluster.parts import THE_PRODUCT, TimeConstants
from engine.cluster.transport.addresses import (
    as_dialled,
    as_sent,
    control_address,
    literal_addresses,
    parse_address,
    plain_ip,
)
from engine.errors import ModelError
from engine.ipc.messages.ring import LinkFacts, PeerFacts, PeerState

JOIN_S = 2.0
NOTIFIED_POLL_S = 0.005
MOST_PROCESSES = 1024
COPY_S = 600.0
"""Seconds for which a copied identity is reported after it was last noticed."""


@dataclass(frozen=True)
class AnnouncedPeer:
    """A machine announced by mDNS: a hint that is never trusted. ``addresses`` are those of its control port."""

    node_id: str
    addresses: tuple[str, ...]
    near: tuple[str, ...] = ()
    """Addresses within a network of this machine. Only these are dialled unasked, as anybody can announce anything."""


@dataclass(frozen=True)
class CopiedInstance:
    """One of several machines that share the identity ``node_id``, which only one should have."""

    node_id: str
    instance: str


class PeerTable:
    """The paired machines, each with its heartbeat. Thread-safe.

    ``greet`` and ``load`` make this machine's own messages. ``changed`` is called after every change.
    """

    def __init__(
        self,
        identity: Identity,
        peers: PeersFile,
        greet: Callable[[], Greeting],
        load: Callable[[], NodeLoad],
        changed: Callable[[], None],
        tried: Iterable[str] = (),
        name: str = "",
        times: TimeConstants = THE_PRODUCT.times,
    ) -> None:
        """``tried``: addresses at which any paired machine may be found. ``name``: this machine's name."""
        self._identity = identity
        self._name = name
        self.times = times
        self._peers = peers
        self._greet = greet
        self._load = load
        self._changed = changed
        self._tried = list(tried)
        self._lock = threading.Lock()
        self._watches: dict[str, PeerWatch] = {}
        self._announced: dict[str, AnnouncedPeer] = {}
        self._links: dict[str, LinkFacts] = {}
        self._refused: dict[str, str] = {}
        self._ring: set[str] = set()
        self._lost: set[str] = set()
        self._waiting: dict[str, str] = {}
        self._heard_instances: dict[str, dict[str, float]] = {}
        """Time of the last message by node id and instance."""
        self._instances: dict[str, str] = {}
        """Instance by process. Heartbeats name the process only."""
        self._copies: dict[str, tuple[float, set[str]]] = {}
        self._suspected: dict[tuple[str, str], float] = {}
        """Time of the first message by node id and instance, of those that are not the connected one."""
        self._barred: set[tuple[str, str]] = set()
        """Node ids and instances of copies. They stay out until a person pairs the machine anew."""
        self._paired_at: dict[str, float] = {}
        """Time of pairing by node id."""
        self._closed = False

    # --- whom this machine trusts ---------------------------------------------------------------------------------

    def paired(self, node_id: str) -> bool:
        return self._peers.get(node_id) is not None

    def server_credentials(self) -> Credentials:
        return Credentials(*grpc_material(self._identity, self._peers.all()))

    def peer(self, node_id: str) -> Peer:
        """Raises ModelError if it is not paired."""
        found = self._peers.get(node_id)
        if found is None:
            raise ModelError(f"{short(node_id)} is not paired with this machine; pair it first.", kind="network")
        return found

    def name_of(self, node_id: str) -> str:
        """The machine's name in sentences. It is unique among the paired machines."""
        return self._peers.labels(self._name).get(node_id) or short(node_id)

    # --- who is there ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Watch exactly the machines that are paired now."""
        paired = {peer.node_id: peer for peer in self._peers.all() if peer.node_id != self._identity.node_id}
        gone: list[PeerWatch] = []
        with self._lock:
            if self._closed:
                return
            for node_id in [node_id for node_id in self._watches if node_id not in paired]:
                gone.append(self._watches.pop(node_id))
            fresh = {node_id: peer for node_id, peer in paired.items() if node_id not in self._watches}
            anew = {one for one, peer in paired.items() if self._paired_at.get(one) != peer.paired_at}
            self._barred = {one for one in self._barred if one[0] not in anew}
            self._barred |= {(one, instance) for one in anew for instance in paired[one].copies}
            self._paired_at = {node_id: peer.paired_at for node_id, peer in paired.items()}
            for node_id, peer in fresh.items():
                watch = self._watches[node_id] = PeerWatch(
                    node_id,
                    peer.label,
                    self._connecting(peer),
                    self._greet,
                    self._load,
                    self._changed,
                    partial(self._found_at, node_id),
                    partial(self._record_process, node_id),
                    partial(self._forgotten_at, peer),
                    self._is_copy,
                    times=self.times,
                )
                announced = self._announced.get(node_id)
                watch.try_addresses([*peer.addresses, *self._tried], keep=True)
                watch.try_addresses(list(announced.near) if announced else [])
                watch.start()
        for watch in gone:
            watch.close()
        if gone or fresh:
            self._changed()

    def announced(self, found: Iterable[AnnouncedPeer]) -> None:
        """Take the machines that mDNS reports now."""
        with self._lock:
            self._announced = {peer.node_id: peer for peer in found}
            watches = dict(self._watches)
            hints = dict(self._announced)
        for node_id, peer in hints.items():
            if node_id in watches:
                watches[node_id].try_addresses(list(peer.near))
        self._changed()

    def on_hello(self, caller: Caller, greeting: Greeting) -> None:
        """A paired machine called Hello. Raises ModelError if its greeting names another machine."""
        self.refresh()
        problem = version_problem(greeting, self._greet())
        if greeting.node_id != caller.node_id:
            problem = "A greeting names another machine than its certificate does."
        with self._lock:
            self._refused[caller.node_id] = problem
            watch = self._watches.get(caller.node_id)
        if problem:
            self._changed()
            if greeting.node_id != caller.node_id:
                raise ModelError(problem, kind="network")
            return  # the answer has this machine's version, and the caller judges by itself
        self._record_process(caller.node_id, greeting)
        if self._is_copy(greeting):
            return
        if watch is None or not watch.is_another(greeting.process):
            self._rename(caller.node_id, greeting.name)
        if watch is not None:
            here = shown_address(plain_ip(caller.address), greeting.port)
            said = literal_addresses(as_dialled([here, *as_sent(greeting.listening[:MOST_ADDRESSES])]))
            # A copy of the connected machine must not be found before it, nor hide its silence.
            other = watch.is_another(greeting.process)
            watch.try_addresses(said, sure=not other)
            if not other:
                watch.record_contact()

    def on_heartbeat(self, caller: Caller, load: NodeLoad) -> None:
        with self._lock:
            watch = self._watches.get(caller.node_id)
            instance = self._instances.get(load.process, "")
        if instance:
            self._record_instance(caller.node_id, instance)
        if watch is not None and (caller.node_id, instance) not in self._barred:
            if not watch.is_another(load.process):
                watch.heard_from(plain_ip(caller.address))
            watch.record_contact(load)

    def record_contact(self, node_id: str) -> None:
        """The machine ``node_id`` answered a call other than a heartbeat."""
        watch = self.watch(node_id)
        if watch is not None:
            watch.record_contact()

    def send_heartbeats(self, within: float = 0.0) -> None:
        """Send a heartbeat to every machine at once; wait up to ``within`` seconds until all have answered."""
        with self._lock:
            watches = list(self._watches.values())
        asked = [(watch, watch.send_heartbeats()) for watch in watches]
        end = time.monotonic() + within
        while time.monotonic() < end and not all(watch.notified_since(moment) for watch, moment in asked):
            time.sleep(NOTIFIED_POLL_S)

    def view(self, node_id: str) -> PeerView | None:
        with self._lock:
            watch = self._watches.get(node_id)
        return replace(watch.view(), name=self.name_of(node_id)) if watch is not None else None

    def views(self) -> list[PeerView]:
        names = self._peers.labels(self._name)
        with self._lock:
            watches = list(self._watches.values())
        return [replace(watch.view(), name=names.get(watch.node_id) or short(watch.node_id)) for watch in watches]

    def watch(self, node_id: str) -> PeerWatch | None:
        with self._lock:
            return self._watches.get(node_id)

    def apart(self, node_id: str, client: PeerClient) -> PeerClient:
        """A connection like ``client`` for calls that no failed heartbeat may end, but forgetting the machine does.
        Whoever asks closes it."""
        watch = self.watch(node_id)
        if watch is not None:
            return watch.apart(client)
        client.close()
        return client

    def find_announced(self, text: str) -> AnnouncedPeer:
        """The one machine whose node id begins with ``text``. Raises ModelError: none, or several."""
        with self._lock:
            matches = [one for one in self._announced.values() if text and one.node_id.startswith(text.lower())]
        if len(matches) != 1:
            what = "No machine" if not matches else "More than one machine"
            raise ModelError(
                f"{what} announces itself as “{text}”; give more of its id, or its address as HOST:PORT.",
                kind="bad-input",
            )
        return matches[0]

    def forget(self, node_id: str) -> None:
        """End the connection to a machine that is no longer paired."""
        with self._lock:
            watch = self._watches.pop(node_id, None)
            self._links.pop(node_id, None)
            self._refused.pop(node_id, None)
            self._heard_instances.pop(node_id, None)
            self._copies.pop(node_id, None)
            self._barred = {one for one in self._barred if one[0] != node_id}
            self._suspected = {one: at for one, at in self._suspected.items() if one[0] != node_id}
        if watch is not None:
            watch.close()
        self._changed()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            watches = list(self._watches.values())
            self._watches.clear()
        for watch in watches:
            watch.close()
        for watch in watches:
            watch.join(JOIN_S)

    def _found_at(self, node_id: str, address: str, greeting: Greeting) -> None:
        self._record_process(node_id, greeting)
        self._rename(node_id, greeting.name)
        # A file that cannot be written makes the machine harder to find the next time, no more.
        with contextlib.suppress(DiscoveryError):
            self._peers.remember_address(node_id, address)

    def _forgotten_at(self, peer: Peer, address: str) -> bool:
        """Whether the machine at ``address`` is ``peer``, and says that it does not know this one."""
        try:
            host, port = parse_address(address)
        except ModelError:
            return False
        return is_known(self._identity, peer, host, port + 1) is False

    def _rename(self, node_id: str, name: str) -> None:
        """Keep the machine's name, which may have changed since it was paired."""
        with contextlib.suppress(DiscoveryError):
            if self._peers.rename(node_id, name):
                self._changed()

    # --- copied identities ----------------------------------------------------------------------------------------

    def _record_process(self, node_id: str, greeting: Greeting) -> None:
        with self._lock:
            if len(self._instances) >= MOST_PROCESSES:
                self._instances.clear()
            self._instances[greeting.process] = greeting.instance
        self._record_instance(node_id, greeting.instance)

    def _record_instance(self, node_id: str, instance: str) -> None:
        """Note a message of ``instance``. Two instances at the same time mean a copied identity.

        A machine that restarts has a new instance as well, but is silent in between.
        """
        view, watch = self.view(node_id), self.watch(node_id)
        now = time.monotonic()
        barred = False
        with self._lock:
            if view is not None and view.greeting is not None and view.greeting.instance != instance:
                # A machine that was moved, or started again, never answers as the former one after that.
                if len(self._suspected) >= MOST_PROCESSES:
                    self._suspected.clear()
                first = self._suspected.setdefault((node_id, instance), now)
                if watch is not None and watch.answered_since(first) and len(self._barred) < MOST_PROCESSES:
                    barred = (node_id, instance) not in self._barred
                    self._barred.add((node_id, instance))
            heard = {
                one: at for one, at in self._heard_instances.get(node_id, {}).items() if now - at < self.times.lost_s
            }
            if view is not None and view.client is not None and view.greeting is not None:
                heard[view.greeting.instance] = now
            self._heard_instances[node_id] = {**heard, instance: now}
            news = len(self._heard_instances[node_id]) > 1
            if news:
                self._copies[node_id] = (now, set(self._heard_instances[node_id]))
        if barred:
            # Where the file cannot be written, the copy stays out until this process ends.
            with contextlib.suppress(DiscoveryError):
                self._peers.remember_copy(node_id, instance)
        if news:
            self._changed()

    def _is_copy(self, greeting: Greeting) -> bool:
        """Whether this identity was in use on another machine, which was connected, at the same time."""
        with self._lock:
            return (greeting.node_id, greeting.instance) in self._barred

    def copies(self) -> list[CopiedInstance]:
        """All machines that recently used an identity at the same time as another machine."""
        now = time.monotonic()
        with self._lock:
            return [
                CopiedInstance(node_id, instance)
                for node_id, (at, instances) in self._copies.items()
                for instance in sorted(instances)
                if now - at < COPY_S
            ]

    def _connecting(self, peer: Peer) -> Callable[[str], PeerClient]:
        credentials = Credentials(*grpc_material(self._identity, [peer]))
        return lambda address: PeerClient(address, credentials, TLS_NAME)

    # --- what a screen shows --------------------------------------------------------------------------------------

    def set_ring(self, nodes: Iterable[str], lost: Iterable[str] = ()) -> None:
        """``nodes`` are in the ring now; ``lost`` were in it and are gone."""
        with self._lock:
            self._ring, self._lost = set(nodes), set(lost)
        self._changed()

    def set_waiting(self, lines: Mapping[str, str]) -> None:
        """A line, by node id, for each machine that is there and that the ring does not use yet."""
        with self._lock:
            news, self._waiting = self._waiting != lines, dict(lines)
        if news:
            self._changed()

    def set_link(self, node_id: str, link: LinkFacts) -> None:
        """The link to a machine as it was measured. Heartbeats take the same path."""
        with self._lock:
            self._links[node_id] = link
            watch = self._watches.get(node_id)
        if watch is not None:
            watch.go_over(control_address(link.address))
        self._changed()

    def facts(self) -> list[PeerFacts]:
        """Paired machines in the order of pairing, then those that only announce themselves."""
        self.refresh()  # another process may have paired one, or forgotten it
        paired = self._peers.all()
        names = self._peers.labels(self._name)
        known = {peer.node_id for peer in paired} | {self._identity.node_id}
        with self._lock:
            announced = [
                announced_peer for announced_peer in self._announced.values() if announced_peer.node_id not in known
            ]
        unpaired = [
            PeerFacts(
                node_id=announced_peer.node_id,
                words=fingerprint_words(announced_peer.node_id),
                state="found",
                addresses=list(announced_peer.addresses),
            )
            for announced_peer in sorted(announced, key=lambda announced_peer: announced_peer.node_id)
        ]
        return [*(self._facts_of(peer, names) for peer in paired), *unpaired]

    def _facts_of(self, peer: Peer, names: Mapping[str, str]) -> PeerFacts:
        name = names.get(peer.node_id) or peer.label
        view = self.view(peer.node_id)
        with self._lock:
            refused = self._refused.get(peer.node_id, "")
            link = self._links.get(peer.node_id)
            waiting = self._waiting.get(peer.node_id, "")
        words = fingerprint_words(peer.node_id)
        if view is None:
            return PeerFacts(
                node_id=peer.node_id,
                words=words,
                name=name,
                former_name=peer.former_name,
                state="paired",
                addresses=list(peer.addresses),
            )
        load = view.load if view.alive else None
        problem = view.problem or refused
        state = self._state(view, problem)
        in_use = [view.client.address] if view.client is not None else []
        return PeerFacts(
            node_id=peer.node_id,
            words=words,
            name=name,
            former_name=peer.former_name,
            state=state,
            lends=bool(view.alive and view.greeting and view.greeting.lends),
            addresses=in_use + [one for one in view.addresses or peer.addresses if one not in in_use],
            link=link if view.alive else None,
            memory_total=load.memory_total if load else 0,
            memory_free=load.memory_free if load else 0,
            runtime=load.runtime if load else "",
            version=view.greeting.version if view.greeting else "",
            lent_to=names.get(load.head) or plain_text(short(load.head)) if load and state == "busy" else "",
            problem=waiting if state == "ready" else problem,
        )

    def _state(self, view: PeerView, problem: str) -> PeerState:
        if problem:
            return "refused"
        with self._lock:
            absent: PeerState = "lost" if view.node_id in self._lost | self._ring else "paired"
            if not view.reachable:
                return absent
            if view.node_id in self._ring:
                return "ring"
        if view.load is not None and view.load.head not in ("", self._identity.node_id):
            return "busy"
        # It may have called before this machine has found it again, and no ring can be formed with it then.
        return "ready" if view.client is not None else absent
