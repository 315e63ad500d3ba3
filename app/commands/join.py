"""``privatellm join``: lend this machine to the rings of paired machines; on a screen, or in lines for a service."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from app.commands.engine_work import Interruption, run_with_engine
from app.commands.output import ReaderGoneError, WorkFailed, answer, notify, print_error
from app.engine_client import EngineClient
from app.lending import LendingService
from app.network import NetworkProblem
from app.settings.fields import SettingError
from app.settings.file import SettingsFile, open_settings
from app.settings.ring import open_network
from app.text_safety import one_line
from engine.ipc.messages import OpenNetwork

_FLAGS = {
    "ring_name": "--name",
    "ring_listen": "--listen",
    "ring_peers": "--peer",
    "ring_memory": "--memory",
    "ring_gpu_memory": "--gpu-memory",
}
"""The flag of each setting that has one here."""


@dataclass(frozen=True)
class JoinFlags:
    """The command line as given."""

    name: str | None = None
    listen: str | None = None
    peers: tuple[str, ...] = ()
    plain: bool = False
    memory: float | None = None
    """GiB."""
    gpu_memory: float | None = None
    """GiB."""


def join(flags: JoinFlags) -> int:
    """Lend this machine until the person ends it; the exit status. Raises WorkFailed."""
    wanted = network_from(flags)
    if flags.plain or not _has_screen():
        return _in_lines(wanted)
    from app.interrupts import leave_on_interrupt, raise_on_interrupt
    from app.tui.lending import run_lending

    raise_on_interrupt()
    try:
        status, problem = run_lending(wanted)
    finally:
        leave_on_interrupt()
    if problem:
        print_error(problem)
    return status


def network_from(flags: JoinFlags) -> OpenNetwork:
    """The request that opens the network. A flag overrides the setting of its name.

    Raises WorkFailed (status 2) for a value that is not allowed.
    """
    file = open_settings()
    for notice in file.notices:
        notify(f"note: {notice}")
    settings = file.settings
    given = {
        "ring_name": flags.name,
        "ring_listen": flags.listen,
        "ring_memory": flags.memory,
        "ring_gpu_memory": flags.gpu_memory,
    }
    try:
        for key, value in given.items():
            settings = settings.with_value(key, value) if value is not None else settings
        settings = settings.with_value("ring_peers", ", ".join([settings.ring_peers, *flags.peers]))
        _keep_name(file, settings.ring_name)
    except SettingError as error:
        text = str(error)
        raise WorkFailed(text.replace(error.key, _FLAGS[error.key], 1) if error.key else text, status=2) from error
    return open_network(settings, lend=settings.terms)


def _keep_name(file: SettingsFile, name: str | None) -> None:
    """Save the name: every privatellm process of this machine must use the same one towards other machines."""
    if name == file.settings.ring_name:
        return
    try:
        file.change("ring_name", name)
    except SettingError as error:
        notify(f"note: {error}")


def _has_screen() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and not stream.closed and stream.isatty() for stream in streams)


def _in_lines(wanted: OpenNetwork) -> int:
    """Print each event as a line with its time on stdout; the exit status.

    Ends on SIGTERM (status 0), on ctrl-c, when the terminal is closed (status 129), or when stdout has no reader.
    """

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        leaving = asyncio.Event()
        hung_up = asyncio.Event()
        gone: list[Exception] = []

        def print_line(line: str) -> None:
            try:
                answer(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {one_line(line)}\n")
            except (ReaderGoneError, WorkFailed) as error:
                gone.append(error)
                leaving.set()

        lender = LendingService(engine, wanted, print_line)
        interruption.ask_first(leaving.set)
        with _on_signals(leaving.set, hung_up.set):
            lending = asyncio.create_task(lender.run(), name="lending")
            left = asyncio.create_task(leaving.wait(), name="leaving")
            try:
                await asyncio.wait({lending, left}, return_when=asyncio.FIRST_COMPLETED)
                if lending.done():
                    await lending
            except NetworkProblem as problem:
                raise WorkFailed(str(problem)) from problem
            finally:
                for task in (lending, left):
                    task.cancel()
                    with suppress(asyncio.CancelledError, Exception):
                        await task
            if engine.running:
                await lender.leave()
        if gone:
            raise gone[0]
        print_line("This machine is no longer lent.")
        return 128 + signal.SIGHUP if hung_up.is_set() else 0

    return run_with_engine(work)


@contextmanager
def _on_signals(leave: Callable[[], None], hang_up: Callable[[], None]) -> Iterator[None]:
    """Handles signals inside: SIGTERM (which ends a service) calls ``leave`` in the event loop.

    SIGHUP calls ``hang_up`` and ``leave``, unless it was ignored (nohup).
    """
    loop = asyncio.get_running_loop()

    def hung_up() -> None:
        hang_up()
        leave()

    wanted = {signal.SIGTERM: leave, signal.SIGHUP: hung_up}
    before = {number: signal.getsignal(number) for number in wanted}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del wanted[signal.SIGHUP]
    for number, act in wanted.items():
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
