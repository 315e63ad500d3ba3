"""The exchange over mx.distributed's ring, for networks that the person calls trusted: it sends in plain text, and lets
whoever comes first connect.

A process can have one such group in its life: a dead one cannot be made again, and a stopped peer hangs it for ever. So
the all-gathers run in a thread that is left behind then, and the next epoch of this process uses other links.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
import numpy as np

from engine.errors import ModelError
from engine.messages.ring import ExchangeName
from engine.ring.accepting import Links
from engine.ring.collective import CollectiveExchange, Gathering
from engine.ring.connecting import connect_mesh
from engine.ring.epochs import Epoch, in_networks, split_address
from engine.ring.exchange import Exchange, PeerLost

MOST_ADDRESS = 256


class _Life:
    used = False
    """Whether this process has, or had, a group."""


def available() -> bool:
    """Whether this process can still have a group."""
    return not _Life.used and bool(mx.distributed.is_available("ring"))


class MlxGathering(Gathering):
    """An all-gather of the group of this process."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def name(self) -> ExchangeName:
        return "mlx"

    @property
    def rank(self) -> int:
        return int(self._group.rank())

    @property
    def size(self) -> int:
        return int(self._group.size())

    def gather(self, block: bytearray) -> list[memoryview]:
        """See :class:`engine.ring.collective.Gathering`."""
        given = mx.array(np.frombuffer(block, np.uint8))
        try:
            found = mx.distributed.all_gather(given, group=self._group, stream=mx.cpu)
            mx.eval(found)
        except RuntimeError as error:
            raise PeerLost(f"mlx lost a node: {error}") from error
        rows = np.array(found).reshape(self.size, len(block))
        return [row.data for row in rows]

    def end(self) -> None:
        """See :class:`engine.ring.collective.Gathering`: mlx has no way to end a group."""


def connect_mlx(links: Links, epoch: Epoch) -> Exchange:
    """mx.distributed among all nodes of ``epoch``; each of them calls this. They tell their ports over authenticated
    links first.

    Raises ModelError (network) if a node of them cannot, PeerLost.
    """
    mesh = connect_mesh(links, epoch, "tls")
    try:
        address = _free_address(epoch) if available() else ""
        mesh.send([address.encode()], MOST_ADDRESS)
        addresses = [bytes(told).decode("ascii", "replace") for told in mesh.receive()]
        if not all(addresses):
            who = addresses.index("")
            raise ModelError(
                f"mx.distributed cannot be used: node {who} has no group left, as a process can have one only; "
                "the ring uses other links until privatellm is started again there.",
                kind="network",
            )
        _Life.used = True
        with _described(epoch.rank, addresses):
            group = mx.distributed.init(strict=True, backend="ring")
        if group.size() != len(addresses):
            raise ModelError(f"mx.distributed connected {group.size()} of {len(addresses)} nodes.", kind="network")
        return CollectiveExchange(MlxGathering(group))
    except RuntimeError as error:
        raise ModelError(f"mx.distributed could not connect the nodes: {error}.", kind="network") from error
    finally:
        mesh.close()


def _free_address(epoch: Epoch) -> str:
    """``IP:PORT`` of this node, IPv4 because mlx knows no other, on a trusted network, with a port that is free now;
    empty if it has none."""
    member = next(member for member in epoch.members if member.rank == epoch.rank)
    for address in member.addresses:
        host, _ = split_address(address)
        if not in_networks(host, epoch.trusted):
            continue  # whoever comes first may connect
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"
    return ""


@contextmanager
def _described(rank: int, addresses: list[str]) -> Iterator[None]:
    """The environment from which mlx's ring takes who is who."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[address] for address in addresses], file)
        file.flush()
        before = {name: os.environ.get(name) for name in ("MLX_RANK", "MLX_HOSTFILE")}
        os.environ.update(MLX_RANK=str(rank), MLX_HOSTFILE=file.name)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
