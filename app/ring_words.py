"""Machines, links and rings in words, for the commands and the screens. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.text_safety import one_line
from engine.ipc.messages import LendingFacts, LinkFacts, NetworkState, NodeShard, PeerFacts, PeerState, RingFacts
from engine.planning.units import byte_rate, byte_size

STATES: dict[PeerState, str] = {
    "found": "found, not paired",
    "paired": "paired, not reachable",
    "ready": "ready",
    "ring": "in the ring",
    "busy": "lent to another",
    "lost": "lost",
    "refused": "cannot be used",
}
SHOWN_OF_ID = 8
_SCOPE = re.compile(r"%\w+(?=\]?(:\d|$))")
"""The zone of a link-local address: the number of an interface, which has a meaning on this machine only."""
_EXCHANGES = {"mlx": "mx.distributed"}


def latency(seconds: float) -> str:
    """``85 µs``, ``1.20 ms``, ``1.5 s``"""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def link_words(link: LinkFacts) -> str:
    """``en5, 85 µs, 1.2 GB/s``; ``… until en5 (85 µs) is back`` where a faster one is gone."""
    until = f" until {link.gone} is back" if link.gone else ""
    return one_line(f"{link.interface}, {latency(link.latency_s)}, {byte_rate(link.bytes_per_s)}{until}")


def other_link(text: str) -> str:
    """A slower link as the engine describes it (``en0 192.168.1.7:47821: 450 µs``), safe to show."""
    return one_line(_SCOPE.sub("", text))


def state_words(peer: PeerFacts, *, of_head: bool = False) -> str:
    """The state of ``peer`` in words. ``of_head``: this machine is lent, and ``peer`` may be the head of a ring."""
    if peer.state == "ready" and not peer.lends:
        return "reachable" if of_head else "reachable, not lent"
    if peer.state == "busy" and peer.lent_to:
        return f"lent to {one_line(peer.lent_to)}"
    return STATES[peer.state]


def peer_address(peer: PeerFacts) -> str:
    """An address of ``peer`` that a person can type. A link-local one, valid on one cable only, is the last choice."""
    wide = [address for address in peer.addresses if not address.lower().startswith("[fe80:")]
    return one_line(_SCOPE.sub("", next(iter(wide or peer.addresses), "")))


def fingerprint(words: Sequence[str]) -> str:
    """``prism saddle cabin walrus fiddle kitchen``"""
    return " ".join(map(one_line, words))


def to_send(node: NodeShard) -> str:
    """``482 MB to send``; ``up to`` in a plan, because a node is asked for its weights only when the ring is formed."""
    held = node.trunk_bytes + node.expert_bytes
    if not node.rank or held <= node.has_bytes:
        return ""
    return f"{'' if node.has_bytes else 'up to '}{byte_size(held - node.has_bytes)} to send"


def gpu_words(node: NodeShard) -> str:
    """``8.1 GB of them on NVIDIA GeForce RTX 4070``; empty where no GPU shares the node's experts."""
    return f"{byte_size(node.gpu_expert_bytes)} of them on {one_line(node.gpu)}" if node.gpu else ""


def short_id(node_id: str) -> str:
    """The beginning of a node id: enough to tell machines apart, and short enough to type."""
    return one_line(node_id[:SHOWN_OF_ID])


def machine_name(peer: PeerFacts | NodeShard) -> str:
    """The machine's name; the beginning of its id if it is not paired, as its name is not known then."""
    return one_line(peer.name) or short_id(peer.node_id)


def place_words(facts: LendingFacts) -> str:
    """``node 2 of 3``: people count from one, and the head is the first."""
    return f"node {facts.rank + 1} of {facts.nodes}"


def ring_name(ring: RingFacts, gone: Sequence[str] = ()) -> str:
    """``ring of 3 · tls, encrypted``.

    With machines that are ``gone``: ``ring of 3, studio is gone``. With one other machine that computes everything:
    ``computed by studio``.
    """
    if len(ring.nodes) < 2:
        return "no ring: this machine alone"
    if ring.elsewhere:
        name = machine_name(ring.nodes[1])
        return f"{name} is gone" if gone else f"computed by {name}"
    if gone:
        return f"ring of {len(ring.nodes)}, {', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    return f"ring of {len(ring.nodes)} · {exchange_words(ring)}"


def away(ring: RingFacts | None, state: NetworkState | None) -> tuple[str, ...]:
    """Names of the machines of ``ring`` that do not answer any more."""
    if ring is None or state is None or not state.open or len(ring.nodes) < 2:
        return ()
    peers = {peer.node_id: peer for peer in state.peers}
    others = [node for node in ring.nodes if node.node_id != state.me.node_id]
    return tuple(
        machine_name(node)
        for node in others
        if (peer := peers.get(node.node_id)) is None or peer.state not in ("ring", "ready")
    )


def away_lines(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """A line for each machine of a ring that went away or came back. ``before`` and ``now``: names of those away."""
    gone = [f"{name} is gone. The next answer comes from a ring without it." for name in now if name not in before]
    return [*gone, *[f"{name} is back." for name in before if name not in now]]


def exchange_words(ring: RingFacts) -> str:
    """``tls, encrypted`` or ``gloo, plain text``; of a planned ring, ``the fastest exchange``."""
    if ring.exchange == "auto":
        return "the fastest exchange"
    name = _EXCHANGES.get(ring.exchange, ring.exchange)
    return f"{name}, {'encrypted' if ring.encrypted else 'plain text'}"


def how_it_runs(ring: RingFacts) -> list[str]:
    """The mode, the exchange with its time, and the idle experts, in words."""
    if ring.elsewhere:
        return ["sends tokens, receives logits", "encrypted"]
    took = f" ({latency(ring.exchange_s)} each)" if ring.exchange_s is not None else ""
    loading = {"selected": "no idle experts run", "router-aided": "idle experts: router-aided",
               "busy-full": "idle experts: all", "auto": ""}[ring.loading]  # fmt: skip
    return [part for part in (f"{ring.mode} mode", f"{exchange_words(ring)}{took}", loading) if part]


def speed_words(ring: RingFacts, figure: str, alone: str) -> str:
    """The predicted speed beside that of one machine. ``figure`` and ``alone``: the two speeds as text."""
    if ring.tokens_per_s is None:
        return "no speed is predicted"
    about = roughly(ring)
    if ring.elsewhere:
        return f"{about} {figure}"
    if ring.alone_tokens_per_s is None:
        return f"{about} {figure}; no machine could run it alone"
    return f"{about} {figure}; the best machine alone {'up to ' * ring.at_best}{alone}"


def roughly(ring: RingFacts) -> str:
    """``about``; ``up to`` where the prediction lacks a time that is not known."""
    return "up to" if ring.at_best else "about"


def is_slower(ring: RingFacts) -> bool:
    """Whether one machine alone is predicted to be at least as fast as the machines together."""
    return (
        not ring.elsewhere
        and ring.tokens_per_s is not None
        and ring.alone_tokens_per_s is not None
        and ring.alone_tokens_per_s >= ring.tokens_per_s
    )
