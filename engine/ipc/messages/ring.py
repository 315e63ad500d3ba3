"""What screen and engine say about peers on the network and the ring they form."""

from __future__ import annotations

from typing import Literal

import msgspec

PeerState = Literal["found", "paired", "ready", "ring", "busy", "lost", "refused"]
"""``found``: announced, not paired; ``paired``: known, not reachable now; ``ready``: paired and reachable; ``ring``: in
the ring; ``busy``: lent to another head; ``lost``: was in the ring and is gone; ``refused``: see ``problem``."""
RingMode = Literal["auto", "exact", "fast", "central"]
"""``exact``: un-weighted outputs are exchanged, the sums are those of one machine to the bit; ``fast``: weighted sums;
``central``: the head routes, the others run no trunk."""
ExchangeName = Literal["auto", "tls", "socket", "envoy", "gloo", "mlx"]
"""``tls``: our framed socket in TLS; ``socket``: the same in plain text with a key per epoch; ``envoy``: a process of
its own with gRPC streams; ``gloo``: torch's; ``mlx``: mx.distributed's. ``auto``: the fastest allowed, measured."""
LoadingName = Literal["auto", "selected", "router-aided", "busy-full"]
"""Which experts a node runs besides those it owns of the routes: none; as many as the busiest node runs, the least
recently used first (the paper's L_R); all it holds (L_B). ``auto``: router-aided where idle memory gets unwired."""


class RingChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is to be shared with other machines (:class:`engine.ipc.messages.Load`, partitioning ``ring``)."""

    nodes: list[str] = []
    """Node ids; empty: every paired machine that is there."""
    mode: RingMode = "auto"
    exchange: ExchangeName = "auto"
    loading: LoadingName = "auto"
    overlap: bool = True
    """Experts may be held by more than one node where memory allows."""
    shares: dict[str, int] = {}
    """By hand: node id to bytes of experts it may hold; nodes that are absent hold what memory allows."""
    even_if_slower: bool = False
    """Form the ring although one machine alone would be faster."""
    trusted: list[str] = []
    """Networks (``192.168.7.0/24``, ``10.0.0.2``) on which the person allows an exchange in plain text."""
    wait_s: float | None = None
    """Seconds that an answer waits for a machine without which nobody can hold the model; None: until it is stopped."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The link to a peer that is used: the fastest that was measured."""

    interface: str
    address: str
    latency_s: float
    """Half a round trip of 12 KiB."""
    bytes_per_s: float
    others: list[str] = []
    """The slower ones, as ``interface address: latency`` in words."""


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine on the network. ``name`` is empty until it is paired: what is announced is a hint, never trusted."""

    node_id: str
    """Fingerprint of its certificate, hexadecimal."""
    words: list[str] = []
    """The fingerprint in words, to be compared with those on its own screen."""
    name: str = ""
    """No two have the same: where two machines call themselves alike, the beginning of the id stands behind it."""
    former_name: str = ""
    """What it called itself before; settings may still name it so."""
    state: PeerState = "found"
    lends: bool = False
    """It is there and may be used by rings of others (``join``)."""
    addresses: list[str] = []
    """``HOST:PORT``, the one in use first."""
    link: LinkFacts | None = None
    memory_total: int = 0
    memory_free: int = 0
    runtime: str = ""
    """What would run its shard, e.g. ``native avx512_bf16``."""
    version: str = ""
    lent_to: str = ""
    """With the state ``busy``: name of the head that has it."""
    problem: str = ""
    """Why it cannot be used, in a sentence."""


class NodeShard(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a ring, planned or formed. ``rank`` 0 is the head."""

    rank: int
    node_id: str
    name: str
    experts: int
    """(layer, expert) pairs it holds."""
    expert_bytes: int
    trunk_bytes: int
    memory_free: int
    expected_experts: float = 0.0
    """Experts it runs per layer and token, on average."""
    has_bytes: int = 0
    """Of those bytes, what it has already and is not sent."""


class RingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A ring, planned or formed."""

    epoch: str = ""
    """Empty: only planned."""
    mode: RingMode
    exchange: ExchangeName
    loading: LoadingName
    nodes: list[NodeShard]
    encrypted: bool = True
    tokens_per_s: float | None = None
    """Predicted."""
    at_best: bool = False
    """Of some machine it is not known what a layer costs beside its weights: the predictions are upper bounds."""
    alone_tokens_per_s: float | None = None
    """Predicted for the best single node; None if the model fits on none, or nothing was measured."""
    exchange_s: float | None = None
    """Measured median of one exchange of a decoding step."""
    reason: str = ""
    """Why this ring, or why one machine is used instead."""
    elsewhere: bool = False
    """The second of the nodes computes everything by itself, and the head holds nothing."""


class LendingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that was lent with ``join`` does for a ring."""

    head: str
    """Name of the head."""
    model: str
    rank: int
    nodes: int
    experts: int
    expert_bytes: int
    stage: str
    """``receiving weights``, ``loading``, ``warming up``, ``ready``, ``answering``."""
    done: int = 0
    total: int = 0
    tokens: int = 0
    """Run since it joined."""
    busy: float = 0.0
    """Share of the last seconds in which it computed."""
    probe_s: float | None = None
    """First token after idle, as last measured."""
    link: LinkFacts | None = None


class NodeId(msgspec.Struct, frozen=True, kw_only=True):
    """This machine."""

    node_id: str
    name: str
    listening: list[str] = []
    """``HOST:PORT`` of the control port; empty: no socket is open."""
    words: list[str] = []
    """The fingerprint in words, to be compared by two people."""
    key_storage: str = ""
    """Where the private key is: ``the system's keyring`` or a file."""
