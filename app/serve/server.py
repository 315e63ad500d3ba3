"""The HTTP server: uvicorn in this program's event loop, without its signals, logs and timers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.serve.replies import STOPPED, Refused, protocol_of, refusal_response

HEAD_S = 15.0
"""Seconds within which a connection must have sent a whole head of a request, from its start or its first byte."""
KEEP_ALIVE_S = 75
"""Seconds that a connection may be idle between two requests."""
_HEAD_BYTES = 64 * 1024
MOST_CONNECTIONS = 512
"""Maximum number of connections whose requests are answered; those of further ones are refused."""
_GRACE_S = 2


class _PatientProtocol(H11Protocol):
    """A connection that is closed if it sends nothing, or its head too slowly."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answering():
            super().data_received(data)
            return
        self._start_timer()
        super().data_received(data)
        if self._answering():
            self._stop_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: a client that wants one answer only may say that it sends no more. Any
        other has left."""
        return self._answering() and self.conn.their_state is h11.MUST_CLOSE

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stop_timer()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self._answering() and not self.transport.is_closing():
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves ``app`` until :meth:`leave`. It writes no log: what is asked stays between client and engine."""

    def __init__(self, app: ASGIApp, context: ssl.SSLContext | None = None) -> None:
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
            logger = logging.getLogger(name)
            logger.handlers = [logging.NullHandler()]
            logger.propagate = False
        config = uvicorn.Config(
            self._limited(app),
            loop="none",
            http=_PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            h11_max_incomplete_event_size=_HEAD_BYTES,
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self._leaving = asyncio.Event()

    def _limited(self, app: ASGIApp) -> ASGIApp:
        """``app`` for as many connections as there may be. uvicorn's own limit answers in plain text."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            begun = False

            async def noting(message: Message) -> None:
                nonlocal begun
                begun = True
                await send(message)

            async def refuse(text: str) -> None:
                response = refusal_response(Refused(text, 503), protocol_of(scope["path"]))
                response.headers["connection"] = "close"
                await response(scope, receive, send)

            if len(self.server_state.connections) > MOST_CONNECTIONS:
                await refuse(f"More than {MOST_CONNECTIONS} connections are open: close some, or try later.")
                return
            try:
                await app(scope, receive, noting)
            except asyncio.CancelledError:
                if not begun:  # uvicorn would say it in plain text
                    await refuse(STOPPED)
                raise

        return limited

    def leave(self) -> None:
        """End the server; what is still being answered has two seconds."""
        self.should_exit = True
        self._leaving.set()

    async def run_on(self, listener: socket.socket) -> None:
        """Serve the connections of ``listener``, which is closed at the end."""
        await self.serve(sockets=[listener])

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop wakes ten times a second."""
        await self.on_tick(0)
        await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The command handles signals."""
        yield
