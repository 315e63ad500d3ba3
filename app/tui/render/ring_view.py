"""A ring and its machines as ``Content``, for the prediction, the screen of machines and a lent machine. Pure."""

from __future__ import annotations

import msgspec
from textual.content import Content

from app.chat.words import rate, size
from app.ring_words import (
    fingerprint,
    gpu_words,
    how_it_runs,
    is_slower,
    link_words,
    machine_name,
    peer_address,
    roughly,
    short_id,
    state_words,
    to_send,
)
from app.text_safety import one_line
from app.tui.render.formatting import bar, flowing
from engine.ipc.messages import NodeShard, PeerFacts, PeerState, RingFacts

_MUTED = "$foreground-muted"
_BAR = 10
_BESIDE = 30
"""Minimum cells for what a node holds to be shown beside its name instead of below it."""
_DOTS: dict[PeerState, tuple[str, str]] = {
    "found": ("○", "$text-accent"),
    "paired": ("○", _MUTED),
    "ready": ("●", "$text-success"),
    "ring": ("◉", "$text-primary"),
    "busy": ("◍", "$text-warning"),
    "lost": ("✗", "$text-error"),
    "refused": ("✗", "$text-error"),
}


def ring_lines(ring: RingFacts, width: int, *, me: str = "") -> list[Content]:
    """The ring in lines: its speed beside that of one machine, how it runs, what each node holds. ``me``: this
    machine's node id."""
    formed = bool(ring.epoch)
    if len(ring.nodes) < 2:
        return _one_machine(ring, "this machine alone", width)
    if ring.elsewhere:
        return _elsewhere(ring, width)
    head = [Content.styled(f"Ring of {len(ring.nodes)}{'' if formed else ', planned'}", "bold"), *_speed(ring)]
    lines = [flowing(head, width)]
    if ring.reason:
        lines.append(Content.styled(one_line(ring.reason), "$text-warning"))
    how = [*how_it_runs(ring), *_trunk(ring)]
    lines.append(flowing([Content.styled(part, _MUTED) for part in how], width))
    most = max((node.expert_bytes for node in ring.nodes), default=0)
    names = max((len(_name(node, me)) for node in ring.nodes), default=0)
    own_trunk = len({node.trunk_bytes for node in ring.nodes}) > 1
    shown = list(map(_settled, ring.nodes)) if formed else ring.nodes
    return lines + [_node(node, f"{_name(node, me):{names}}", most, width, own_trunk) for node in shown]


def _elsewhere(ring: RingFacts, width: int) -> list[Content]:
    """One other machine computes everything."""
    there = ring.nodes[1]
    shown = _settled(there) if ring.epoch else there
    name = machine_name(there)
    how = flowing([Content.styled(part, _MUTED) for part in how_it_runs(ring)], width)
    return [*_one_machine(ring, f"{name} alone", width), how, _node(shown, name, there.expert_bytes, width, True)]


def _one_machine(ring: RingFacts, who: str, width: int) -> list[Content]:
    """The lines where a ring was asked for and one machine is used instead."""
    lines = [flowing([Content.styled(f"No ring: {who}", "bold"), *_speed(ring)], width)]
    if ring.reason:
        lines.append(Content.styled(one_line(ring.reason), "$text-warning"))
    if is_slower(ring) or ring.elsewhere:
        lines.append(Content.styled("The setting “Even if slower” forms the ring anyway.", _MUTED))
    return lines


def _settled(node: NodeShard) -> NodeShard:
    """``node`` of a formed ring: it has its whole shard, and its free memory is shown with the machine instead."""
    return msgspec.structs.replace(node, memory_free=0, has_bytes=node.trunk_bytes + node.expert_bytes)


def _trunk(ring: RingFacts) -> list[str]:
    """The size of the trunk if it is the same on all nodes. Otherwise each node shows its own."""
    (first, *others) = {node.trunk_bytes for node in ring.nodes} or {0}
    return [] if others or not first else [f"trunk {size(first)} on each"]


def _speed(ring: RingFacts) -> list[Content]:
    if ring.tokens_per_s is None:
        return [Content.styled("no speed predicted", _MUTED)]
    slower = is_slower(ring)
    colour = "bold $text-warning" if slower else "bold $text-success"
    items = [Content.styled(f"{roughly(ring)} {rate(ring.tokens_per_s)}", colour)]
    if ring.elsewhere:
        return items
    if ring.alone_tokens_per_s is None:
        return [*items, Content.styled("does not fit on one machine", _MUTED)]
    alone = f"one machine alone {'up to ' * ring.at_best}{rate(ring.alone_tokens_per_s)}"
    return [*items, Content.styled(alone, "bold" if slower else _MUTED)]


def _name(node: NodeShard, me: str) -> str:
    return f"{machine_name(node)}{' (here)' if node.node_id == me else ''}"


def _node(node: NodeShard, name: str, most: int, width: int, own_trunk: bool) -> Content:
    """One node, on as many lines as it needs."""
    held = node.trunk_bytes + node.expert_bytes
    title = Content.assemble((f"{node.rank + 1} ", _MUTED), (name, "bold"), "  ", bar(node.expert_bytes, most, _BAR))
    parts = [Content(f"{node.experts:,} experts {size(node.expert_bytes)}")]
    if on_gpu := gpu_words(node):
        parts.append(Content.styled(on_gpu, _MUTED))
    if own_trunk:
        parts.append(Content.styled(f"trunk {size(node.trunk_bytes)}", _MUTED))
    if node.memory_free:
        short = held - node.gpu_expert_bytes > node.memory_free
        parts.append(Content.styled(f"of {size(node.memory_free)} free", "$text-error" if short else _MUTED))
    if node.expected_experts:
        parts.append(Content.styled(f"{node.expected_experts:.1f} run per layer", _MUTED))
    if sending := to_send(node):
        parts.append(Content.styled(sending, "$text-accent"))
    rest = max(8, width - title.cell_length - 2)
    body = flowing(parts, rest if rest >= _BESIDE else width - 2)
    indent = title.cell_length + 2 if rest >= _BESIDE else 2
    lines = body.split("\n")
    if rest < _BESIDE:
        return Content("\n").join([title, *[Content.assemble(" " * indent, line) for line in lines]])
    first, *others = lines
    return Content("\n").join(
        [Content.assemble(title, "  ", first), *[Content.assemble(" " * indent, line) for line in others]]
    )


def peer_lines(peer: PeerFacts, width: int, *, of_head: bool = False) -> Content:
    """A machine: its name and state, its link and memory, its problem. ``of_head``: this machine is lent, and ``peer``
    may be the head of its ring."""
    usable = peer.lends or of_head or peer.state != "ready"
    dot, colour = _DOTS[peer.state if usable else "paired"]
    state = state_words(peer, of_head=of_head)
    title = [Content.assemble((f"{dot} ", colour), (machine_name(peer), "bold"), ("  " + state, colour))]
    facts = []
    if peer.name:
        facts.append(short_id(peer.node_id))
    if peer.link is not None:
        facts.append(link_words(peer.link))
    elif peer.addresses:
        facts.append(peer_address(peer))
    if peer.memory_total:
        facts.append(f"{size(peer.memory_free)} of {size(peer.memory_total)} free")
    if peer.runtime:
        facts.append(one_line(peer.runtime))
    lines = [flowing(title, width)]
    if not peer.name and peer.words:
        # Before pairing these words are all that can be compared: the machine's own screen shows the same.
        lines.append(_indented(Content.styled(fingerprint(peer.words), "$text-accent"), width))
    if facts:
        body = flowing([Content.styled(fact, _MUTED) for fact in facts], max(8, width - 2))
        lines += [Content.assemble("  ", line) for line in body.split("\n")]
    if peer.problem:
        colour = _MUTED if peer.state == "ready" else "$text-error"
        lines.append(_indented(Content.styled(one_line(peer.problem), colour), width))
    return Content("\n").join(lines)


def _indented(text: Content, width: int) -> Content:
    """``text`` two cells to the right, on as many lines as it needs."""
    return Content("\n").join([Content.assemble("  ", line) for line in text.wrap(max(8, width - 2))])
