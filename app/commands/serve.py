"""``privatellm serve``: the model for other programs, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.chat.words import CAUSES
from app.commands.engine_work import Interruption, run_with_engine, with_ring
from app.commands.options import LoadFlags, Loading, load_from
from app.commands.output import ProgressLine, WorkFailed, answer, notify
from app.engine_client import EngineClient
from app.running_servers import RunningServer, announced, running_servers, servers_folder
from app.settings.schema import Settings
from app.text_safety import one_line
from engine.ipc.messages import Progress
from engine.system.locations import ensure

if TYPE_CHECKING:
    from app.serve.asking import Defaults
    from app.serve.gate import Rules
    from app.serve.listening import ListenAddress


@dataclass(frozen=True)
class ServeFlags:
    """The command line as given. ``tls``: None if neither flag was."""

    load: LoadFlags
    listen: str = ""
    aliases: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    require_key: bool = False
    tls: bool | None = None


@dataclass(frozen=True)
class _Access:
    """The clients' access to the server."""

    address: ListenAddress
    rules: Rules
    token: str
    context: ssl.SSLContext | None

    @property
    def url(self) -> str:
        return self.address.url(tls=self.context is not None)


def serve(flags: ServeFlags) -> int:
    """Serve until the person ends it; the exit status. Raises WorkFailed."""
    from app.serve.listening import ListenProblem, listen

    address, rules, token = _access(flags)
    loading = load_from(flags.load)
    try:
        listener = listen(address)
    except ListenProblem as problem:
        raise WorkFailed(str(problem).removesuffix(".")) from problem
    with listener:
        tls = not address.is_loopback if flags.tls is None else flags.tls
        context = _context(address, flags.hosts) if tls else None
        address = replace(address, port=listener.getsockname()[1])  # port 0 stands for a free one
        access = _Access(address, rules, token, context)
        return run_with_engine(
            lambda engine, interruption: _serve(engine, interruption, flags, loading, access, listener), share=True
        )


async def _serve(
    engine: EngineClient,
    interruption: Interruption,
    flags: ServeFlags,
    loading: Loading,
    access: _Access,
    listener: socket.socket,
) -> int:
    from app.serve.application import Application
    from app.serve.model_service import LoadFailed, ModelService
    from app.serve.server import HttpServer

    line = ProgressLine(quiet_elsewhere=True)

    def show(progress: Progress | None) -> None:
        if progress is None:
            line.clear()
        else:
            line.show(progress)

    def note(text: str) -> None:
        line.clear()
        notify(f"note: {text}")

    load = await with_ring(engine, loading.load, loading.settings, loading.peers)
    service = ModelService(engine, load, names=flags.aliases, show=show, note=note)
    application = Application(service, defaults_of(loading.settings), note)
    server = HttpServer(application.asgi(access.rules), access.context)

    def leave() -> None:
        service.stop()
        server.leave()

    here = RunningServer(
        pid=os.getpid(), url=access.url, host=access.address.host, port=access.address.port, model=load.model,
        since=time.time(), tls=access.context is not None, key=bool(access.rules.key_hash), token=access.token,
    )  # fmt: skip
    interruption.ask_first(leave)
    with _on_signals(leave), announced(servers_folder(), here):
        serving = asyncio.create_task(server.run_on(listener), name="http")
        notify(f"Serving {load.model} at {access.url} (ctrl-c ends it).")
        try:
            facts = await service.loaded()
            notify(f"{facts.name} is loaded.")
            await serving
        except LoadFailed as failed:
            if not server.should_exit:
                raise WorkFailed(str(failed).removesuffix(".")) from failed
        finally:
            leave()
            with suppress(asyncio.CancelledError):
                await serving
    notify("Nothing is served any more.")
    return 0


@contextlib.contextmanager
def _on_signals(leave: Callable[[], None]) -> Iterator[None]:
    """Handles signals inside: SIGTERM (which ends a service) and a closed terminal call ``leave`` in the event loop."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    wanted = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # nohup
    for number in wanted:
        loop.add_signal_handler(number, leave)
    try:
        yield
    finally:
        for number in wanted:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


def defaults_of(settings: Settings) -> Defaults:
    """The person's settings that hold where a request says nothing. A system prompt is the client's business."""
    from app.serve.asking import Defaults

    return Defaults(settings.sampling, settings.max_tokens, settings.thinks, settings.thinking_effort)


# --- who may ask ----------------------------------------------------------------------------------------------------


def _network_folder() -> Path:
    return ensure("config") / "network"


def _access(flags: ServeFlags) -> tuple[ListenAddress, Rules, str]:
    """The address to listen on, the rules for clients, and the token of `serve --status`. Raises WorkFailed."""
    from app.serve.gate import Rules, hash_of, is_name, is_origin
    from app.serve.listening import KeyProblem, ListenProblem, kept_hash, parse_address

    try:
        address = parse_address(flags.listen)
    except ListenProblem as problem:
        raise WorkFailed(str(problem).removesuffix("."), status=2) from problem
    for name in flags.hosts:
        if not is_name(name):
            raise WorkFailed(
                f"--allow-host takes a name of letters, digits, dots and hyphens, without a port, not {name[:200]!r}",
                status=2,
            )
    for origin in flags.origins:
        if not is_origin(origin):
            raise WorkFailed(
                f"--allow-origin takes SCHEME://HOST or SCHEME://HOST:PORT in small letters, not {origin[:200]!r}",
                status=2,
            )
    key_hash = ""
    if flags.require_key or not address.is_loopback:
        try:
            key_hash = kept_hash(_network_folder())
        except KeyProblem as problem:
            raise WorkFailed(str(problem).removesuffix(".")) from problem
        if not key_hash:
            why = "--require-key" if flags.require_key else f"{one_line(address.host)}, which other machines reach,"
            raise WorkFailed(f"{why} needs a key: run `privatellm serve --new-key` first")
    token = secrets.token_urlsafe()
    return address, Rules(flags.hosts, flags.origins, key_hash, hash_of(token)), token


def _context(address: ListenAddress, hosts: Sequence[str]) -> ssl.SSLContext:
    """TLS by the certificate of this machine. Raises WorkFailed."""
    from app.serve.gate import is_name, own_names
    from discovery.errors import DiscoveryError
    from discovery.identity import load_identity
    from discovery.server_certificate import SERVER_CERTIFICATE, server_certificate, server_context

    folder = _network_folder()
    names = {*filter(is_name, own_names()), *hosts, "127.0.0.1", "::1"}
    if address.host not in ("0.0.0.0", "::"):
        names.add(address.host)
    try:
        identity = load_identity(folder)
        certificate, is_new = server_certificate(folder, identity, names)
    except DiscoveryError as error:
        raise WorkFailed(str(error).removesuffix(".")) from error
    if is_new:
        notify(f"Clients need a copy of the certificate {folder / SERVER_CERTIFICATE}.")
    return server_context(identity, certificate)


def make_key() -> int:
    """Make a key and print it, this once; the exit status. Raises WorkFailed."""
    from app.serve.listening import KeyProblem, new_key

    try:
        key, where = new_key(_network_folder())
    except KeyProblem as problem:
        raise WorkFailed(str(problem).removesuffix(".")) from problem
    answer(f"{key}\n")
    notify(f"This key is shown once: give it to your clients as the API key. Its hash is kept in {where}.")
    notify("A server that runs already keeps the former key until it is started again.")
    return 0


# --- what runs ------------------------------------------------------------------------------------------------------


def show_status() -> int:
    """Print the servers that run here; the exit status is 1 if there is none."""
    servers = running_servers(servers_folder())
    if not servers:
        raise WorkFailed("no `privatellm serve` is running here")
    for server in servers:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(server.since))
        answer(f"{one_line(server.model)} at {one_line(server.url)} since {since} (process {server.pid})\n")
        guarded = ", ".join(word for word, given in (("key", server.key), ("TLS", server.tls)) if given)
        answer(f"  access: {guarded or 'no key, this machine only'}\n")
        figures = _figures(server.host, server.port, server.token, tls=server.tls)
        if figures is None:
            answer("  it does not answer\n")
            continue
        count = Counter[str]()
        for name, _, value in figures:
            count[name] += round(value)
        answer(f"  {'loaded' if count.get('model_loaded') else 'loading'}; ")
        answer(f"{count.get('requests_running', 0)} answered now, {count.get('requests_waiting', 0)} waiting\n")
        answer(
            f"  so far: {count.get('answers_total', 0)} answers, {count.get('completion_tokens_total', 0)} tokens "
            f"written, {count.get('prompt_tokens_total', 0)} read, "
            f"{count.get('prompt_tokens_cached_total', 0)} of them from the cache\n"
        )
        for name, labels, value in figures:
            if name == "prompts_read_again_total" and len(found := re.findall(r'="([a-z]*)"', labels)) == 2:
                cause, role = found
                why = f"{CAUSES.get(cause, cause)}{f' ({role})' * bool(role)}"
                answer(f"  read again: {value:.0f} prompt{'s' * (value != 1)}, because {why}\n")
    return 0


def _figures(host: str, port: int, token: str, *, tls: bool) -> list[tuple[str, str, float]] | None:
    """The server's metrics: name, labels and value. None if it does not answer."""
    import http.client

    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if tls:
        # It is a port of this machine, which was told to us by a file that is this person's alone.
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            target, port, timeout=5, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(target, port, timeout=5)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException, UnicodeError):
        return None
    finally:
        connection.close()
    figures: list[tuple[str, str, float]] = []
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("privatellm_"):
            name, _, labels = name.removeprefix("privatellm_").partition("{")
            with suppress(ValueError):
                figures.append((name, labels, float(value)))
    return figures
