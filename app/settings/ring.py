# ruff: noqa: RUF009 (each field is made by dataclasses.field, through setting)
"""The settings of a ring of machines, and what the engine is asked with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from app.ring_words import SHOWN_OF_ID
from app.settings.fields import GIB, SettingError, choices, setting, share, split_items
from engine.errors import ModelError
from engine.ipc.messages import (
    ExchangeName,
    LendTerms,
    LoadingName,
    NetworkState,
    OpenNetwork,
    Partitioning,
    PeerFacts,
    RingChoice,
    RingMode,
)
from engine.models.store import resolve

HEAD_NAMES = ("here", "this")
"""Names of this machine in the settings of a ring, besides its own name."""


@dataclass(frozen=True)
class RingSettings:
    """How machines are found, and how they share a model."""

    ring_mode: RingMode = setting(
        "ring", "choice", "What travels", "auto",
        "Exact: results to the bit those of one machine. Fast: an eighth of the bytes, other last bits. Central: the "
        "head routes, for unlike machines.",
        choices=choices(auto="Best for these machines", exact="Exact: every expert's result",
                        fast="Fast: weighted sums", central="Central: the head routes"),
        takes_effect="reload",
    )  # fmt: skip
    ring_exchange: ExchangeName = setting(
        "ring", "choice", "Exchange", "auto",
        "What carries the results between machines; the first measures those that are allowed and takes the fastest.",
        choices=choices(auto="Fastest that is allowed", tls="Socket, encrypted (TLS)",
                        socket="Socket, plain text on trusted networks", envoy="Envoy: its own process, gRPC",
                        gloo="gloo (torch), plain text", mlx="mx.distributed (mlx), plain text"),
        takes_effect="reload",
    )  # fmt: skip
    ring_loading: LoadingName = setting(
        "ring", "choice", "Idle experts", "auto",
        "Experts that run although no token asked for them, so that their memory stays wired (the paper's P-L_R, L_B).",
        choices=choices(**{"auto": "Where memory gets unwired", "selected": "None",
                           "router-aided": "As many as on the busiest machine (L_R)",
                           "busy-full": "All that a machine holds (L_B)"}),
        takes_effect="reload",
    )  # fmt: skip
    ring_overlap: bool = setting(
        "ring", "flag", "Overlap", True,
        "An expert may be held by several machines where memory allows: less waiting for the busiest one.",
        takes_effect="reload",
    )  # fmt: skip
    ring_even_if_slower: bool = setting(
        "ring", "flag", "Even if slower", False, "Form the ring although one machine alone would be faster.",
        takes_effect="reload",
    )  # fmt: skip
    ring_nodes: str = setting(
        "ring", "items", "Machines", "",
        "Which take part, by name or node id; empty: every paired machine that is there.",
        item="machine", takes_effect="reload",
    )  # fmt: skip
    ring_shares: str = setting(
        "ring", "items", "GiB by hand", "",
        "Memory for experts per machine, like here=8, studio=24; machines not named hold what their memory allows.",
        item="share", takes_effect="reload",
    )  # fmt: skip
    ring_trusted: str = setting(
        "ring", "items", "Trusted networks", "",
        "Where the exchange may travel unencrypted, like 192.168.7.0/24: a cable between two machines, say. Empty: "
        "everything is encrypted.",
        item="network", takes_effect="reload",
    )  # fmt: skip
    ring_peers: str = setting(
        "ring", "items", "Machines to try", "",
        "HOST:PORT of machines that are not found by themselves, where multicast is blocked.",
        item="address", takes_effect="reload",
    )  # fmt: skip
    ring_memory: float | None = setting(
        "ring", "number", "Memory to lend", None,
        "GiB that a share of a model may take here while this machine is lent (join); empty: what is free.",
        minimum=0.1, maximum=65_536.0, optional=True, takes_effect="reload",
    )  # fmt: skip
    ring_gpu_memory: float | None = setting(
        "ring", "number", "GPU memory to lend", None,
        "GiB of GPU memory that a share may take while this machine is lent (join); empty: half of it; 0: none.",
        minimum=0.0, maximum=65_536.0, optional=True, takes_effect="reload",
    )  # fmt: skip
    ring_give_models: bool = setting(
        "ring", "flag", "Give models", True,
        "While this machine is lent (join), paired machines may copy a model from it that they name.",
        takes_effect="reload",
    )  # fmt: skip
    ring_listen: str = setting(
        "ring", "items", "Listen at", "",
        "HOST:PORT; empty: all interfaces, port 47820 or the next that is free.",
        item="place", most=1, takes_effect="reload",
    )  # fmt: skip
    ring_name: str | None = setting(
        "ring", "text", "Name", None, "What paired machines call this one; empty: the host's name.",
        optional=True, takes_effect="reload",
    )  # fmt: skip


def open_network(
    settings: RingSettings, *, more_peers: Sequence[str] = (), lend: LendTerms | None = None
) -> OpenNetwork:
    """The request that opens the network as ``settings`` say. Its id is set when it is sent.

    ``lend``: the terms on which this machine is lent; None: it is not lent.
    """
    peers = [*split_items(settings.ring_peers), *more_peers]
    return OpenNetwork(
        id=0,
        name=settings.ring_name or "",
        listen=settings.ring_listen,
        peers=list(dict.fromkeys(peers)),
        lend=lend is not None,
        **(msgspec.structs.asdict(lend) if lend is not None else {}),
    )


def may_be_copied(model: str, partitioning: Partitioning) -> bool:
    """Is ``model`` a hub model that is not on this machine, but may be on a machine of the ring?"""
    with suppress(ModelError):
        found = resolve(model)
        return partitioning == "ring" and found.kind == "hub" and found.folder is None
    return False


def ring_choice(settings: RingSettings, network: NetworkState | None) -> RingChoice:
    """What ``settings`` ask of a ring. Names of machines become node ids, by the state of the network.

    Raises SettingError for a machine that is not known.
    """
    shares = dict(share(item) for item in split_items(settings.ring_shares))
    return RingChoice(
        nodes=[_named("ring_nodes", name, network) for name in split_items(settings.ring_nodes)],
        mode=settings.ring_mode,
        exchange=settings.ring_exchange,
        loading=settings.ring_loading,
        overlap=settings.ring_overlap,
        shares={_named("ring_shares", name, network): round(gibibytes * GIB) for name, gibibytes in shares.items()},
        even_if_slower=settings.ring_even_if_slower,
        trusted=split_items(settings.ring_trusted),
    )


def _named(key: str, name: str, network: NetworkState | None) -> str:
    """The node id of the machine ``name``, as the setting ``key`` names it. Raises SettingError, naming the setting."""
    try:
        return node_id(name, network)
    except SettingError as error:
        label = RingSettings.__dataclass_fields__[key].metadata["setting"]["label"]
        raise SettingError(f"{error}; change the setting {label} ({key} in the settings file)") from error


def node_id(name: str, network: NetworkState | None) -> str:
    """The node id of the machine that ``name`` names: its name, the one it had before, the beginning of its id, or
    ``here``. Case does not matter. Raises SettingError.
    """
    if network is None:
        raise SettingError(f"the machine {name} is not known before the network is open")
    me, wanted = network.me, name.casefold()
    if wanted in HEAD_NAMES:
        return me.node_id
    called = {me.node_id: me.name, **{peer.node_id: _alone(peer) for peer in network.peers}}
    found = (
        [node for node, own in called.items() if wanted and own.casefold() == wanted]
        or [peer.node_id for peer in network.peers if wanted in (peer.name.casefold(), peer.former_name.casefold())]
        or [node for node in called if node.startswith(wanted)]
    )
    if len(found) == 1:
        return found[0]
    if found:
        here = f", or {HEAD_NAMES[0]}" if me.node_id in found else ""
        raise SettingError(
            f"{name} names {len(found)} machines; give the beginning of a node id that only one has{here}"
        )
    known = ", ".join(filter(None, [peer.name for peer in network.peers])) or "none is paired"
    raise SettingError(f"no paired machine is called {name}; there are: {known}")


def _alone(peer: PeerFacts) -> str:
    """The machine's name without the beginning of its id, which is added where two machines have one name."""
    name, bracket, start = peer.name.removesuffix(")").rpartition(" (")
    return name if bracket and len(start) >= SHOWN_OF_ID and peer.node_id.startswith(start) else peer.name
