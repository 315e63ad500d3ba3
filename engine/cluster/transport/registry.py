"""Every exchange by its name: what a node can run, and how it is opened with the other nodes of an epoch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from engine.cluster.transport.accepting import Links
from engine.cluster.transport.connecting import connect_mesh
from engine.cluster.transport.epochs import Epoch, split_address
from engine.cluster.transport.exchange import Exchange
from engine.cluster.transport.transports import IN_PLAIN_TEXT, PREFERENCE, allowed_exchanges
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

Opening = Callable[[Links, Epoch], Exchange]


def open_exchange(name: ExchangeName, links: Links, epoch: Epoch) -> Exchange:
    """Connect the exchange ``name`` with all other nodes of ``epoch``; every one of them calls this.

    Raises ModelError (network), naming what is missing here, who is on no trusted network although the exchange is in
    plain text, or who could not be reached.
    """
    if name not in OPENINGS or not can_run(name):
        raise ModelError(f"The exchange “{name}” cannot be run on this machine: choose auto or tls.", kind="network")
    if name in IN_PLAIN_TEXT and len(epoch.members) > 1:
        # Those of other libraries cannot be asked to look at who connects, so all is decided before anything listens.
        hosts = [split_address(address)[0] for member in epoch.members for address in member.addresses[:1]]
        allowed_exchanges(name, hosts, epoch.trusted, [name])
    return OPENINGS[name](links, epoch)


def can_run(name: ExchangeName) -> bool:
    """Whether this machine has what ``name`` needs; nothing heavy is imported to find out."""
    needed = _NEEDED.get(name, ())
    return name in OPENINGS and all(importlib.util.find_spec(module) is not None for module in needed)


def available_exchanges() -> list[ExchangeName]:
    """Those that this machine can run, in the order of preference."""
    return [name for name in PREFERENCE if can_run(name)]


def _open_envoy(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.envoy_exchange import connect_envoy

    return connect_envoy(links, epoch)


def _open_gloo(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.gloo import connect_gloo

    return connect_gloo(links, epoch)


def _open_mlx(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.mlx_group import connect_mlx

    return connect_mlx(links, epoch)


OPENINGS: dict[ExchangeName, Opening] = {
    "tls": lambda links, epoch: connect_mesh(links, epoch, "tls"),
    "socket": lambda links, epoch: connect_mesh(links, epoch, "socket"),
    "envoy": _open_envoy,
    "gloo": _open_gloo,
    "mlx": _open_mlx,
}
_NEEDED: dict[ExchangeName, tuple[str, ...]] = {"envoy": ("grpc",), "gloo": ("torch",), "mlx": ("mlx",)}
