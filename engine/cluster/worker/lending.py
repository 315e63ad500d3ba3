"""A machine lent with ``join``: what heads may ask of it, one head and one epoch at a time."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from discovery.identity import short
from discovery.names import plain_text
from engine.cluster.epoch_links import EpochLinks, connect_epoch, epoch_of, rehearsal_of
from engine.cluster.membership.control_messages import (
    LENDING,
    Connected,
    DataPiece,
    EmptyBody,
    EndEpoch,
    EpochSpec,
    Forming,
    Linked,
    LinksTried,
    LoadShard,
    MeasuredLink,
    Received,
    StopPass,
    TryLinks,
    WantedFacts,
    Wants,
    check_spec,
)
from engine.cluster.membership.heartbeat import FORMING
from engine.cluster.membership.links import measure_best, try_own
from engine.cluster.membership.measuring_node import measure_node, torch_gpu
from engine.cluster.membership.node import LentState, Node
from engine.cluster.membership.server import Caller, RpcMethod
from engine.cluster.transport.addresses import as_dialled
from engine.cluster.transport.epochs import CONNECT_S, check_certificate
from engine.cluster.transport.exchange import RingProtocolError
from engine.cluster.transport.registry import available_exchanges
from engine.cluster.weights.shard_store import Need, ShardStore
from engine.cluster.weights.transfer import OFFER_LIMIT, Offer, decode_offer, encode_wanted
from engine.cluster.weights.weight_fingerprint import held_of, reusable_bytes, why_unlike
from engine.cluster.worker.follower_work import Following, gpu_shard_bytes, lent_gpu, lent_threads, shard_bytes
from engine.cluster.worker.model_provider import ModelProvider
from engine.errors import Cancelled, ModelError
from engine.ipc.messages import LendingFacts, LendTerms
from engine.models.folders.weight_layout import layout_of
from engine.planning.ring_nodes import NodeFacts
from engine.planning.units import byte_size
from engine.system.locations import locate

RESERVED_S = 60.0
"""Seconds between two calls of a head that does not say that it forms, after which another one may come."""
VOUCHED_S = 60.0
"""Seconds for which another node may measure its link to this one after the head vouched for it."""
WATCH_S = 0.2
REPORT_S = 0.25
"""Seconds between two reports of loading at least."""


class ClusterWorker:
    """Serves a head on the ``terms`` of this machine's person. ``changed`` is called when a screen has news.

    ``connect_s``: seconds for which the other nodes' command links are waited for.
    """

    def __init__(
        self,
        node: Node,
        changed: Callable[[], None] = lambda: None,
        terms: LendTerms | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._node = node
        self._connect_s = connect_s
        self._changed = changed
        self._terms = terms or LendTerms()
        self._lock = threading.RLock()
        self._head = ""
        self._heard = 0.0
        self._spec: EpochSpec | None = None
        self._links: EpochLinks | None = None
        self._offered: Offer | None = None
        self._need: Need | None = None
        self._following: Following | None = None
        self._broken: list[str] = []
        """Node ids to which its links of the last epoch broke."""
        self._stage = ""
        self._done = self._total = 0
        self._shard_bytes = 0
        """Bytes of the experts that this node is to hold."""
        self._vouched: dict[str, tuple[bytes, float]] = {}
        self._unwanted: set[str] = set()
        """Machines that were forgotten here. No head brings them back before they are paired again."""
        self._transferring = threading.Lock()
        """Held during a transfer. A head that starts over must wait for its broken transfer, which still writes what
        has arrived."""
        self._closed = threading.Event()
        self._notices: list[str] = []
        answers: dict[str, Callable[..., object]] = {
            "Facts": self._facts,
            "MeasureLinks": self._measure_links,
            "TryLinks": self._try_links,
            "Offer": self._offer,
            "Receive": self._receive,
            "Connect": self._connect,
            "Form": self._form,
            "StopPass": self._stop_pass,
            "End": self._end,
            **ModelProvider(node, self._terms.give_models, self._notify).answers,
        }
        node.add_methods({name: RpcMethod(LENDING[name][0], answers[name], LENDING[name][1]) for name in LENDING})
        node.on_forgotten(self._forgotten)
        node.vouched = self._vouched_for
        node.lent = self.lent
        self._watching = threading.Thread(target=self._watch, name="lending-watch", daemon=True)
        self._watching.start()

    # --- for the screen and the beats -----------------------------------------------------------------------------

    def lent(self) -> LentState:
        with self._lock:
            broken = self._following.broken if self._following is not None else self._broken
            return LentState(self._head, self._spec.epoch if self._spec else "", self._stage, tuple(broken))

    def facts(self) -> LendingFacts | None:
        """Facts about the current head; None while the machine is lent to nobody."""
        with self._lock:
            spec, following = self._spec, self._following
            if not self._head:
                return None
            mine = spec.placement.count_of(spec.rank) if spec else 0
            held = self._offered.held if self._offered else {}
            warming = following.warming if following else None
            return LendingFacts(
                head=self._node.table.name_of(self._head),
                model=plain_text(
                    spec.options.model if spec else self._offered.identity.name if self._offered else "", 100
                ),
                rank=spec.rank if spec else 0,
                nodes=spec.placement.nodes if spec else 0,
                experts=mine or sum(len(experts) for experts in held.values()),
                expert_bytes=following.expert_bytes if following else self._shard_bytes,
                stage=self._stage_now(),
                done=warming[0] if warming else self._done,
                total=warming[1] if warming else self._total,
                tokens=following.tokens if following else 0,
                busy=following.busy() if following else 0.0,
                probe_s=following.probe_s if following else None,
                link=following.link if following else spec.link if spec else None,
            )

    def take_notices(self) -> list[str]:
        """Lines for the person since the last call."""
        with self._lock:
            taken, self._notices = self._notices, []
        return taken

    def _notify(self, line: str) -> None:
        with self._lock:
            self._notices = [*self._notices[-4:], line]
        self._changed()

    def _stage_now(self) -> str:
        if self._following is not None and self._following.warming is not None and self._stage == "ready":
            return "warming up"
        if self._following is not None and self._stage in ("ready", "answering"):
            return "answering" if self._following.busy() > 0 else "ready"
        return self._stage

    def close(self) -> None:
        """Leave the ring; may be called twice."""
        self._closed.set()
        self.release("this machine leaves")
        if self._watching is not threading.current_thread():
            self._watching.join(2.0)

    def release(self, why: str = "", only: Following | None = None) -> None:
        """End the current epoch, if any: close its links and unload the shard.

        ``why``: what went wrong, if anything did. ``only``: nothing is done if another one has taken its place
        meanwhile.
        """
        with self._lock:
            links, following = self._links, self._following
            if only is not None and only is not following:
                return
            if following is not None and following.failed_here:
                # The notified head may end the epoch before this machine notices its own failure.
                why = following.ended or why
            self._broken = following.broken if following is not None else self._broken
            over = "" if self._spec is None else self._end_line(why)
            self._links = self._following = self._spec = self._offered = self._need = None
            self._head, self._stage, self._done, self._total = "", "", 0, 0
            self._vouched = {}
            self._shard_bytes = 0
            if over:
                self._notices = [*self._notices[-4:], over]
        if links is not None:
            links.close()
        if following is not None:
            following.close()
        self._changed()

    def _end_line(self, why: str) -> str:
        ran = self._following.tokens if self._following is not None else 0
        after = f" after {ran:,} token{'' if ran == 1 else 's'}" if ran else ""
        because = f": {why.rstrip('.')}" if why else ""
        return f"The ring of {self._node.table.name_of(self._head)} is over{after}{because}."

    # --- whose it is ----------------------------------------------------------------------------------------------

    def _free_for(self, caller: Caller) -> None:
        """Raises ModelError while another head has this machine."""
        with self._lock:
            if self._head not in ("", caller.node_id):
                raise ModelError(f"{self._node.name} is lent to another head at this moment.", kind="network")

    def _vouched_for(self, node_id: str) -> bytes | None:
        certificate, until = self._vouched.get(node_id, (None, 0.0))
        return certificate if time.monotonic() < until else None

    def _take(self, caller: Caller) -> None:
        """Belong to ``caller`` from now on. Raises ModelError while another head has this machine."""
        with self._lock:
            self._free_for(caller)
            news = self._head != caller.node_id
            self._head, self._heard = caller.node_id, time.monotonic()
        if news:
            self._changed()

    def _forgotten(self, node_id: str) -> None:
        with self._lock:
            self._unwanted.add(node_id)
            self._vouched = {}
            members = [one.node_id for one in self._spec.members] if self._spec is not None else []
        if node_id == self.lent().head:
            self.release("its head is not paired with this machine any more")
        elif node_id in members:
            self.release("a machine in it was forgotten here")

    def _check_wanted(self, node_ids: Iterable[str]) -> None:
        """Raises ModelError if one of these was forgotten here, and not paired again."""
        with self._lock:
            self._unwanted = {one for one in self._unwanted if not self._node.table.paired(one)}
            unwanted = self._unwanted & set(node_ids)
        if unwanted:
            raise ModelError(
                f"The person at {self._node.name} has forgotten {', '.join(map(short, sorted(unwanted)))}: form the "
                "ring without one of the two, or pair them again.",
                kind="network",
            )

    def _watch(self) -> None:
        """End an epoch whose head is gone, and free a machine whose head began to form and never came back."""
        while not self._closed.wait(WATCH_S):
            with self._lock:
                head, spec, idle = self._head, self._spec, time.monotonic() - self._heard
                following = self._following
            if not head:
                continue
            watch, forming = self._node.table.watch(head), self._is_forming(head)
            if watch is not None:
                watch.follow()
                watch.tolerant = forming and idle < RESERVED_S
            view = self._node.table.view(head)
            if view is None or not view.alive:
                self.release("its head is gone")
            elif spec is None and idle > RESERVED_S and not forming:
                self.release("its head formed no ring")
            elif following is not None and following.ended is not None:
                self.release(following.ended, only=following)

    def _is_forming(self, head: str) -> bool:
        """Whether the head says that it forms. It may send weights to others for hours meanwhile."""
        view = self._node.table.view(head)
        return view is not None and view.load is not None and view.load.stage == FORMING

    def _go_on(self, stage: str, done: int = 0, total: int = 0) -> None:
        with self._lock:
            self._stage, self._done, self._total, self._heard = stage, done, total, time.monotonic()
        self._changed()

    # --- what a head asks -----------------------------------------------------------------------------------------

    def _facts(self, caller: Caller, wanted: WantedFacts) -> NodeFacts:
        self._free_for(caller)
        facts = self._node.reported(measure_node(wanted, lent_threads(self._terms, wanted.threads)))
        has, trunk = held_of(wanted.weights, caller.node_id)
        exchanges = [str(name) for name in available_exchanges()]
        disk = (facts.disk_free or 0) + reusable_bytes(wanted.weights, wanted.family, caller.node_id)
        return msgspec.structs.replace(
            facts,
            exchanges=exchanges,
            has=has,
            has_trunk=trunk,
            disk_free=disk,
            memory_lent=self._terms.lend_memory,
            gpu=lent_gpu(facts.gpu, self._terms),
        )

    def _measure_links(self, caller: Caller, linked: Linked) -> MeasuredLink:
        self._free_for(caller)
        self._check_wanted([linked.node_id])
        check_certificate(linked.node_id, linked.certificate)
        if not linked.addresses:
            self._vouch([linked])
            return MeasuredLink(link=None)
        addresses = as_dialled(linked.addresses)
        found = measure_best(self._node.links, linked.epoch, linked.node_id, linked.certificate, addresses)
        return MeasuredLink(link=found)

    def _try_links(self, caller: Caller, wanted: TryLinks) -> LinksTried:
        self._free_for(caller)
        names, refused = {}, {}
        for link in wanted.links:
            try:
                self._check_wanted([link.node_id])
            except ModelError as error:
                refused[link.node_id] = str(error).rstrip(".")
            if self._node.table.paired(link.node_id):
                names[link.node_id] = self._node.table.name_of(link.node_id)
        links = [link for link in wanted.links if link.node_id not in refused]
        self._vouch(links)
        tried = try_own(self._node.links, links, self._closed, names)
        return msgspec.structs.replace(tried, failed={**tried.failed, **refused})

    def _vouch(self, links: Sequence[Linked]) -> None:
        """Trust the machines that the head vouches for, and no others any more."""
        with self._lock:
            self._vouched = {one.node_id: (one.certificate, time.monotonic() + VOUCHED_S) for one in links}

    def _offer(self, caller: Caller, pieces: Iterator[DataPiece]) -> Wants:
        self._node.parts.observe("offered", caller.node_id)
        self._take(caller)
        self._leave_epoch_before()
        data = bytearray()
        for piece in pieces:
            data += piece.data
            if len(data) > OFFER_LIMIT:
                raise RingProtocolError(f"An offer of over {OFFER_LIMIT} bytes is none.")
        offered = decode_offer(bytes(data))
        unlike = why_unlike(offered.identity, self._node.name, self._node.table.name_of(caller.node_id))
        if unlike is not None:
            raise ModelError(unlike, kind="bad-input")
        self._go_on("comparing weights")
        with self._one_transfer():
            need = ShardStore(locate("models"), caller.node_id).need(offered, self._progress(caller))
            with self._lock:
                self._offered, self._need = offered, need
        return Wants(wanted=encode_wanted(need.wanted), nbytes=need.nbytes, has_bytes=need.has_bytes)

    def _leave_epoch_before(self) -> None:
        """End the former epoch, as its head forms anew. This machine may have been cut off and missed the end."""
        with self._lock:
            links, following = self._links, self._following
            self._links = self._following = self._spec = None
        if links is not None:
            links.close()
        if following is not None:
            following.close()

    def _receive(self, caller: Caller, pieces: Iterator[DataPiece]) -> Received:
        self._take(caller)
        with self._lock:
            offered, need = self._offered, self._need
        if offered is None or need is None:
            raise ModelError("Weights came that nobody offered; form the ring again.", kind="network")
        store = ShardStore(locate("models"), caller.node_id)

        def chunks() -> Iterator[bytes]:
            for piece in pieces:
                self._node.parts.observe("piece", len(piece.data))
                yield piece.data

        with self._one_transfer():
            try:
                folder = store.receive(
                    offered, need.wanted, chunks(), self._progress(caller), lambda: not caller.active()
                )
            finally:
                self._node.parts.observe("received", caller.node_id)
            with self._lock:
                self._need = Need(folder, (), 0, offered.nbytes)
        return Received(nbytes=need.nbytes)

    @contextlib.contextmanager
    def _one_transfer(self) -> Iterator[None]:
        if not self._transferring.acquire(timeout=RESERVED_S):
            raise ModelError(f"{self._node.name} still writes what was sent before; form the ring again.", "disk")
        try:
            yield
        finally:
            self._transferring.release()

    def _connect(self, caller: Caller, spec: EpochSpec) -> Connected:
        check_spec(spec)
        mine = spec.members[spec.rank].node_id
        if mine != self._node.identity.node_id or spec.members[0].node_id != caller.node_id:
            raise RingProtocolError("An epoch names another head than the caller, or another node than this one.")
        if spec.version != self._node.version:
            raise ModelError(
                f"The head has privatellm {plain_text(spec.version, 32)} and {self._node.name} has "
                f"{self._node.version}; install the same version on both.",
                kind="network",
            )
        self._check_wanted(member.node_id for member in spec.members)
        for member in spec.members:
            check_certificate(member.node_id, member.certificate)
        self._take(caller)
        self._check_lent(spec)
        paired = {member.rank: member.node_id for member in spec.members if self._node.table.paired(member.node_id)}
        names = {rank: self._node.table.name_of(node_id) for rank, node_id in paired.items()}
        links = EpochLinks(epoch_of(spec, names))
        with self._lock:
            before, following = self._links, self._following
            self._links, self._following, self._spec, self._broken = links, None, spec, []
            self._shard_bytes = self._bytes_of(spec)
        if before is not None:
            before.close()
        if following is not None:
            following.close()
        self._go_on("connecting")
        try:
            rehearsal = rehearsal_of(spec, lent_threads(self._terms, spec.options.cpu_threads))
            commands = spec.mode != "central"
            connect_epoch(self._node.links, links, spec.exchanges, commands, rehearsal, self._connect_s)
        except BaseException:
            links.close()
            raise
        return Connected(
            medians={str(name): seconds for name, seconds in links.medians.items()},
            problems={str(name): text[:300] for name, text in links.problems.items()},
        )

    def _form(self, caller: Caller, wanted: LoadShard) -> Iterator[Forming]:
        """Load in a separate thread, and report its progress."""
        with self._lock:
            spec, links, need = self._spec, self._links, self._need
        if spec is None or links is None or spec.epoch != wanted.epoch:
            raise ModelError("The epoch is over; form the ring again.", kind="network")
        queued: queue.SimpleQueue[Forming | BaseException] = queue.SimpleQueue()
        stop = threading.Event()

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if stop.is_set():
                raise Cancelled("The head gave up forming.")
            queued.put(Forming(stage=stage, done=done, total=total, unit=unit))

        def load() -> None:
            try:
                folder = self._folder(spec, need)
                installed, observe = self._node.runtimes(), self._node.parts.observe
                following = Following(
                    spec,
                    self._node.links,
                    links,
                    wanted.exchange,
                    folder,
                    progress,
                    self._terms,
                    installed,
                    self._notify,
                    observe,
                )
                with self._lock:
                    current = self._links is links and not stop.is_set()
                    if current:
                        self._following = following
                if not current:
                    following.close()
                    raise Cancelled("The epoch ended while its share was loaded.")
                following.start()
                queued.put(following.ready())
            except BaseException as error:
                queued.put(error)

        threading.Thread(target=load, name="loading a shard", daemon=True).start()
        yield from self._reports(caller, queued, stop)

    def _reports(
        self, caller: Caller, queued: queue.SimpleQueue[Forming | BaseException], stop: threading.Event
    ) -> Iterator[Forming]:
        self._go_on("loading")
        last = 0.0
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    news = queued.get(timeout=REPORT_S)
                    if isinstance(news, BaseException):
                        raise news
                    if news.ready:
                        self._go_on("ready")
                        yield news
                        return
                    self._go_on(news.stage, news.done, news.total)
                    if time.monotonic() - last > REPORT_S:
                        last = time.monotonic()
                        yield news
                if not caller.active():
                    return
        finally:
            stop.set()

    def _end(self, caller: Caller, end: EndEpoch) -> EmptyBody:
        with self._lock:
            mine = self._head == caller.node_id and (self._spec is None or self._spec.epoch == end.epoch)
        if mine:
            self.release()
        return EmptyBody()

    def _stop_pass(self, caller: Caller, stop: StopPass) -> EmptyBody:
        with self._lock:
            mine = self._head == caller.node_id and self._spec is not None and self._spec.epoch == stop.epoch
            following = self._following
        if mine and following is not None:
            following.stop_pass(stop.number)
        return EmptyBody()

    def _check_lent(self, spec: EpochSpec) -> None:
        """Raises ModelError if the shard would take more memory than its person lends."""
        if self._terms.lend_memory is None or self._need is None:
            return
        folder = self._need.folder
        taken = shard_bytes(folder, spec)
        if taken > self._terms.lend_memory:
            gpu = torch_gpu(None, "bfloat16", None)
            taken -= gpu_shard_bytes(folder, spec, gpu, self._terms, self._node.runtimes())
        if taken > self._terms.lend_memory:
            raise ModelError(
                f"{self._node.name} lends {byte_size(self._terms.lend_memory)} of memory and its share would take "
                f"{byte_size(taken)}; form the ring again, or lend more there.",
                kind="memory",
            )

    def _bytes_of(self, spec: EpochSpec) -> int:
        """Bytes of the experts that ``spec`` gives to this node; 0 as long as their size is unknown here."""
        if self._need is None:
            return 0
        with contextlib.suppress(ModelError, OSError):
            return layout_of(self._need.folder).expert_bytes * spec.placement.count_of(spec.rank)
        return 0

    # --- small things ---------------------------------------------------------------------------------------------

    def _folder(self, spec: EpochSpec, need: Need | None) -> Path:
        if need is None:
            raise ModelError(
                f"{self._node.name} has no share of {plain_text(spec.options.model, 100)}.", kind="network"
            )
        return need.folder

    def _progress(self, caller: Caller) -> Callable[[str, int, int, str], None]:
        last = [0.0]

        def progress(stage: str, done: int, total: int, unit: str) -> None:
            if not caller.active():
                raise Cancelled("The head gave up forming.")
            if time.monotonic() - last[0] > REPORT_S or done == total:
                last[0] = time.monotonic()
                self._go_on(stage, done, total)

        return progress
