"""The engine's network as the app uses it: opening and closing it, pairing and forgetting machines. No Textual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from app.engine_client import Engine, EngineDied
from app.text_safety import one_line
from engine.ipc.messages import (
    AnyRequest,
    CloseNetwork,
    Done,
    Failed,
    ForgetPeer,
    ListPeers,
    NetworkState,
    OpenNetwork,
    Pair,
    PeerFacts,
    ShowCode,
)

ARRIVAL_S = 4.0
"""Seconds to wait for paired machines after the network was opened. They are usually found within three."""


class NetworkProblem(Exception):
    """A request to the network failed. The text is one sentence for the person."""


class NetworkClient:
    """The state of the network and requests to it. ``on_change`` is called when the state changed.

    No socket is open before :meth:`ensure_open`; calling it with other values opens the network again. Call
    :meth:`lost` when the engine died: the network is not opened again by itself.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None] = lambda: None) -> None:
        self.state: NetworkState | None = None
        self.on_change = on_change
        self._engine = engine
        self._opened: OpenNetwork | None = None
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        engine.on_network = self._set_state

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def paired(self) -> list[PeerFacts]:
        """The paired machines, whether or not they are reachable."""
        return [peer for peer in self.state.peers if peer.state != "found"] if self.state is not None else []

    async def ensure_open(self, wanted: OpenNetwork, *, wait: bool = True) -> None:
        """Open the network as ``wanted`` says, whatever its id, unless it is open that way already.

        ``wait``: wait at most :data:`ARRIVAL_S` for the paired machines.

        Raises NetworkProblem, EngineDied.
        """
        wanted = msgspec.structs.replace(wanted, id=0)
        async with self._turn:
            if self._opened == wanted:
                return
            if self._opened is not None:
                await self._close()
            await self._do(msgspec.structs.replace(wanted, id=self._engine.new_id()))
            self._opened = wanted
        await self.refresh()
        if wait:
            await self.wait_for(lambda state: all(peer.state != "paired" for peer in state.peers))

    async def close(self) -> None:
        """Leave the ring and close every socket. Raises NetworkProblem, EngineDied."""
        async with self._turn:
            if self._opened is not None:
                await self._close()
        await self.refresh()

    async def pair(self, peer: str, code: str) -> str:
        """Pair with the machine that shows ``code`` and return its name. Raises NetworkProblem, EngineDied."""
        done = await self._do(Pair(id=self._engine.new_id(), peer=peer, code=code))
        await self.refresh()
        return done.detail

    async def forget(self, peer: str) -> None:
        """Stop trusting a machine. Raises NetworkProblem, EngineDied."""
        await self._do(ForgetPeer(id=self._engine.new_id(), peer=peer))
        await self.refresh()

    async def show_code(self) -> None:
        """Make a new pairing code, which is part of the next state. Raises NetworkProblem, EngineDied."""
        await self._do(ShowCode(id=self._engine.new_id()))

    async def refresh(self) -> NetworkState:
        """Ask the engine for the state, which needs no open network. Raises NetworkProblem, EngineDied."""
        async for event in self._engine.stream(ListPeers(id=self._engine.new_id())):
            if isinstance(event, NetworkState):
                self._set_state(event)
                return event
            if isinstance(event, Failed):
                raise NetworkProblem(one_line(event.error))
        raise NetworkProblem("The engine did not list the machines.")

    def lost(self) -> None:
        """The engine died, and its sockets with it."""
        self._opened = None
        if self.state is not None:
            self.state = msgspec.structs.replace(self.state, open=False, code="", lending=None)
            self.on_change()

    async def _close(self) -> None:
        self._opened = None
        await self._do(CloseNetwork(id=self._engine.new_id()))

    async def wait_for(self, holds: Callable[[NetworkState], bool], wait_s: float = ARRIVAL_S) -> None:
        """Wait until ``holds`` is true of the state, at most ``wait_s`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.state is None or not holds(self.state):
                    self._news.clear()
                    await self._news.wait()

    async def _do(self, request: AnyRequest) -> Done:
        async for event in self._engine.stream(request):
            if isinstance(event, Done):
                return event
            if isinstance(event, Failed):
                raise NetworkProblem(one_line(event.error))
        raise NetworkProblem("The engine ended the request without a result.")

    def _set_state(self, state: NetworkState) -> None:
        state = msgspec.structs.replace(state, id=0)
        if state != self.state:
            self.state = state
            self._news.set()
            self.on_change()


async def close_quietly(network: NetworkClient) -> None:
    """Close the network and ignore failures: the engine is about to end, and closes it then."""
    with suppress(NetworkProblem, EngineDied):
        await network.close()
