"""Sentences about a ring's plan: the decision and its reason, with numbers, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from engine.ipc.messages.ring import PeerFacts
from engine.planning.placement_planner import Shortfall
from engine.planning.units import byte_size


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f} tokens/s"


THIS_MACHINE = "this machine"
"""Name of the head in sentences, which are read on it."""


def _first(name: str) -> str:
    """``name`` as the first word of a sentence. Names of machines keep their spelling."""
    return "This machine" if name == THIS_MACHINE else name


def shortfall_sentence(short: Shortfall, names: Sequence[str], rooms: Sequence[int], by_hand: bool) -> str:
    """Sentence: the experts do not fit on the nodes."""
    room_of_each = ", ".join(f"{name} {byte_size(room)}" for name, room in zip(names, rooms, strict=True))
    out = "allow more by hand, add a machine" if by_hand else "add a machine, free memory"
    where = "this machine has" if len(names) == 1 else f"these {len(names)} machines have"
    return (
        f"{byte_size(short.missing_bytes)} are missing: the experts take {byte_size(short.needed_bytes)}, and beside "
        f"all else {where} room for {byte_size(short.room_bytes)} ({room_of_each}); {out}, or choose a smaller model."
    )


def trunk_sentence(name: str, missing: int) -> str:
    """Sentence: a node cannot hold what every node must."""
    name = _first(name)
    return (
        f"{name} lacks {byte_size(missing)} for what every machine of a ring keeps (the weights that are no experts, "
        "keys and values, and what the system needs); free memory there, shorten the context, or leave it out."
    )


def left_out_sentence(name: str, missing: int, of: str = "memory") -> str:
    """Sentence: a machine is left out for lack of ``of``, which is ``memory`` or ``disk space``."""
    return f"{name} is left out: it lacks {byte_size(missing)} of {of} for what every machine keeps and one expert."


def idle_sentence(name: str) -> str:
    """Sentence: a machine would get no expert."""
    return f"{name} is left out: the others hold all experts, and none would be its own."


def apart_sentence(name: str, other: str, why: str) -> str:
    """Sentence: a machine has no link to ``other``, which may be THIS_MACHINE."""
    link = f"The link to {name}" if other == THIS_MACHINE else f"The link between {name} and {other}"
    return f"{link} cannot be made ({why}); {name} is left out of the ring."


def full_disk_sentence(name: str, missing: int, is_head: bool = False) -> str:
    """Sentence: the disk of a node cannot take what every node is sent, or the head's what it keeps itself."""
    name = _first(name)
    if is_head:
        return f"{name} lacks {byte_size(missing)} of disk space for what every machine keeps of the model; make room."
    return (
        f"{name} lacks {byte_size(missing)} of disk space for the weights that every machine of a ring is sent; make "
        "room there, or leave it out."
    )


def share_capped_sentence(name: str, asked: int, room: int) -> str:
    name = _first(name)
    return f"{name} was to hold {byte_size(asked)} of experts, but has memory for {byte_size(room)}, which is used."


def disk_sentence(name: str, room: int) -> str:
    return f"{_first(name)} has disk space for {byte_size(room)} of experts, less than it has memory for."


def fewer_sentence(names: Sequence[str], without: float, with_them: float) -> str:
    """Sentence: some machines would make the ring slower."""
    who, them = (f"{names[0]} is", "it") if len(names) == 1 else (f"{', '.join(names)} are", "them")
    return f"{who} left out: {rate(without)} are predicted without {them}, {rate(with_them)} with {them}."


def mode_sentence(mode: str, kinds: Mapping[str, str], refused: bool = False) -> str:
    """Sentence: why central mode is used, or why another mode is not. Machines compute different bits. ``kinds``: by
    node names."""
    different = ", ".join(f"{name}: {kind or 'unknown'}" for name, kind in kinds.items())
    if refused:
        return f"Mode {mode} needs machines that compute alike ({different}); choose the mode auto or central."
    if len(set(kinds.values())) < 2:
        return "The head routes, as chosen."
    return f"The head routes for all, because the machines compute differently ({different})."


def speed_sentence(exact_s: float, fast_s: float) -> str:
    return (
        "Weighted sums are exchanged, as the wire is slow for more: a question and its answer are predicted to take "
        f"{fast_s:.1f} s instead of {exact_s:.1f} s."
    )


def loading_sentence(names: Sequence[str]) -> str:
    return f"Idle experts are kept in use, as memory gets unwired otherwise ({', '.join(names)})."


def alone_sentence(name: str, alone: float, machines: int, together: float) -> str:
    name = _first(name)
    return f"{name} alone is predicted to be faster: {rate(alone)}, {machines} machines together {rate(together)}."


def waiting_alone_sentence(nbytes: int) -> str:
    """Sentence: the head answers alone, because no weights are sent while an answer waits."""
    return (
        f"This machine goes on alone, as {byte_size(nbytes)} would have to be sent first; the ring is formed again "
        "between two questions when that pays."
    )


def waiting_together_sentence(nbytes: int) -> str:
    """Sentence: a ring answers with the weights it has, because none are sent while an answer waits."""
    return (
        f"The machines go on with the experts that they have, as {byte_size(nbytes)} would have to be sent otherwise."
    )


def change_sentence(names: Sequence[str], nbytes: int, cost_s: float | None) -> str:
    """Sentence: the ring could be formed anew, which does not pay yet. ``names``: machines that would then be in it."""
    who = (
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} there and not used yet"
        if names
        else ("The experts are not shared out anew yet")
    )
    sent = f" and {byte_size(nbytes)} sent" if nbytes else ""
    cost = f", about {max(1, round(cost_s))} s," if cost_s is not None else ""
    return (
        f"{who}: this conversation would be run again{sent}{cost} for less than that is worth; a new conversation "
        "changes it, or r on the machines screen (f8)."
    )


def elsewhere_sentence(name: str, there: float, otherwise: float, fits_here: bool) -> str:
    """Sentence: the whole model runs on another machine. ``otherwise``: as a ring, or here if it fits."""
    instead = "here or together" if fits_here else "together"
    return f"{name} computes alone, which is predicted to be faster: {rate(there)}, {instead} {rate(otherwise)}."


def faster_there_sentence(name: str, alone: float, together: float, asked: bool) -> str:
    """Sentence: a faster machine is not used. ``asked``: the person wants the ring even if it is slower."""
    instead = "without “even if slower” it computes alone" if asked else "start the chat on that machine"
    return f"{name} alone would be faster: {rate(alone)} are predicted there, {rate(together)} together; {instead}."


# --- machines that cannot share the model ----------------------------------------------------------------------------


def absent_lines(peers: Sequence[PeerFacts], wanted: Collection[str], present: Collection[str]) -> list[str]:
    """A line for each machine that was ``wanted`` and is not ``present`` (both are node ids).

    If no particular machine was wanted, there are lines only if nobody is present: one for each paired machine, or that
    none is paired yet.
    """
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
    """Reason why a paired machine cannot be in a ring of this one, and what to do."""
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
    """A sentence about a machine as a clause that follows the machine's name and a colon, without the full stop."""
    clause = sentence.removesuffix(".")
    return f"i{clause[1:]}" if clause.startswith("It ") else clause
