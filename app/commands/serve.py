"""``privatellm serve``: the model for other programs, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.commands.engine_work import Interruption, run_with_engine, with_ring
from app.commands.options import LoadFlags, load_from
from app.commands.output import ProgressLine, WorkFailed, notify
from app.engine_client import EngineClient
from app.settings.schema import Settings
from engine.ipc.messages import Progress

if TYPE_CHECKING:
    from app.serve.asking import Defaults


@dataclass(frozen=True)
class ServeFlags:
    """The command line as given."""

    load: LoadFlags
    listen: str = ""
    aliases: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()


def serve(flags: ServeFlags) -> int:
    """Serve until the person ends it; the exit status. Raises WorkFailed."""
    from app.serve.listening import ListenProblem, listen, parse_address

    try:
        address = parse_address(flags.listen)
        if not address.is_loopback:
            raise WorkFailed("other addresses than this machine's own are not offered yet: use 127.0.0.1", status=2)
        loading = load_from(flags.load)
        listener = listen(address)
    except ListenProblem as problem:
        raise WorkFailed(str(problem).removesuffix(".")) from problem
    from app.serve.application import Application
    from app.serve.gate import Rules
    from app.serve.model_service import LoadFailed, ModelService
    from app.serve.server import HttpServer

    line = ProgressLine()

    def show(progress: Progress | None) -> None:
        if progress is None:
            line.clear()
        else:
            line.show(progress)

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        load = await with_ring(engine, loading.load, loading.settings, loading.peers)
        service = ModelService(engine, load, names=flags.aliases, show=show, note=lambda text: notify(f"note: {text}"))
        application = Application(service, defaults_of(loading.settings), lambda text: notify(f"note: {text}"))
        server = HttpServer(application.asgi(Rules(hosts=flags.hosts, origins=flags.origins)))

        def leave() -> None:
            service.stop()
            server.leave()

        interruption.ask_first(leave)
        serving = asyncio.create_task(server.run_on(listener), name="http")
        notify(f"Serving {loading.load.model} at {address.url(tls=False)} (ctrl-c ends it).")
        try:
            facts = await service.loaded()
            notify(f"{facts.name} is loaded.")
            await serving
        except LoadFailed as failed:
            raise WorkFailed(str(failed)) from failed
        finally:
            leave()
            with suppress(asyncio.CancelledError):
                await serving
        return 0

    try:
        return run_with_engine(work)
    finally:
        listener.close()


def defaults_of(settings: Settings) -> Defaults:
    from app.serve.asking import Defaults

    return Defaults(settings.sampling, settings.max_tokens, settings.thinks, settings.thinking_effort)
