"""The network as the engine tells of it: opening and closing it, pairing and forgetting machines. No Textual."""

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
"""How long paired machines are waited for after the network was opened: they are found within three seconds."""


class NetworkProblem(Exception):
    """What was asked of the network could not be done; the text is one sentence for the person."""


class Network:
    """Follows what the engine says of the network; ``on_change`` is called when it said something new.

    No socket is open before :meth:`ensure_open`. It may be called again with other wishes: then the network is opened
    anew. When the engine died it must be told (:meth:`lost`); nothing opens by itself.
    """

    def __init__(self, engine: Engine, on_change: Callable[[], None] = lambda: None) -> None:
        self.state: NetworkState | None = None
        self.on_change = on_change
        self._engine = engine
        self._opened: OpenNetwork | None = None
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        engine.on_network = self._heard

    @property
    def is_open(self) -> bool:
        return self._opened is not None

    @property
    def paired(self) -> list[PeerFacts]:
        """The machines that are trusted, whether or not they are there."""
        return [peer for peer in self.state.peers if peer.state != "found"] if self.state is not None else []

    async def ensure_open(self, wanted: OpenNetwork, *, wait: bool = True) -> None:
        """Have the network open as ``wanted`` says (its id does not count). With ``wait``, paired machines are waited
        for a little.

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
        """Pair with the machine that shows ``code``; its name. Raises NetworkProblem, EngineDied."""
        done = await self._do(Pair(id=self._engine.new_id(), peer=peer, code=code))
        await self.refresh()
        return done.detail

    async def forget(self, peer: str) -> None:
        """Trust the machine no longer. Raises NetworkProblem, EngineDied."""
        await self._do(ForgetPeer(id=self._engine.new_id(), peer=peer))
        await self.refresh()

    async def show_code(self) -> None:
        """Make a new code, which comes with the next state. Raises NetworkProblem, EngineDied."""
        await self._do(ShowCode(id=self._engine.new_id()))

    async def refresh(self) -> NetworkState:
        """What is there now; needs no open network. Raises NetworkProblem, EngineDied."""
        async for event in self._engine.stream(ListPeers(id=self._engine.new_id())):
            if isinstance(event, NetworkState):
                self._heard(event)
                return event
            if isinstance(event, Failed):
                raise NetworkProblem(one_line(event.error))
        raise NetworkProblem("The engine did not say which machines there are.")

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
        """Until ``holds`` of the state, at most ``wait_s`` seconds."""
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

    def _heard(self, state: NetworkState) -> None:
        state = msgspec.structs.replace(state, id=0)
        if state != self.state:
            self.state = state
            self._news.set()
            self.on_change()


async def close_quietly(network: Network) -> None:
    """Close it if it can still be closed: the engine, which is about to end, would do so too."""
    with suppress(NetworkProblem, EngineDied):
        await network.close()
