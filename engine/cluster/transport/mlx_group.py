"""The exchange over mx.distributed, for trusted networks only: it sends plain text, and its TCP ring accepts whoever
connects first.

A process can have only one such group in its life. A dead one cannot be made again, and a stopped peer hangs it for
ever. So the group outlives its epoch, and the next epoch of the same processes reuses it. After a loss the hanging
all-gather is left behind in its thread, and this process uses other transports until it ends.

JACCL is RDMA over Thunderbolt 5, on Macs on which the person has allowed it with ``rdma_ctl enable``. It is used if mlx
has it and every node reaches each other one over a separate interface; otherwise the TCP ring is used. The code follows
the documentation of mlx 0.32. JACCL itself never ran where this was written, which has no such hardware; only what
leads up to it is tested. If it fails once, this process uses the TCP ring from then on.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import psutil

from engine.cluster.parts import Observer
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.collective import CollectiveExchange, Gathering, made_while_wanted
from engine.cluster.transport.connecting import connect_sockets
from engine.cluster.transport.epochs import Epoch, check_trusted
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.mesh import Mesh
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName
from engine.system.temporary_folders import temporary_folder

_log = logging.getLogger(__name__)

GROUP_STATE_LIMIT = 4096
MOST_BOOTSTRAP = 1 << 20
"""Maximum bytes that JACCL's nodes exchange about their connections, far more than they need."""
PORTS_S = 3.0
"""Timeout in seconds for listing the system's ports."""
STUCK_S = 6.0
"""Seconds after which a group that is not made yet counts as stuck. It takes milliseconds, or a second if a node was
not listening yet."""


class GroupState(msgspec.Struct, frozen=True):
    """A node's report to the others before they make a group or reuse the existing one."""

    address: str = ""
    """``IP:PORT`` for the TCP ring. Empty if this process already had its group, or has no address on a trusted
    network."""
    group: str = ""
    """Epoch in which these nodes made a group that still works; empty if there is none."""
    devices: list[str] = []
    """RDMA device towards each node by rank, empty for itself. No entries without JACCL."""


_group_states = msgspec.msgpack.Decoder(GroupState)


class _Life:
    """The one group of this process."""

    group: Any = None
    made_in = ""
    """Epoch in which the group was made."""
    members: tuple[str, ...] = ()
    """Node ids by rank."""
    in_step = False
    """Whether no all-gather of the group is running or was given up."""
    used = False
    """Whether this process has, or had, a group."""
    no_jaccl = False
    """Whether JACCL has failed before."""


def available() -> bool:
    """Whether this process can still make a group."""
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
        """See :class:`engine.cluster.transport.collective.Gathering`."""
        given = mx.array(np.frombuffer(block, np.uint8))
        _Life.in_step = False
        try:
            gathered = mx.distributed.all_gather(given, group=self._group, stream=mx.cpu)
            mx.eval(gathered)
        except RuntimeError as error:
            _log.info("mlx: %s", error)
            raise PeerLost("mlx lost a node.") from error
        _Life.in_step = True
        rows = np.array(gathered).reshape(self.size, len(block))
        return [row.data for row in rows]

    def end(self) -> None:
        """See :class:`engine.cluster.transport.collective.Gathering`: mlx has no way to end a group, and the next
        epoch may go on with it."""


def connect_mlx(links: Links, epoch: Epoch) -> Exchange:
    """The exchange over mx.distributed among all nodes of ``epoch``. Each of them calls this.

    They exchange their states over authenticated links first. Raises ModelError (network) if one of the nodes cannot
    take part, PeerLost.
    """
    sockets = connect_sockets(links, epoch, "exchange", "tls")
    mesh = Mesh(epoch.rank, len(epoch.members), sockets)
    members = tuple(member.node_id for member in sorted(epoch.members, key=lambda member: member.rank))
    made_in = _Life.made_in if _Life.in_step and members == _Life.members else ""
    port = ExitStack()
    try:
        # Whoever comes first may connect to what mlx opens: on trusted networks only, whatever addresses were named
        # before.
        ends = [end for framed in sockets.values() for end in (framed.local_address, framed.remote_address)]
        check_trusted("mlx", ends, epoch.trusted)
        row = _devices({rank: framed.local_address for rank, framed in sockets.items()}, epoch.rank, len(members))
        hosts = [framed.local_address for framed in sockets.values()]
        mine = GroupState(_free_address(hosts, port) if available() else "", made_in, row)
        group = made_while_wanted(epoch, lambda: _agreed(mesh, mine, links.parts.observe), lambda late: None)
        if group.size() != len(members):
            raise ModelError(f"mx.distributed connected {group.size()} of {len(members)} nodes.", kind="network")
    except (RuntimeError, ValueError, msgspec.DecodeError) as error:
        raise ModelError(f"mx.distributed could not connect the nodes: {error}.", kind="network") from error
    finally:
        port.close()
        mesh.close()
    if group is not _Life.group:
        _Life.group, _Life.made_in, _Life.members, _Life.in_step = group, epoch.epoch, members, True
    return CollectiveExchange(MlxGathering(group))


def _agreed(mesh: Mesh, mine: GroupState, observe: Observer) -> Any:
    """The group that all nodes have, or a new one. Raises what :func:`_made` raises, PeerLost."""
    mesh.send([msgspec.msgpack.encode(mine)], GROUP_STATE_LIMIT)
    states = [_group_states.decode(each) for each in mesh.receive()]
    if mine.group and {each.group for each in states} == {mine.group}:
        return _Life.group
    observe("addresses told", "mlx")
    return _made(mesh, mesh.rank, states)


def _made(mesh: Mesh, rank: int, states: Sequence[GroupState]) -> Any:
    """A new group. Raises ModelError (network) if a node has had one, RuntimeError."""
    addresses = [state.address for state in states]
    if not all(addresses):
        raise ModelError(
            f"mx.distributed cannot be used: node {addresses.index('')} has no group left, as a process can have one "
            "only; the ring uses other links until privatellm is started again there.",
            kind="network",
        )
    matrix = device_matrix([state.devices for state in states])
    if matrix is None:
        _Life.used = True
        with _described(rank, MLX_HOSTFILE=[[address] for address in addresses]):
            # All are ready, and alive, at the latest possible moment.
            mesh.send([], 0)
            mesh.receive()
            with _ended_if_stuck():
                return mx.distributed.init(strict=True, backend="ring")
    try:
        with _described(rank, MLX_IBV_DEVICES=matrix):
            group = mx.distributed.init(
                strict=True, backend="jaccl", all_gather_factory=lambda rank, size: side_channel(mesh)
            )
    except (RuntimeError, ValueError):
        _Life.no_jaccl = True
        raise
    _Life.used = True
    return group


@contextmanager
def _ended_if_stuck() -> Iterator[None]:
    """End this process if the group is not made soon.

    mlx holds the interpreter lock while it connects, for ever if a node has died meanwhile. Nothing in this process
    could notice, and no other machine would get an answer. A dead engine process is started again by whoever started
    it.
    """
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# --- JACCL ----------------------------------------------------------------------------------------------------------


def _devices(own_addresses: Mapping[int, str], rank: int, size: int) -> list[str]:
    """The devices of :class:`GroupState`. ``own_addresses``: this node's address by the rank of the node reached from
    it."""
    if _Life.no_jaccl or not mx.distributed.is_available("jaccl"):
        return []
    interfaces = {
        entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries
    }
    return device_row(own_addresses, interfaces, _thunderbolt(), rank, size)


def _thunderbolt() -> list[str]:
    """The Thunderbolt ports of this Mac; none if they cannot be listed."""
    try:
        tool = ["/usr/sbin/networksetup", "-listallhardwareports"]
        said = subprocess.run(tool, capture_output=True, text=True, timeout=PORTS_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return thunderbolt_ports(said)


def thunderbolt_ports(said: str) -> list[str]:
    """The interfaces that ``networksetup -listallhardwareports`` calls Thunderbolt ports. Their bridge is not one."""
    found = re.findall(r"^Hardware Port: Thunderbolt (?!Bridge).*\nDevice: (en\d+)$", said, re.MULTILINE)
    return [str(name) for name in found]


def device_row(
    own_addresses: Mapping[int, str], interfaces: Mapping[str, str], ports: Collection[str], rank: int, size: int
) -> list[str]:
    """The RDMA device of node ``rank`` towards each of ``size`` nodes, named after the interface of the Thunderbolt
    port.

    Empty if an address belongs to none of these ``ports``, as macOS gives Wi-Fi no such device. ``interfaces``: the
    names by address.
    """
    row = []
    for other in range(size):
        name = interfaces.get(own_addresses.get(other, "").partition("%")[0], "")
        if other != rank and name not in ports:
            return []
        row.append("" if other == rank else f"rdma_{name}")
    return row


def device_matrix(rows: Sequence[Sequence[str]]) -> list[list[str | None]] | None:
    """The value of MLX_IBV_DEVICES for nodes with these ``rows``: the device by rank and other rank, null for itself.

    None unless every node has a device for each other node, and none needs one device for two of them.
    """
    for rank, row in enumerate(rows):
        others = [device for other, device in enumerate(row) if other != rank]
        if len(row) != len(rows) or not all(others) or len(set(others)) != len(others):
            return None
    return [[device if other != rank else None for other, device in enumerate(row)] for rank, row in enumerate(rows)]


def side_channel(mesh: Mesh) -> Callable[[bytes, int], bytes]:
    """The all-gather in which JACCL's nodes exchange their connections, over authenticated links.

    Raises RuntimeError if another node contributes something else than agreed.
    """

    def gather(own: bytes, nbytes: int) -> bytes:
        mesh.send([bytes(own[:nbytes])], MOST_BOOTSTRAP)
        found = [bytes(part) for part in mesh.receive()]
        if any(len(part) != nbytes for part in found):
            raise RuntimeError(f"a node described its connections in {max(map(len, found))} bytes instead of {nbytes}")
        return b"".join(found)

    return gather


def _free_address(hosts: Iterable[str], held: ExitStack) -> str:
    """``IP:PORT`` at the first IPv4 address of ``hosts`` (mlx knows no other), with a port that is free now; empty if
    there is none.

    Linux gives the port to nobody else until ``held`` is closed, but lets mlx listen there. Elsewhere mlx could not.
    """
    for host in hosts:
        with suppress(OSError), ExitStack() as probing:
            probe = probing.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, 0))
            address = f"{host}:{probe.getsockname()[1]}"
            if sys.platform == "linux":
                held.push(probing.pop_all())
            return address
    return ""


@contextmanager
def _described(rank: int, **files: object) -> Iterator[None]:
    """Sets the environment from which mlx reads the ranks: variables that name a file with the given content."""
    with temporary_folder("privatellm-mlx-") as folder:
        wanted = {"MLX_RANK": str(rank)}
        for name, content in files.items():
            path = folder / f"{name.lower()}.json"
            path.write_text(json.dumps(content), encoding="ascii")
            wanted[name] = str(path)
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
