"""A command on a ring: the network is opened for it, and closed with its engine."""

from __future__ import annotations

import msgspec

from app.commands.output import WorkFailed, say
from app.engine_client import EngineClient
from app.network import NetworkClient, NetworkProblem
from app.settings.fields import ItemError, SettingError, check_item
from app.settings.ring import RingSettings, open_network, ring_choice
from engine.ipc.messages import Load

WAIT_S = 300.0
"""Seconds that a command's answer waits for a machine that is away."""


def check_peers(peers: list[str], *, ring: bool) -> tuple[str, ...]:
    """The addresses given with ``--peer``. Raises WorkFailed (status 2) for a bad one, or without a ring."""
    if peers and not ring:
        raise WorkFailed("--peer counts with --partitioning ring only", status=2)
    try:
        return tuple(check_item("address", peer) for peer in peers)
    except ItemError as error:
        raise WorkFailed(f"--peer takes HOST:PORT; {str(error)!r} is none", status=2) from error


async def with_ring(engine: EngineClient, load: Load, settings: RingSettings, peers: tuple[str, ...]) -> Load:
    """``load``; with partitioning ``ring`` the network is opened and the ring's choices are added.

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


async def open_for(engine: EngineClient, settings: RingSettings, peers: tuple[str, ...] = ()) -> NetworkClient:
    """The network, open for as long as ``engine`` runs. Waits a few seconds for paired machines to appear.

    Raises WorkFailed, EngineDied.
    """
    network = NetworkClient(engine)
    try:
        await network.ensure_open(open_network(settings, more_peers=peers))
    except NetworkProblem as problem:
        raise WorkFailed(str(problem)) from problem
    return network
