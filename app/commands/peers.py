"""``privatellm peers``: the machines that are trusted; pairing with one, forgetting one."""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec

from app.commands.engine_work import Interruption, run_with_engine
from app.commands.output import WorkFailed, answer, as_json, notify
from app.engine_client import EngineClient
from app.network import NetworkClient, NetworkProblem, close_quietly
from app.ring_words import fingerprint, link_words, peer_address, short_id, state_words
from app.settings.file import open_settings
from app.settings.ring import open_network
from app.text_safety import one_line
from engine.ipc.messages import NetworkState, PeerFacts
from engine.planning.ring_words import as_clause
from engine.planning.units import byte_size

_NOTHING = "–"


def show_peers(*, in_json: bool, look: bool) -> int:
    """Print the paired machines. ``look``: open the network for a moment to find out which are there."""

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        network = NetworkClient(engine)
        try:
            if look:
                await network.ensure_open(open_network(open_settings().settings))
            state = await network.refresh()
        except NetworkProblem as problem:
            raise WorkFailed(str(problem)) from problem
        if look:
            await close_quietly(network)
        answer(as_json(as_object(state)) if in_json else as_text(state))
        for problem_found in state.problems:
            notify(f"note: {problem_found}")
        return 0

    return run_with_engine(work)


def pair(peer: str, code: str | None) -> int:
    """Pair with the machine that shows a code; the network is open only for that. Raises WorkFailed."""
    from discovery.errors import PairingError
    from discovery.pairing import typed_digits

    typed = code if code is not None else _ask_for_code(peer)
    try:
        typed_digits(typed)
    except PairingError as error:
        raise WorkFailed(str(error), status=2) from error

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        network = NetworkClient(engine)
        try:
            await network.ensure_open(open_network(open_settings().settings), wait=False)
            if ":" not in peer:
                await network.wait_for(lambda state: any(found.node_id.startswith(peer) for found in state.peers))
            name = await network.pair(peer, typed)
        except NetworkProblem as problem:
            raise WorkFailed(str(problem)) from problem
        finally:
            await close_quietly(network)
        notify(f"Paired with {name}.")
        return 0

    return run_with_engine(work)


def show_code() -> int:
    """Let the ``join`` that runs here show a new code, and print it. Raises WorkFailed if none runs."""
    from discovery.code_requests import ask_for_code
    from discovery.errors import DiscoveryError
    from engine.system.locations import ensure

    folder = ensure("config") / "network"
    try:
        shown = ask_for_code(folder)
    except DiscoveryError as error:
        raise WorkFailed(str(error)) from error
    if shown is None:
        raise WorkFailed("no privatellm join is running here, or it does not answer; start it and try again")
    answer(f"{one_line(shown.code)}\n")
    where = one_line(next(iter(shown.listening), "HOST:PORT"))
    notify(
        f"{one_line(shown.name)} accepts this code for {shown.seconds} s and {shown.tries} tries; type it on the other "
        f"machine: type /machines in its chat, or run privatellm peers pair {where}"
    )
    return 0


def forget(peer: str) -> int:
    """Stop trusting a machine. Needs no network."""

    async def work(engine: EngineClient, interruption: Interruption) -> int:
        try:
            await NetworkClient(engine).forget(peer)
        except NetworkProblem as problem:
            raise WorkFailed(str(problem)) from problem
        notify(f"{peer} is forgotten and no longer trusted.")
        return 0

    return run_with_engine(work)


def renew_identity(*, ask_first: bool) -> int:
    """Give this machine another key and certificate. ``ask_first``: a person at a terminal is asked to confirm.

    Raises WorkFailed.
    """
    from discovery.errors import DiscoveryError
    from discovery.identity import fingerprint_words, new_identity, short
    from engine.system.locations import ensure

    if ask_first and sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
        notify("Give this machine a new identity? You must pair it with every other machine again. [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            notify("Nothing was changed.")
            return 1
    try:
        identity = new_identity(ensure("config") / "network")
    except DiscoveryError as error:
        raise WorkFailed(str(error)) from error
    words = " ".join(fingerprint_words(identity.node_id))
    notify(f"This machine is now {short(identity.node_id)} ({words}); restart every privatellm that runs here.")
    return 0


def _ask_for_code(peer: str) -> str:
    """Raises WorkFailed (status 2) if there is nobody to ask."""
    if sys.stdin is None or sys.stdin.closed:
        raise WorkFailed("there is no code: stdin is closed, so pass it with --code", status=2)
    if sys.stdin.isatty():
        notify(f"Code shown by {peer}:")
    typed = sys.stdin.readline().strip()
    if not typed:
        raise WorkFailed(
            "there is no code: type the one that the other machine shows, or pass it with --code", status=2
        )
    return typed


def as_object(state: NetworkState) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    found = cast(dict[str, Any], msgspec.to_builtins(state))
    return {key: found[key] for key in ("me", "open", "peers", "problems")}


def as_text(state: NetworkState) -> str:
    me = state.me
    words = f"  {fingerprint(me.words)}" if me.words else ""
    first = f"this machine: {one_line(me.name)}  {short_id(me.node_id)}{words}\n"
    if not state.peers:
        hint = "run privatellm join on another machine, then privatellm peers pair HOST:PORT here"
        return f"{first}No machine is paired: {hint}.\n"
    columns = ["name", "node id", "state", "address", "link", "memory", "runtime"]
    rows = [columns, *(_row(peer, state.open) for peer in state.peers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    strangers = [f"{short_id(peer.node_id)} shows the words: {fingerprint(peer.words)}" for peer in state.peers
                 if not peer.name and peer.words]  # fmt: skip
    problems = [f"{one_line(peer.name) or short_id(peer.node_id)}: {as_clause(one_line(peer.problem))}."
                for peer in state.peers if peer.problem]  # fmt: skip
    return first + "\n".join([*lines, *strangers, *problems]) + "\n"


def _row(peer: PeerFacts, looked: bool) -> list[str]:
    """``looked``: the network was open, so the states of the machines are known."""
    return [
        one_line(peer.name) or _NOTHING,
        short_id(peer.node_id),
        state_words(peer) if looked or peer.state != "paired" else "paired",
        peer_address(peer) or _NOTHING,
        link_words(peer.link) if peer.link is not None else _NOTHING,
        f"{byte_size(peer.memory_free)} of {byte_size(peer.memory_total)} free" if peer.memory_total else _NOTHING,
        one_line(peer.runtime) or _NOTHING,
    ]
