"""A command on a ring: the network is opened for it, and closed with its engine."""

from __future__ import annotations

import msgspec

from app.commands.output import WorkFailed, say
from app.engine_client import EngineClient
from app.network import Network, NetworkProblem
from app.settings.fields import SettingError
from app.settings.items import ItemError, check_item
from app.settings.ring import RingSettings, open_network, ring_choice
from engine.ipc.messages import Load

WAIT_S = 300.0
"""An answer that nobody looks at waits so long for a machine that is away."""


def check_peers(peers: list[str], *, ring: bool) -> tuple[str, ...]:
    """The addresses given with ``--peer``. Raises WorkFailed (status 2) for one that is none or does not count."""
    if peers and not ring:
        raise WorkFailed("--peer counts with --partitioning ring only", status=2)
    try:
        return tuple(check_item("address", peer) for peer in peers)
    except ItemError as error:
        raise WorkFailed(f"--peer takes HOST:PORT; {str(error)!r} is none", status=2) from error


async def with_ring(engine: EngineClient, load: Load, settings: RingSettings, peers: tuple[str, ...]) -> Load:
    """``load``, and if its partitioning is ``ring`` what is asked of it: the network is opened first.

    Raises WorkFailed, EngineDied.
    """
    if load.partitioning != "ring":
        return load
    network = await open_for(engine, settings, peers)
    try:
        ring = ring_choice(settings, network.state)
    except SettingError as problem:
        raise WorkFailed(str(problem)) from problem
    for found in network.state.problems if network.state is not None else []:
        say(f"note: {found}")
    return msgspec.structs.replace(load, ring=msgspec.structs.replace(ring, wait_s=WAIT_S))


async def open_for(engine: EngineClient, settings: RingSettings, peers: tuple[str, ...] = ()) -> Network:
    """The network, open for as long as ``engine`` runs; paired machines are waited for a little.

    Raises WorkFailed, EngineDied.
    """
    network = Network(engine)
    try:
        await network.ensure_open(open_network(settings, more_peers=peers))
    except NetworkProblem as problem:
        raise WorkFailed(str(problem)) from problem
    return network
