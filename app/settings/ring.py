# ruff: noqa: RUF009 (each field is made by dataclasses.field, through _setting)
"""The settings of a ring of machines, and what the engine is asked with them."""

from __future__ import annotations

import functools
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
from engine.models.store.local_models import resolve

HEAD_NAMES = ("here", "this")
"""Names of this machine in the settings of a ring, besides its own name."""


_setting = functools.partial(setting, "ring", takes_effect="reload")


@dataclass(frozen=True)
class RingSettings:
    """Settings for finding machines, and for sharing a model with them."""

    ring_mode: RingMode = _setting(
        "choice", "Ring mode", "auto",
        "Exact sends each expert's result: the answer equals that of one machine to the last bit. Fast sends sums: an "
        "eighth of the data, and the last bits may differ. Central leaves the routing to the head, for unequal "
        "machines.",
        choices=choices(auto="Best for these machines", exact="Exact: each expert's result",
                        fast="Fast: weighted sums", central="Central: the head routes"),
    )  # fmt: skip
    ring_exchange: ExchangeName = _setting(
        "choice", "Exchange", "auto",
        "How machines exchange results. The first choice measures what is allowed and takes the fastest.",
        choices=choices(auto="Fastest that is allowed", tls="Socket, encrypted (TLS)",
                        socket="Socket, plain text on trusted networks", envoy="Envoy: its own process, gRPC",
                        gloo="gloo (torch), plain text", mlx="mx.distributed (mlx), plain text"),
    )  # fmt: skip
    ring_loading: LoadingName = _setting(
        "choice", "Idle experts", "auto",
        "Experts that run although no token chose them, so that the system keeps their memory wired (L_R and L_B in "
        "the paper).",
        choices=choices(**{"auto": "Where memory gets unwired", "selected": "None",
                           "router-aided": "As many as on the busiest machine (L_R)",
                           "busy-full": "All experts of a machine (L_B)"}),
    )  # fmt: skip
    ring_overlap: bool = _setting(
        "flag", "Replicas", True,
        "Several machines may hold the same expert where memory allows. They wait less for the busiest machine.",
    )  # fmt: skip
    ring_even_if_slower: bool = _setting(
        "flag", "Even if slower", False, "Form the ring even if one machine alone would be faster.",
    )  # fmt: skip
    ring_nodes: str = _setting(
        "items", "Machines", "",
        "Names or node ids of the machines that take part. Empty: every paired machine that can be reached.",
        item="machine",
    )  # fmt: skip
    ring_shares: str = _setting(
        "items", "Expert memory", "",
        "Memory for experts on each machine in GiB, such as here=8, studio=24. Other machines use what is free.",
        item="share",
    )  # fmt: skip
    ring_trusted: str = _setting(
        "items", "Trusted networks", "",
        "Networks on which the exchange may be unencrypted, such as 192.168.7.0/24 for a cable between two machines. "
        "Empty: everything is encrypted.",
        item="network",
    )  # fmt: skip
    ring_peers: str = _setting(
        "items", "Addresses to try", "",
        "HOST:PORT of machines that are not found automatically because the network blocks multicast.",
        item="address",
    )  # fmt: skip
    ring_memory: float | None = _setting(
        "number", "Memory to lend", None,
        "Memory in GiB that a model may use here while this machine is lent. Empty: all that is free.",
        minimum=0.1, maximum=65_536.0, optional=True,
    )  # fmt: skip
    ring_gpu_memory: float | None = _setting(
        "number", "GPU memory to lend", None,
        "GPU memory in GiB that a model may use here while this machine is lent; 0: none. Empty: half of it.",
        minimum=0.0, maximum=65_536.0, optional=True,
    )  # fmt: skip
    ring_give_models: bool = _setting(
        "flag", "Offer models", True,
        "Paired machines may copy models from this machine while it is lent.",
    )  # fmt: skip
    ring_listen: str = _setting(
        "items", "Listen on", "",
        "HOST:PORT on which other machines reach this one. Empty: all interfaces, port 47820 or the next free one.",
        item="place", most=1,
    )  # fmt: skip
    ring_name: str | None = _setting(
        "text", "Name", None, "This machine's name on paired machines. Empty: the host name.", optional=True,
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
    """Whether ``model`` is a hub model that is not on this machine, but may be on a machine of the ring."""
    with suppress(ModelError):
        found = resolve(model)
        return partitioning == "ring" and found.kind == "hub" and found.folder is None
    return False


def ring_choice(settings: RingSettings, network: NetworkState | None) -> RingChoice:
    """The ring options of ``settings``. Names of machines become node ids, by the state of the network.

    Raises SettingError for an unknown machine.
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
    """The node id of the machine ``name``, as named in the setting ``key``. Raises SettingError, naming the setting."""
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
    node_ids = (
        [node for node, own in called.items() if wanted and own.casefold() == wanted]
        or [peer.node_id for peer in network.peers if wanted in (peer.name.casefold(), peer.former_name.casefold())]
        or [node for node in called if node.startswith(wanted)]
    )
    if len(node_ids) == 1:
        return node_ids[0]
    if node_ids:
        here = f", or {HEAD_NAMES[0]}" if me.node_id in node_ids else ""
        raise SettingError(
            f"{name} names {len(node_ids)} machines; give the beginning of a node id that only one has{here}"
        )
    known = ", ".join(filter(None, [peer.name for peer in network.peers])) or "none is paired"
    raise SettingError(f"no paired machine is called {name}; there are: {known}")


def _alone(peer: PeerFacts) -> str:
    """The machine's name without the beginning of its id, which is added where two machines have one name."""
    name, bracket, start = peer.name.removesuffix(")").rpartition(" (")
    return name if bracket and len(start) >= SHOWN_OF_ID and peer.node_id.startswith(start) else peer.name
