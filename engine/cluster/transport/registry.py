"""All transports of the exchange in one table: what each needs, which may be used between some nodes, and the
choice."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.cluster.transport.accepting import Links
from engine.cluster.transport.connecting import connect_mesh
from engine.cluster.transport.epochs import Epoch, check_trusted, in_networks, split_address
from engine.cluster.transport.exchange import Exchange
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

TIE = 0.05
"""Relative difference below which two medians count as equal."""
MARGIN = 0.5
"""Relative difference by which ``tls`` may be slower and is still chosen: in a busy moment the order of medians says
little, and the choice is kept for as long as the ring lasts."""


@dataclass(frozen=True)
class ExchangeTransport:
    """One way to carry the exchange. ``open`` connects it with all other nodes of an epoch."""

    open: Callable[[Links, Epoch], Exchange]
    needs: tuple[str, ...] = ()
    """Modules that must be installed."""
    plain_text: bool = False
    """Whether it is allowed on trusted networks only."""
    runtime: str = ""
    """Runtime that brings its library; empty for our own transports."""
    in_step_only: bool = False
    """Whether it is unfit for central mode, in which nodes wait between questions.

    gloo gives up a silent peer, and mlx's ring spins."""
    spins: bool = False
    """Whether waiting takes a whole core of the waiting node."""


def _open_envoy(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.envoy import connect_envoy

    return connect_envoy(links, epoch)


def _open_gloo(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.gloo import connect_gloo

    return connect_gloo(links, epoch)


def _open_mlx(links: Links, epoch: Epoch) -> Exchange:
    from engine.cluster.transport.mlx_group import connect_mlx

    return connect_mlx(links, epoch)


TRANSPORTS: Mapping[ExchangeName, ExchangeTransport] = {
    "tls": ExchangeTransport(lambda links, epoch: connect_mesh(links, epoch, "tls")),
    "socket": ExchangeTransport(lambda links, epoch: connect_mesh(links, epoch, "socket"), plain_text=True),
    "mlx": ExchangeTransport(_open_mlx, needs=("mlx",), plain_text=True, runtime="mlx", in_step_only=True, spins=True),
    "envoy": ExchangeTransport(_open_envoy, needs=("grpc",)),
    "gloo": ExchangeTransport(_open_gloo, needs=("torch",), plain_text=True, runtime="torch", in_step_only=True),
}
"""The transports by name. On a tie the earlier one is chosen: encrypted, then fewer processes and ways to fail."""


def open_exchange(name: ExchangeName, links: Links, epoch: Epoch) -> Exchange:
    """Connect the exchange ``name`` with all other nodes of ``epoch``. Every one of them calls this.

    Raises ModelError (network), naming what is missing here, which node is on no trusted network although the exchange
    is in plain text, or which node could not be reached.
    """
    if not can_run(name):
        raise ModelError(f"The exchange “{name}” cannot be run on this machine: choose auto or tls.", kind="network")
    if TRANSPORTS[name].plain_text and len(epoch.members) > 1:
        # Other libraries cannot be made to check who connects, so this is decided before anything listens.
        hosts = [split_address(address)[0] for member in epoch.members for address in member.addresses[:1]]
        check_trusted(name, hosts, epoch.trusted)
    return TRANSPORTS[name].open(links, epoch)


def can_run(name: ExchangeName) -> bool:
    """Whether this machine has what ``name`` needs. Nothing heavy is imported to find out."""
    return name in TRANSPORTS and all(importlib.util.find_spec(module) is not None for module in TRANSPORTS[name].needs)


def available_exchanges() -> list[ExchangeName]:
    """The exchanges that this machine can run, in the order of preference."""
    return [name for name in TRANSPORTS if can_run(name)]


def allowed_exchanges(
    wanted: ExchangeName,
    addresses: Iterable[str],
    trusted: Sequence[str],
    available: Sequence[ExchangeName],
    runtime: str | None = None,
    together: bool = False,
) -> list[ExchangeName]:
    """The exchanges that may be tried between the machines at ``addresses`` (IP addresses of all nodes).

    Plain text is allowed only if every address is on a ``trusted`` network. ``available``: exchanges that every node
    can run. With ``runtime`` named, auto leaves out those of another runtime's library. ``together``: some nodes are
    processes of one machine, where a waiting node must leave the cores to the others, so auto leaves out those that
    spin.

    Raises ModelError if ``wanted`` is not allowed or not available.
    """
    hosts = list(addresses)
    if wanted == "auto":
        outside = any(not in_networks(address, trusted) for address in hosts)

        def fits(transport: ExchangeTransport) -> bool:
            of_runtime = runtime is None or transport.runtime in ("", runtime)
            return of_runtime and not (outside and transport.plain_text) and not (together and transport.spins)

        return [name for name, transport in TRANSPORTS.items() if name in available and fits(transport)]
    if wanted in TRANSPORTS and TRANSPORTS[wanted].plain_text:
        check_trusted(wanted, hosts, trusted)
    if wanted not in available:
        raise ModelError(
            f"The exchange “{wanted}” is not available on every node of this ring: choose auto or tls.", kind="network"
        )
    return [wanted]


def choose_exchange(medians: Mapping[ExchangeName, float]) -> ExchangeName:
    """The exchange with the smallest median (seconds); among those within :data:`TIE` of it, the preferred one.

    ``tls`` is chosen unless another is faster by :data:`MARGIN`. Raises ModelError if none was measured.
    """
    if not medians:
        raise ModelError("No exchange could be connected between the nodes.", kind="network")
    fastest = min(medians.values())
    if "tls" in medians and medians["tls"] <= fastest * (1 + MARGIN):
        return "tls"
    equal = [name for name in TRANSPORTS if name in medians and medians[name] <= fastest * (1 + TIE)]
    return equal[0]
