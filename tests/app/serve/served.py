"""A server over a real engine and a tiny model that reads and writes bytes, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app import engine_process
from app.engine_client import EngineClient
from app.serve.application import Application
from app.serve.asking import Defaults
from app.serve.gate import Rules
from app.serve.listening import ListenAddress, listen
from app.serve.model_service import ModelService
from app.serve.server import HttpServer
from engine.bench.local_ring import Launcher
from engine.ipc.messages import Load
from tests.support.engine_forks import forked
from tests.support.hooked_engine import hooked, tells_every_token

MODEL = "speaking"
TEMPLATE = (
    '{% for tool in tools or [] %}{{ tool | tojson }}<tool_call></tool_call>{# around {"name": …} #}{% endfor %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Served:
    """A running server. ``notes`` is what it told its person."""

    service: ModelService
    port: int
    notes: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def served(
    model: Path,
    home: Path,
    rules: Rules | None = None,
    defaults: Defaults | None = None,
    launch: Launcher = forked,
    **options: Any,
) -> Iterator[Served]:
    """A server of ``model`` until the end of the block. ``launch``: ``with_libraries`` for a model that sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVATELLM_HOME", str(home))
        patch.setattr(engine_process, "start", lambda command: launch(hooked(tells_every_token), os.environ))
        listener = listen(ListenAddress("127.0.0.1", 0))
        port = listener.getsockname()[1]
        notes: list[str] = []
        begun: list[tuple[ModelService, asyncio.AbstractEventLoop, Callable[[], None]]] = []
        ready = threading.Event()

        async def serve() -> None:
            engine = EngineClient()
            load = Load(id=1, model=str(model), partitioning="cpu", runtime="native", keep_resident=False)
            service = ModelService(engine, load, note=notes.append, **options)
            application = Application(service, defaults or Defaults(), notes.append)
            server = HttpServer(application.asgi(rules or Rules()))

            def leave() -> None:
                service.stop()
                server.leave()

            begun.append((service, asyncio.get_running_loop(), leave))
            serving = asyncio.create_task(server.run_on(listener))
            try:
                await service.loaded()
                ready.set()
                await serving
            finally:
                ready.set()
                leave()
                with suppress(asyncio.CancelledError):
                    await serving
                await engine.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
        thread.start()
        try:
            ready.wait(120)
            yield Served(begun[0][0], port, notes)
        finally:
            with suppress(RuntimeError):  # it has ended by itself
                begun[0][1].call_soon_threadsafe(begun[0][2])
            thread.join(60)
            assert not thread.is_alive()


def raw(port: int, request: bytes, *, wait: float = 30.0) -> bytes:
    """What the server says to ``request`` until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        connection.sendall(request)
        said = b""
        with suppress(ConnectionResetError):
            while data := connection.recv(65536):
                said += data
        return said
