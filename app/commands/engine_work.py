"""Running a command's work on a separate engine process, which is always ended. For a ring the network is opened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec

from app.commands.output import ProgressLine, WorkFailed, notify
from app.engine_client import EngineClient, EngineDied
from app.interrupts import INTERRUPTED, handled
from app.network import NetworkClient, NetworkProblem
from app.settings.fields import SettingError
from app.settings.ring import RingSettings, open_network, ring_choice
from engine.ipc.messages import AnyRequest, BenchResult, Done, Failed, Load, Loaded, Notice, Planned, Progress

_ORDERLY_END_WAIT_S = 2.0


class Interruption:
    """The effect of ctrl-c: it cancels the work. After :meth:`ask_first` it first asks for an orderly end. After
    :meth:`work_ended` it cancels nothing."""

    def __init__(self, task: asyncio.Task[int]) -> None:
        self.happened = False
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._ask: Callable[[], None] | None = None
        self._work_ended = False

    def ask_first(self, ask: Callable[[], None] | None) -> None:
        self._ask = ask

    def work_ended(self) -> None:
        """Stop cancelling: the engine is being ended, which must complete."""
        self._work_ended = True

    def happen(self) -> None:
        """Called by the signal handler."""
        self.happened = True
        self._loop.call_soon_threadsafe(self._act)

    def _act(self) -> None:
        if self._ask is None:
            self._give_up()
        else:
            self._ask()
            self._loop.call_later(_ORDERLY_END_WAIT_S, self._give_up)

    def _give_up(self) -> None:
        if not self._work_ended:
            self._task.cancel()


Result = Loaded | Done | Planned | BenchResult
Work = Callable[[EngineClient, Interruption], Awaitable[int]]


def run_with_engine(work: Work, *, share: bool = False) -> int:
    """Start an engine, do ``work``, end the engine; the exit status. Raises WorkFailed.

    ``share``: use the engine of another program that has the model, and let others use this one.
    """
    return asyncio.run(_run(work, share))


async def _run(work: Work, share: bool) -> int:
    engine = EngineClient(share=share)
    engine.on_notice = lambda notice: notify(f"note: {notice.text}")
    task = asyncio.current_task()
    assert task is not None
    interruption = Interruption(task)
    with handled(interruption.happen, engine.kill):
        try:
            try:
                await engine.start()
                status = await work(engine, interruption)
            except EngineDied as error:
                raise WorkFailed(str(error)) from error
            finally:
                interruption.work_ended()
                if interruption.happened:
                    engine.kill()
                await engine.close()
        except asyncio.CancelledError:
            if not interruption.happened:
                raise
            return INTERRUPTED
    return INTERRUPTED if interruption.happened else status


async def do(engine: EngineClient, request: AnyRequest, progress: ProgressLine) -> Result:
    """Send a Load, Pull, Prepare, Plan or Bench and return its result. Raises WorkFailed, EngineDied."""
    try:
        async with aclosing(engine.stream(request)) as events:
            async for event in events:
                match event:
                    case Progress():
                        progress.show(event)
                    case Notice():
                        progress.clear()
                        notify(f"note: {event.text}")
                    case Failed():
                        raise WorkFailed(event.error)
                    case Loaded() | Done() | Planned() | BenchResult():
                        # A ctrl-c that arrived together with earlier events is handled first: then there is no result.
                        await asyncio.sleep(0)
                        return event
                    case _:
                        continue
    finally:
        progress.clear()
    raise WorkFailed("the engine ended the request without a result")


WAIT_S = 300.0
"""Seconds that a command's answer waits for a machine that is away."""


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
        notify(f"note: {found}")
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
