"""Parts of messages about peers on the network and about rings."""

from __future__ import annotations

from typing import Literal

import msgspec

PeerState = Literal["found", "paired", "ready", "ring", "busy", "lost", "refused"]
"""State of a peer. ``found``: announced, not paired; ``paired``: known, not reachable now; ``ready``: paired and
reachable; ``ring``: in the ring; ``busy``: lent to another head; ``lost``: was in the ring and is gone; ``refused``:
see ``problem``."""
RingMode = Literal["auto", "exact", "fast", "central"]
"""Mode of a ring. ``exact``: unweighted outputs are exchanged, and sums equal those of one machine to the bit;
``fast``: weighted sums are exchanged; ``central``: the head routes, and the others run no trunk."""
ExchangeName = Literal["auto", "tls", "socket", "envoy", "gloo", "mlx"]
"""Transport of the exchange. ``tls``: our framed socket over TLS; ``socket``: the same in plain text, authenticated
with a key per epoch; ``envoy``: a separate process with gRPC streams; ``gloo``: torch's; ``mlx``: mx.distributed's;
``auto``: the fastest allowed one, as measured."""
LoadingName = Literal["auto", "selected", "router-aided", "busy-full"]
"""Rule for the experts that a node runs in addition to its own routes'. ``selected``: none; ``router-aided``: as many
as the busiest node runs, the least recently used first (the paper's L_R); ``busy-full``: all it holds (L_B); ``auto``:
router-aided on systems that unwire idle memory."""


class RingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Options for sharing a model with other machines (:class:`engine.ipc.messages.Load`, partitioning ``ring``)."""

    nodes: list[str] = []
    """Node ids of the wanted machines; empty: every paired machine that is reachable."""
    mode: RingMode = "auto"
    exchange: ExchangeName = "auto"
    loading: LoadingName = "auto"
    overlap: bool = True
    """Whether several nodes may hold replicas of an expert where memory allows."""
    shares: dict[str, int] = {}
    """Maximum bytes of experts by node id, set by the person. Other nodes hold what their memory allows."""
    even_if_slower: bool = False
    """Whether to form the ring although one machine alone would be faster."""
    trusted: list[str] = []
    """Networks (``192.168.7.0/24``, ``10.0.0.2``) on which the person allows an exchange in plain text."""
    wait_s: float | None = None
    """Maximum seconds that an answer waits for machines while the present ones cannot hold the model; None: no
    limit."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The link in use to a peer: the fastest one measured."""

    interface: str
    address: str
    latency_s: float
    """Half a round trip of 12 KiB, in seconds."""
    bytes_per_s: float
    others: list[str] = []
    """The slower links, each as ``interface address: latency``."""
    gone: str = ""
    """A clearly faster link that was measured before and does not work now, as ``interface (latency)``; empty: none."""


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine on the network. ``name`` is empty until it is paired, as announcements are not trusted."""

    node_id: str
    """Fingerprint of its certificate, hexadecimal."""
    words: list[str] = []
    """The fingerprint in words, for comparison with those on its own screen."""
    name: str = ""
    """Unique name. If two machines have the same name, the beginning of the node id is appended."""
    former_name: str = ""
    """The machine's former name, which settings may still contain."""
    state: PeerState = "found"
    lends: bool = False
    """Whether it is reachable and lent (``join``)."""
    addresses: list[str] = []
    """``HOST:PORT``, the one in use first."""
    link: LinkFacts | None = None
    memory_total: int = 0
    memory_free: int = 0
    runtime: str = ""
    """The runtime of its shard, e.g. ``native avx512_bf16``."""
    version: str = ""
    lent_to: str = ""
    """Name of the head that uses it, in the state ``busy``."""
    problem: str = ""
    """A sentence on why it cannot be used, or, in the state ``ready``, why the ring does not use it yet."""


class NodeShard(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a planned or formed ring. ``rank`` 0 is the head."""

    rank: int
    node_id: str
    name: str
    experts: int
    """Number of (layer, expert) pairs that it holds."""
    expert_bytes: int
    trunk_bytes: int
    memory_free: int
    expected_experts: float = 0.0
    """Average number of experts that it runs per layer and token."""
    has_bytes: int = 0
    """Bytes of its shard that it has already and that are not sent."""
    gpu: str = ""
    """Name of the GPU that shares its experts; empty: none does."""
    gpu_expert_bytes: int = 0
    """Part of :attr:`expert_bytes` in the GPU's memory."""

    @property
    def bytes_for_rows(self) -> int:
        """Bytes of memory beside its weights."""
        return max(0, self.memory_free - self.trunk_bytes - self.expert_bytes + self.gpu_expert_bytes)


class RingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A ring, planned or formed."""

    epoch: str = ""
    """Id of the epoch; empty if the ring is only planned."""
    mode: RingMode
    exchange: ExchangeName
    loading: LoadingName
    nodes: list[NodeShard]
    encrypted: bool = True
    tokens_per_s: float | None = None
    """Predicted tokens per second."""
    at_best: bool = False
    """Whether the predictions are upper bounds, because some machine's overhead per layer was not measured."""
    alone_tokens_per_s: float | None = None
    """Predicted tokens per second of the best single node; None if the model fits on none, or nothing was measured."""
    exchange_s: float | None = None
    """Measured median seconds of one exchange of a decoding step."""
    reason: str = ""
    """The reason for this ring, or for using one machine instead."""
    elsewhere: bool = False
    """Whether the second node computes everything, and the head holds nothing."""


class LendingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The current work of a machine that is lent with ``join``."""

    head: str
    """Name of the head."""
    model: str
    rank: int
    nodes: int
    experts: int
    expert_bytes: int
    stage: str
    """One of ``receiving weights``, ``loading``, ``warming up``, ``ready``, ``answering``, or another in words."""
    done: int = 0
    total: int = 0
    tokens: int = 0
    """Number of tokens run since it joined."""
    busy: float = 0.0
    """Fraction of the last seconds in which it computed."""
    probe_s: float | None = None
    """Seconds of the first pass after idling, as last measured."""
    link: LinkFacts | None = None


class NodeId(msgspec.Struct, frozen=True, kw_only=True):
    """This machine."""

    node_id: str
    name: str
    listening: list[str] = []
    """``HOST:PORT`` of the control port; empty if no socket is open."""
    words: list[str] = []
    """The fingerprint in words, for comparison by two people."""
    key_storage: str = ""
    """Place of the private key: ``the system's keyring`` or a file."""
