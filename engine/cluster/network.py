"""The engine's network: requests about peers, and the state for the screen.

Nothing is open before it is requested. Nothing here waits for a running answer.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from discovery.code_requests import CodeRequests, ShownCode
from discovery.errors import DiscoveryError
from discovery.identity import Identity, fingerprint_words, load_identity
from discovery.peers import PeersFile
from engine.cluster.head.forming import RingFormer
from engine.cluster.head.lacked_model import LackedModel, find_lacked
from engine.cluster.head.survey import Surveyor
from engine.cluster.membership.node import Node, default_name, network_folder
from engine.cluster.parts import THE_PRODUCT, EngineParts
from engine.cluster.weights.own_shard import OwnShard
from engine.cluster.worker.lending import ClusterWorker
from engine.errors import ModelError
from engine.ipc.messages import (
    AnyEvent,
    CloseNetwork,
    Done,
    ForgetPeer,
    ListPeers,
    Load,
    NetworkState,
    Notice,
    OpenNetwork,
    Pair,
    ShowCode,
)
from engine.ipc.messages.ring import NodeId, PeerFacts
from engine.ipc.progress import ProgressCallback
from engine.models.store.local_models import ResolvedModel
from engine.planning.runtime_choice import RuntimeChoice
from engine.runtimes.choosing import as_ring_node
from engine.runtimes.common.loading import Runtime
from engine.system.awake import AWAKE

STATE_S = 0.25
"""Seconds between two states sent to the screen at least."""

AnyNetworkRequest = OpenNetwork | CloseNetwork | ShowCode | Pair | ForgetPeer | ListPeers


DIALOGUE_S = 120.0
"""Seconds for the keyring of a lent machine, and of a Mac. A service that gave up sooner would be started again, and
its new dialogue would replace the one in which a person types a password."""


def keyring_patience(lend: bool, system: str) -> float | None:
    """Seconds for the keyring; None: the usual few. macOS asks in a dialogue that everybody sees and has to read."""
    return DIALOGUE_S if lend or system == "darwin" else None


class ClusterNetwork:
    """The network of an engine process, of which there is one. ``send`` must be callable from any thread."""

    def __init__(
        self, send: Callable[[AnyEvent], None], folder: Path | None = None, parts: EngineParts = THE_PRODUCT
    ) -> None:
        self._send = send
        self._parts = parts
        self._folder = folder or network_folder()
        self._lock = threading.RLock()
        self._identity: Identity | None = None
        self._peers = PeersFile(self._folder)
        self._asked = CodeRequests(self._folder)
        self._node: Node | None = None
        self._lender: ClusterWorker | None = None
        self._lent = contextlib.ExitStack()
        self._news = threading.Event()
        self._reporting: threading.Thread | None = None
        self._former: RingFormer | None = None
        """Former of the last ring."""
        self._surveyor: tuple[tuple[object, ...], Surveyor] | None = None

    def answer(self, request: AnyNetworkRequest) -> AnyEvent:
        """The last event of ``request``. Raises ModelError."""
        try:
            match request:
                case OpenNetwork():
                    return self._open(request)
                case CloseNetwork():
                    self.close()
                    return Done(id=request.id, path="")
                case ShowCode():
                    self.node.show_code()
                    return Done(id=request.id, path="")
                case Pair(peer=peer, code=code):
                    found = self.node.pair(peer, code)
                    return Done(id=request.id, path="", detail=found.label)
                case ForgetPeer(peer=peer):
                    return self._forget(request.id, peer)
                case ListPeers():
                    return self.state(request.id)
        except DiscoveryError as error:
            raise ModelError(str(error), kind="network") from error

    @property
    def node(self) -> Node:
        """Raises ModelError while the network is closed."""
        node = self._node
        if node is None:
            raise ModelError(
                "The network is closed; choose partitioning ring, or run `privatellm join`, to open it.", kind="network"
            )
        return node

    def open_node(self) -> Node | None:
        """The open node; None while the network is closed."""
        return self._node

    def surveyor(self, me: str, folder: Path, load: Load) -> Surveyor:
        """The surveyor for the model in ``folder``. It is kept because it remembers its measurements."""
        key = (me, folder, load.runtime, load.dtype, load.cpu_threads)
        with self._lock:
            if self._surveyor is None or self._surveyor[0] != key:
                self._surveyor = (key, Surveyor(me, folder, load))
            return self._surveyor[1]

    def lacked(self, model: ResolvedModel, progress: ProgressCallback) -> LackedModel | None:
        """See :func:`engine.cluster.head.lacked_model.find_lacked`."""
        return find_lacked(self.node, model, progress)

    def kept_shard(self, model: ResolvedModel) -> Path | None:
        """The folder of this machine's shard of ``model``; None if it has the whole model or the network is closed."""
        node = self._node
        if node is None or model.kind != "hub" or model.folder is not None:
            return None
        own = OwnShard.find(model.name, node.identity.node_id)
        return None if own is None else own.folder

    def former(
        self,
        name: str,
        folder: Path,
        runtime: Runtime,
        load: Load,
        lacked: LackedModel | None = None,
        choice: RuntimeChoice | None = None,
    ) -> RingFormer:
        """The former of rings for the model ``name`` in ``folder``; see :class:`RingFormer`. Raises ModelError."""
        as_node = msgspec.structs.replace(as_ring_node(load, runtime.name), runtime=runtime.name)
        surveyor = self.surveyor(self.node.identity.node_id, folder, as_node)
        chosen_here = choice if load.runtime == "auto" else None
        self._former = RingFormer(
            self.node, name, folder, runtime, as_node, surveyor, lacked=lacked, choice=chosen_here
        )
        return self._former

    @property
    def loaded_from(self) -> Path | None:
        """The folder from which this machine loads its shard of the last ring."""
        return None if self._former is None else self._former.folder

    def close(self) -> None:
        """Leave the ring and close every socket; may be called twice."""
        with self._lock:
            node, self._node = self._node, None
            lender, self._lender = self._lender, None
            self._lent.close()
            reporting, self._reporting = self._reporting, None
            former, self._former = self._former, None
        if former is not None and node is not None:
            former.announce_end()
        if lender is not None:
            lender.close()
        if node is not None:
            node.close()
        self._news.set()
        if reporting is not None and reporting is not threading.current_thread():
            reporting.join(2.0)
        self._asked.tidy()
        if node is not None:
            self._send(self.state())

    # --- requests -------------------------------------------------------------------------------------------------

    def _open(self, request: OpenNetwork) -> AnyEvent:
        with self._lock:
            if self._node is not None:
                raise ModelError(
                    f"The network is open already, at {', '.join(self._node.listening)}; close it first.",
                    kind="bad-input",
                )
            identity = self._load_identity(keyring_patience(request.lend, sys.platform))
            node = Node(identity, self._peers, request, self._news.set, self._parts)
            if request.lend:
                self._lender = ClusterWorker(node, self._news.set, request)
                self._lent.enter_context(AWAKE.held())
            self._node = node
            self._reporting = threading.Thread(target=self._report, args=(node,), name="network-state", daemon=True)
            self._reporting.start()
        if request.lend and not self._peers.all():
            node.show_code()
        self._news.set()
        return Done(id=request.id, path="", detail=", ".join(node.listening))

    def _forget(self, request_id: int, peer: str) -> AnyEvent:
        paired = self._peers.find(peer)
        self._peers.forget(paired.node_id)
        node = self._node
        if node is not None:
            node.forget(paired.node_id)
        self._news.set()
        return Done(id=request_id, path="", detail=paired.label)

    def _load_identity(self, patience_s: float | None = None) -> Identity:
        if self._identity is None:
            self._identity = load_identity(self._folder, patience_s)
            if self._identity.notice:
                self._send(Notice(text=self._identity.notice))
        return self._identity

    # --- the state ------------------------------------------------------------------------------------------------

    def state(self, request_id: int = 0) -> NetworkState:
        """The current state for a screen."""
        self._parts.observe("state")
        node, lender = self._node, self._lender
        for text in self._peers.take_notices():
            self._send(Notice(text=text))
        if node is None:
            identity = self._load_identity()
            me = NodeId(
                node_id=identity.node_id,
                name=default_name(),
                words=fingerprint_words(identity.node_id),
                key_storage=identity.storage,
            )
            return NetworkState(id=request_id, me=me, open=False, peers=self._paired_only())
        code = node.pairing.code
        return NetworkState(
            id=request_id,
            me=node.me,
            open=True,
            peers=node.table.facts(),
            code=code.text if code is not None else "",
            code_seconds=round(code.seconds_left) if code is not None else 0,
            code_tries=code.tries_left if code is not None else 0,
            code_expired=node.pairing.has_expired,
            lending=lender.facts() if lender is not None else None,
            problems=[*node.problems_now(), *([node.pairing_problem] if node.pairing_problem else [])],
        )

    def _paired_only(self) -> list[PeerFacts]:
        names = self._peers.labels(default_name())
        return [
            PeerFacts(
                node_id=peer.node_id,
                words=fingerprint_words(peer.node_id),
                name=names.get(peer.node_id) or peer.label,
                former_name=peer.former_name,
                state="paired",
                addresses=list(peer.addresses),
            )
            for peer in self._peers.all()
        ]

    def _show_if_asked(self, node: Node) -> None:
        """Show a code if another process of this account asks for one, as a service has no keys to press."""
        nonce = self._asked.take()
        if nonce is not None:
            node.show_code()
        code = node.pairing.code
        if code is None:
            self._asked.tidy()
        elif nonce is not None:
            shown = ShownCode(
                nonce=nonce,
                code=code.text,
                seconds=round(code.seconds_left),
                tries=code.tries_left,
                name=node.name,
                listening=node.listening,
            )
            self._asked.answer(shown)

    def _report(self, node: Node) -> None:
        """Send the state whenever it has changed, at most four times a second, and once a second while a code counts
        down."""
        before: NetworkState | None = None
        while self._node is node or self._node is None:
            self._news.wait(1.0)
            self._news.clear()
            if self._node is not node:
                return
            if node.lends:
                self._show_if_asked(node)
            now = self.state()
            if before is None or now != before:
                self._send(now)
                before = now
            lender = self._lender
            for text in lender.take_notices() if lender is not None else []:
                self._send(Notice(text=text))
            time.sleep(STATE_S)
