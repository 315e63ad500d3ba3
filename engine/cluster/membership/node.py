"""This machine as a node: everything that listens, announces or connects between OpenNetwork and CloseNetwork."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from discovery.acquaintance import KIND as KNOWN_KIND
from discovery.acquaintance import answer as answer_known
from discovery.addresses import shown_address
from discovery.checks import hearing_problems, network_facts
from discovery.errors import DiscoveryError, LinkListenerError
from discovery.identity import Identity, copied_identities, fingerprint_words
from discovery.link_listener import LinkListener, PortPair, bind_pair
from discovery.mdns import FoundNode, Neighbourhood
from discovery.pairing_service import KIND as PAIR_KIND
from discovery.pairing_service import PairingService, pair_with
from discovery.peers import Peer, PeersFile, PeersWatch
from engine.cluster.membership.control_messages import CONTROL_PROTOCOL, LENDING, Greeting, NodeLoad
from engine.cluster.membership.measuring_node import runtimes
from engine.cluster.membership.peer_table import AnnouncedPeer, PeerTable
from engine.cluster.membership.server import Caller, ControlServer, RpcMethod
from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.addresses import is_link_local, listener_address, own_addresses, parse_address
from engine.cluster.transport.link_probe import answer_measuring
from engine.errors import ModelError
from engine.ipc.messages import OpenNetwork
from engine.ipc.messages.ring import NodeId
from engine.planning.ring_nodes import NodeFacts
from engine.system.free_memory import memory
from engine.system.locations import ensure, locate

LOOK_S = 5.0
"""Seconds between two checks of what keeps machines from being found."""
_TRIES = 5
"""Attempts to listen. Another program may take the control port between the search for a free one and its use."""


@dataclass(frozen=True)
class LentState:
    """A lent machine's report on itself in every heartbeat."""

    head: str = ""
    epoch: str = ""
    stage: str = ""
    broken: tuple[str, ...] = ()
    """Node ids to which its links of the last epoch broke."""


def privatellm_version() -> str:
    """The installed version. Only nodes of the same version form a ring."""
    try:
        return version("privatellm")
    except PackageNotFoundError:
        return "unknown"


class Node:
    """Open from its construction until :meth:`close`.

    ``changed`` is called from any thread whenever something that a screen shows is different.
    """

    def __init__(
        self,
        identity: Identity,
        peers: PeersFile,
        options: OpenNetwork,
        changed: Callable[[], None] = lambda: None,
        parts: EngineParts = THE_PRODUCT,
    ) -> None:
        """Raises ModelError (network, bad-input) and DiscoveryError if a socket cannot be opened as asked."""
        self.identity = identity
        self.peers = peers
        self.parts = parts
        self.lends = options.lend
        self._most_memory = sys.maxsize if options.lend_memory is None else options.lend_memory
        self.name = options.name.strip() or default_name()
        self.process = secrets.token_hex(8)
        self.version = privatellm_version()
        self._problems: list[str] = []
        self._look_again = 0.0
        self._changed = changed
        self.lent: Callable[[], LentState] = LentState
        """State of this machine in the ring of another head, or in its own."""
        self.vouched: Callable[[str], bytes | None] = lambda node_id: None
        """Certificates (PEM) by node id that a head vouches for while it forms a ring with this machine."""
        self._runtime = ""
        self._loads = itertools.count(1)
        self._numbering = threading.Lock()
        self._methods: dict[str, RpcMethod] = {}
        self._forgotten: list[Callable[[str], None]] = []
        self._closed = threading.Event()
        self._pairing_problem = ""
        with contextlib.ExitStack() as opened:
            self.table = PeerTable(
                identity, peers, self.greeting, self.load, changed, options.peers, self.name, parts.times
            )
            opened.callback(self.table.close)
            self._host, ports, self.server = self._listen(options.listen)
            opened.callback(self.server.close)
            self.listener = LinkListener(ports.listener)
            opened.callback(self.listener.close)
            self.links = Links(identity, self.certificate_of, answer_measuring, parts)
            self.links.attach(self.listener)
            opened.callback(self.links.close)
            self.pairing = PairingService(identity, peers, self.name, self._paired, self._not_paired)
            self.listener.register(PAIR_KIND, self.pairing.handle)
            self.listener.register(KNOWN_KIND, answer_known(identity, self.table.paired))
            self._peers_watch = PeersWatch(peers, self.forget)
            opened.callback(self._peers_watch.close)
            self._neighbourhood = self._announce()
            if self._neighbourhood is not None:
                opened.callback(self._neighbourhood.close)
            self.table.refresh()
            self._opened = opened.pop_all()

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other machines may reach this one, as it announces them; see :func:`own_addresses`."""
        return own_addresses(self._host, self.server.port)

    @property
    def listening(self) -> list[str]:
        """The addresses that a person can type on another machine."""
        return [address for address in self.addresses if not is_link_local(address)]

    @property
    def me(self) -> NodeId:
        return NodeId(
            node_id=self.identity.node_id,
            name=self.name,
            listening=[] if self._closed.is_set() else self.listening,
            words=fingerprint_words(self.identity.node_id),
            key_storage=self.identity.storage,
        )

    def certificate_of(self, node_id: str) -> bytes | None:
        """The certificate (PEM) of a machine that may measure its link to this one, or None.

        That is a paired machine, or one that a forming head vouches for.
        """
        peer = self.peers.get(node_id)
        return peer.certificate_pem.encode() if peer is not None else self.vouched(node_id)

    def add_methods(self, methods: Mapping[str, RpcMethod]) -> None:
        """Answer these methods from now on. Every paired machine may call them."""
        self._methods.update(methods)

    def on_forgotten(self, call: Callable[[str], None]) -> None:
        """Call ``call(node_id)`` whenever a machine is no longer paired. Its links must be cut then."""
        self._forgotten.append(call)

    def off_forgotten(self, call: Callable[[str], None]) -> None:
        if call in self._forgotten:
            self._forgotten.remove(call)

    def pair(self, peer: str, code: str) -> Peer:
        """Pair with the machine at ``peer`` (node id, its beginning, or HOST:PORT) that shows ``code``.

        Raises ModelError, DiscoveryError.
        """
        addresses = [peer] if ":" in peer else list(self.table.find_announced(peer).addresses)
        failure: LinkListenerError | None = None
        for address in addresses:
            host, port = parse_address(address)
            try:
                peer_record = pair_with(host, port + 1, code, self.identity, self.peers, self.name, address)
            except LinkListenerError as error:
                failure = error  # the next address may be the right one
                continue
            self.table.refresh()
            self._changed()
            return peer_record
        if failure is not None:
            raise failure
        raise ModelError(f"{peer} announces no address; give its address as HOST:PORT.", kind="network")

    def close(self) -> None:
        """End every socket and thread. May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._opened.close()

    # --- what this machine reports --------------------------------------------------------------------------------

    def greeting(self) -> Greeting:
        greeting = Greeting(
            protocol=CONTROL_PROTOCOL,
            version=self.version,
            node_id=self.identity.node_id,
            instance=self.identity.instance,
            process=self.process,
            name=self.name,
            port=self.server.port,
            listening=self.addresses,
            lends=self.lends,
        )
        return msgspec.structs.replace(greeting, **self.parts.greeting)

    def reported(self, measured: NodeFacts) -> NodeFacts:
        """This machine's facts for others, from its measurements ``measured``."""
        return msgspec.structs.replace(measured, **self.parts.figures)

    def runtimes(self) -> list[str]:
        """The runtimes that this machine says it has, the default first."""
        return list(self.parts.figures.get("runtimes") or runtimes())

    def load(self) -> NodeLoad:
        free, runtime = memory(), self._runtime or self._find_runtime()
        with self._numbering:  # a larger number is never an older state
            number, lent = next(self._loads), self.lent()
        return NodeLoad(
            process=self.process,
            number=number,
            memory_total=free.total,
            memory_free=min(free.available, self._most_memory),
            runtime=runtime,
            lends=self.lends,
            head=lent.head,
            epoch=lent.epoch,
            stage=lent.stage,
            broken=list(lent.broken),
        )

    def _find_runtime(self) -> str:
        from engine.cluster.membership.measuring_node import runtimes
        from engine.moe.kernels.bindings import choose

        first = next(iter(runtimes()), "")
        chosen = choose("bfloat16")
        self._runtime = f"{first} {chosen.name}" if first == "native" else first
        return self._runtime

    def _announce(self) -> Neighbourhood | None:
        """The announcement of this machine; None if this node listens on a loopback address, which no other machine can
        reach."""
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(self._host).is_loopback:
                return None
        me = self.identity
        return Neighbourhood(
            me.node_id, me.instance, self.server.port, self._on_announced, self._host, paired=self._paired_ids
        )

    def _paired_ids(self) -> set[str]:
        try:
            return {peer.node_id for peer in self.peers.all()}
        except DiscoveryError:  # the file cannot be read at this moment; whoever acts on it reports that
            return set()

    def _on_announced(self, found: list[FoundNode]) -> None:
        others = [one for one in found if one.node_id != self.identity.node_id]
        self._look_again = 0.0
        self.table.announced(
            AnnouncedPeer(one.node_id, one.texts, tuple(address.text for address in one.addresses if address.interface))
            for one in others
        )

    # --- being called ---------------------------------------------------------------------------------------------

    def _listen(self, listen: str) -> tuple[str, PortPair, ControlServer]:
        host, port = parse_address(listen) if listen else ("", None)
        for attempt in range(_TRIES):
            ports = bind_pair(host, port)
            try:
                server = ControlServer(
                    shown_address(host or _any_host(ports.listener), ports.control),
                    self.table.server_credentials,
                    self.table.paired,
                    self._table_of_methods(),
                )
            except ModelError:
                ports.listener.close()
                if attempt + 1 == _TRIES or port:
                    raise
            else:
                return host, ports, server
        raise AssertionError("the last try either listens or raises")

    def _table_of_methods(self) -> dict[str, RpcMethod]:
        own = {"Hello": RpcMethod(Greeting, self._on_hello), "Beat": RpcMethod(NodeLoad, self._on_heartbeat)}
        for name, (request, kind) in LENDING.items():
            own[name] = RpcMethod(request, _later(self, name), kind)
        return own

    def method(self, name: str) -> RpcMethod:
        """The method ``name`` of a lent machine. Raises ModelError if this machine is not lent."""
        found = self._methods.get(name)
        if found is None:
            raise ModelError(f"{self.name} is not lent; run `privatellm join` there.", kind="network")
        return found

    def _on_hello(self, caller: Caller, greeting: Greeting) -> Greeting:
        self.table.on_hello(caller, greeting)
        return self.greeting()

    def _on_heartbeat(self, caller: Caller, load: NodeLoad) -> NodeLoad:
        self.table.on_heartbeat(caller, load)
        return self.load()

    # --- trust ----------------------------------------------------------------------------------------------------

    def _paired(self, peer: Peer) -> None:
        self.pairing.hide()
        self.table.refresh()
        self._changed()

    def _not_paired(self, sentence: str, tries_left: int) -> None:
        self._pairing_problem = sentence
        self._changed()

    @property
    def pairing_problem(self) -> str:
        """The problem with the last attempt to pair with this machine; empty if there was none."""
        return self._pairing_problem

    def problems_now(self) -> list[str]:
        """Sentences about what keeps machines from being found, each with a remedy."""
        now = time.monotonic()
        around = self._neighbourhood
        if around is not None and now >= self._look_again:
            self._look_again = now + LOOK_S
            heard = around.hearing()
            facts = network_facts(self.server.port, probe=False)
            problems = hearing_problems(heard.seconds, heard.failure, heard.own, heard.others, facts)
            self._problems = list(map(str, problems))
        others = [*self.table.copies(), *(around.found() if around is not None else ())]
        return [*copied_identities(self.identity, others), *self._problems]

    def show_code(self) -> None:
        self._pairing_problem = ""
        self.pairing.show()
        self._changed()

    def forget(self, node_id: str) -> None:
        """End the calls and cut the links of a machine that is no longer paired. May be called twice."""
        self.server.cut(node_id)
        self.table.forget(node_id)
        self.links.cut_measuring(node_id)
        for call in list(self._forgotten):
            call(node_id)


def _later(node: Node, name: str) -> Callable[[Caller, object], object]:
    return lambda caller, body: node.method(name).answer(caller, body)


def _any_host(listener: socket.socket) -> str:
    """The wildcard address in the family of ``listener``."""
    return "::" if listener.family == socket.AF_INET6 else "0.0.0.0"


def default_name() -> str:
    """The host's name without its domain."""
    return socket.gethostname().partition(".")[0] or "this machine"


def network_folder() -> Path:
    """The folder of this machine's identity and of its list of paired machines."""
    ensure("config")
    return locate("config") / "network"


def listener_addresses(addresses: list[str]) -> list[str]:
    """The addresses of the link listeners beside these control ports. What is not an address is left out."""
    found = []
    for address in addresses:
        with contextlib.suppress(ModelError):
            found.append(listener_address(address))
    return found
