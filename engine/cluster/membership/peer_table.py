"""Everybody this node knows of: paired machines with their connections, and those that only announce themselves."""

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
from engine.cluster.membership.heartbeat import LOST_S, PeerView, PeerWatch, version_problem
from engine.cluster.membership.server import Caller, Credentials
from engine.cluster.transport.addresses import literal_addresses, parse_address, plain_ip
from engine.errors import ModelError
from engine.ipc.messages.ring import LinkFacts, PeerFacts, PeerState

JOIN_S = 2.0
TOLD_POLL_S = 0.005
MOST_PROCESSES = 1024
COPY_S = 600.0
"""That an identity was copied is said for so long after it was noticed."""


@dataclass(frozen=True)
class Announced:
    """A machine that mDNS tells of: a hint, never trusted. ``addresses`` are of its control port."""

    node_id: str
    addresses: tuple[str, ...]
    near: tuple[str, ...] = ()
    """Those in a network of this machine: of themselves only these are dialled, as anybody can announce anything."""


@dataclass(frozen=True)
class Instance:
    """One of the machines that have the identity ``node_id``; there should be no other."""

    node_id: str
    instance: str


class PeerTable:
    """From any thread. ``greet`` and ``load`` are this machine's own words; ``changed`` is told of every change."""

    def __init__(
        self,
        identity: Identity,
        peers: PeersFile,
        greet: Callable[[], Greeting],
        load: Callable[[], NodeLoad],
        changed: Callable[[], None],
        tried: Iterable[str] = (),
        name: str = "",
    ) -> None:
        """``tried``: addresses at which any of them may be found; ``name``: what this machine is called."""
        self._identity = identity
        self._name = name
        self._peers = peers
        self._greet = greet
        self._load = load
        self._changed = changed
        self._tried = list(tried)
        self._lock = threading.Lock()
        self._watches: dict[str, PeerWatch] = {}
        self._announced: dict[str, Announced] = {}
        self._links: dict[str, LinkFacts] = {}
        self._refused: dict[str, str] = {}
        self._ring: set[str] = set()
        self._lost: set[str] = set()
        self._heard: dict[str, dict[str, float]] = {}
        """By node id the instances that said something, and when."""
        self._instances: dict[str, str] = {}
        """Of processes: beats name only those."""
        self._copies: dict[str, tuple[float, set[str]]] = {}
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
        """What it is called in sentences; no two machines have the same."""
        return self._peers.labels(self._name).get(node_id) or short(node_id)

    # --- who is there ---------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Watch everybody who is paired now, and nobody else."""
        paired = {peer.node_id: peer for peer in self._peers.all() if peer.node_id != self._identity.node_id}
        gone: list[PeerWatch] = []
        with self._lock:
            if self._closed:
                return
            for node_id in [node_id for node_id in self._watches if node_id not in paired]:
                gone.append(self._watches.pop(node_id))
            fresh = {node_id: peer for node_id, peer in paired.items() if node_id not in self._watches}
            for node_id, peer in fresh.items():
                watch = self._watches[node_id] = PeerWatch(
                    node_id,
                    peer.label,
                    self._connecting(peer),
                    self._greet,
                    self._load,
                    self._changed,
                    partial(self._worked, node_id),
                    partial(self._said_by, node_id),
                    partial(self._forgotten_at, peer),
                )
                announced = self._announced.get(node_id)
                watch.try_addresses([*peer.addresses, *self._tried], keep=True)
                watch.try_addresses(list(announced.near) if announced else [])
                watch.start()
        for watch in gone:
            watch.close()
        if gone or fresh:
            self._changed()

    def announced(self, found: Iterable[Announced]) -> None:
        """What mDNS tells now."""
        with self._lock:
            self._announced = {one.node_id: one for one in found}
            watches = dict(self._watches)
            hints = dict(self._announced)
        for node_id, one in hints.items():
            if node_id in watches:
                watches[node_id].try_addresses(list(one.near))
        self._changed()

    def greeted(self, caller: Caller, greeting: Greeting) -> None:
        """A paired machine said Hello. Raises ModelError if it says to be another one."""
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
            return  # it is told this machine's version, and judges by itself
        self._said_by(caller.node_id, greeting)
        self._rename(caller.node_id, greeting.name)
        if watch is not None:
            here = shown_address(plain_ip(caller.address), greeting.port)
            said = literal_addresses([here, *greeting.listening[:MOST_ADDRESSES]])
            watch.try_addresses(said, sure=True)
            watch.heard_from()

    def beat(self, caller: Caller, load: NodeLoad) -> None:
        with self._lock:
            watch = self._watches.get(caller.node_id)
            instance = self._instances.get(load.process, "")
        if instance:
            self._heard_from(caller.node_id, instance)
        if watch is not None:
            watch.heard_from(load)

    def heard_from(self, node_id: str) -> None:
        """It answered a call that is no beat."""
        watch = self.watch(node_id)
        if watch is not None:
            watch.heard_from()

    def beat_now(self, within: float = 0.0) -> None:
        """Tell everybody at once how this machine is; wait up to ``within`` seconds until they have heard it."""
        with self._lock:
            watches = list(self._watches.values())
        asked = [(watch, watch.beat_now()) for watch in watches]
        end = time.monotonic() + within
        while time.monotonic() < end and not all(watch.told_since(moment) for watch, moment in asked):
            time.sleep(TOLD_POLL_S)

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

    def find_announced(self, text: str) -> Announced:
        """The one machine whose node id begins with ``text``. Raises ModelError: none, or several."""
        with self._lock:
            found = [one for one in self._announced.values() if text and one.node_id.startswith(text.lower())]
        if len(found) != 1:
            what = "No machine" if not found else "More than one machine"
            raise ModelError(
                f"{what} announces itself as “{text}”; give more of its id, or its address as HOST:PORT.",
                kind="bad-input",
            )
        return found[0]

    def forget(self, node_id: str) -> None:
        """It is no longer paired: end its connection."""
        with self._lock:
            watch = self._watches.pop(node_id, None)
            self._links.pop(node_id, None)
            self._refused.pop(node_id, None)
            self._heard.pop(node_id, None)
            self._copies.pop(node_id, None)
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

    def _worked(self, node_id: str, address: str, greeting: Greeting) -> None:
        self._said_by(node_id, greeting)
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
        """It may have another name than when it was paired."""
        with contextlib.suppress(DiscoveryError):
            if self._peers.rename(node_id, name):
                self._changed()

    # --- copied identities ----------------------------------------------------------------------------------------

    def _said_by(self, node_id: str, greeting: Greeting) -> None:
        with self._lock:
            if len(self._instances) >= MOST_PROCESSES:
                self._instances.clear()
            self._instances[greeting.process] = greeting.instance
        self._heard_from(node_id, greeting.instance)

    def _heard_from(self, node_id: str, instance: str) -> None:
        """A machine that starts again has another instance, too, but says nothing while it does."""
        view = self.view(node_id)
        now = time.monotonic()
        with self._lock:
            heard = {one: at for one, at in self._heard.get(node_id, {}).items() if now - at < LOST_S}
            if view is not None and view.client is not None and view.greeting is not None:
                heard[view.greeting.instance] = now
            self._heard[node_id] = {**heard, instance: now}
            news = len(self._heard[node_id]) > 1
            if news:
                self._copies[node_id] = (now, set(self._heard[node_id]))
        if news:
            self._changed()

    def copies(self) -> list[Instance]:
        """Machines that were heard of by themselves and have the identity of another one, which is named, too."""
        now = time.monotonic()
        with self._lock:
            return [
                Instance(node_id, instance)
                for node_id, (at, instances) in self._copies.items()
                for instance in sorted(instances)
                if now - at < COPY_S
            ]

    def _connecting(self, peer: Peer) -> Callable[[str], PeerClient]:
        credentials = Credentials(*grpc_material(self._identity, [peer]))
        return lambda address: PeerClient(address, credentials, TLS_NAME)

    # --- what a screen shows --------------------------------------------------------------------------------------

    def set_ring(self, nodes: Iterable[str], lost: Iterable[str] = ()) -> None:
        """These are in the ring now, and those were and are gone."""
        with self._lock:
            self._ring, self._lost = set(nodes), set(lost)
        self._changed()

    def set_link(self, node_id: str, link: LinkFacts) -> None:
        with self._lock:
            self._links[node_id] = link
        self._changed()

    def facts(self) -> list[PeerFacts]:
        """Paired machines in the order of pairing, then those that only announce themselves."""
        self.refresh()  # another process may have paired one, or forgotten it
        paired = self._peers.all()
        names = self._peers.labels(self._name)
        known = {peer.node_id for peer in paired} | {self._identity.node_id}
        with self._lock:
            announced = [one for one in self._announced.values() if one.node_id not in known]
        found = [
            PeerFacts(
                node_id=one.node_id,
                words=fingerprint_words(one.node_id),
                state="found",
                addresses=list(one.addresses),
            )
            for one in sorted(announced, key=lambda one: one.node_id)
        ]
        return [*(self._facts_of(peer, names) for peer in paired), *found]

    def _facts_of(self, peer: Peer, names: Mapping[str, str]) -> PeerFacts:
        name = names.get(peer.node_id) or peer.label
        view = self.view(peer.node_id)
        with self._lock:
            refused = self._refused.get(peer.node_id, "")
            link = self._links.get(peer.node_id)
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
            problem=problem,
        )

    def _state(self, view: PeerView, problem: str) -> PeerState:
        if problem:
            return "refused"
        with self._lock:
            if not view.reachable:
                return "lost" if view.node_id in self._lost | self._ring else "paired"
            if view.node_id in self._ring:
                return "ring"
        lent_elsewhere = view.load is not None and view.load.head not in ("", self._identity.node_id)
        return "busy" if lent_elsewhere else "ready"
