"""Why machines that are known cannot share the model now, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.ipc.messages.ring import PeerFacts


def absent_lines(peers: Sequence[PeerFacts], wanted: Collection[str], present: Collection[str]) -> list[str]:
    """A line for each machine that was ``wanted`` and is not ``present`` (both node ids). Where nobody in particular
    was wanted, lines only if nobody is there: of each paired machine, or else that others are not paired yet."""
    paired = [peer for peer in peers if peer.state != "found" and peer.node_id not in present]
    if wanted:
        lines = [why_absent(peer).removesuffix(".") for peer in paired if peer.node_id in wanted]
        return [f"{line}; the ring is formed without it." for line in lines]
    if present:
        return []
    strangers = sum(peer.state == "found" for peer in peers)
    if not paired and strangers:
        found = "A machine was found that is" if strangers == 1 else f"{strangers} machines were found that are"
        return [f"{found} not paired with this one: pair first."]
    return [why_absent(peer) for peer in paired]


def why_absent(peer: PeerFacts) -> str:
    """Why a paired machine cannot be in a ring of this one, and what to do."""
    match peer.state:
        case "busy":
            return f"{peer.name} is lent to the ring of another machine."
        case "refused":
            return f"{peer.name} cannot be used: {as_clause(peer.problem)}."
        case "ready" | "ring" if not peer.lends:
            return f"{peer.name} is there but not lent: run `privatellm join` on it."
        case "ready" | "ring":
            return f"{peer.name} could not be used this time."
    return f"{peer.name} is paired but does not answer: is `privatellm join` running on it?"


def as_clause(sentence: str) -> str:
    """What a sentence about a machine says, behind the machine's name and a colon; the full stop is the caller's."""
    clause = sentence.removesuffix(".")
    return f"i{clause[1:]}" if clause.startswith("It ") else clause
