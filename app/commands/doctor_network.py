"""The part of ``privatellm doctor`` about other machines: identity, paired machines, ports, multicast.

Nothing is sent unless a ring was set up before or the person asks for it with ``--network``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from app.engine_client import EngineClient, EngineDied
from app.network import NetworkClient, NetworkProblem, close_quietly
from app.ring_words import state_words
from app.settings.file import open_settings
from app.settings.ring import open_network
from app.text_safety import one_line
from engine.ipc.messages import PeerFacts
from engine.planning.ring_words import as_clause
from engine.system.locations import locate

if TYPE_CHECKING:
    from discovery.checks import NetworkFacts, PeerStep
    from discovery.peers import Peer


Mark = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``way_out`` is what to do about it."""

    about: str
    text: str
    mark: Mark = "ok"
    way_out: str = ""


_CERTIFICATE = "certificate.pem"
_KEY = "private-key.pem"
_SHOWN = 8
_UNREACHABLE = "127.0.0.1:0"
"""Listening address of the process that greets another machine. It is not announced, and no other machine can
connect to it."""
_MARKS: dict[str, Mark] = {"neighbours": "note"}
"""Marks of network problems that may be harmless: there may be no other machine to hear."""


def network(*, probe: bool, peer: str = "") -> list[Finding]:
    """The findings. ``probe``: examine the network although no ring was set up. ``peer``: HOST:PORT to be reached."""
    folder = locate("config") / "network"
    set_up = (folder / _CERTIFICATE).exists()
    if not set_up and not probe and not peer:
        hint = "run privatellm doctor --network to check the network"
        return [Finding("network", "no ring was set up; no socket was opened", "note", hint)]
    found = [*_identity(folder), *_peers(folder)] if set_up else []
    return [*found, *_ports(), *_reach(), *(_walk(folder, peer) if peer else [])]


def _identity(folder: Path) -> list[Finding]:
    """This machine's identity, and where its key is stored. Creates neither."""
    from discovery.certificates import CertificateError, der_of, fingerprint
    from discovery.identity import IN_KEYRING, fingerprint_words, short

    try:
        node_id = fingerprint(der_of((folder / _CERTIFICATE).read_bytes()))
    except (CertificateError, OSError) as error:
        way_out = "the network makes a new identity when it is next opened; pair the machines again"
        return [Finding("identity", f"{folder / _CERTIFICATE} cannot be used ({error})", "problem", way_out)]
    key = folder / _KEY
    where = f"the file {key}" if key.exists() else IN_KEYRING
    return [Finding("identity", f"{short(node_id)} ({' '.join(fingerprint_words(node_id))}); key in {where}")]


def _peers(folder: Path) -> list[Finding]:
    from discovery.errors import DiscoveryError
    from discovery.peers import PeersFile

    try:
        names = [one_line(peer.label) for peer in PeersFile(folder).all()]
    except DiscoveryError as error:
        return [Finding("machines", str(error), "problem", f"see {folder}")]
    if not names:
        return [
            Finding(
                "machines",
                "none is paired",
                "note",
                "run privatellm join on another machine and type /machines in the chat here",
            )
        ]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [Finding("machines", f"{', '.join(names[:_SHOWN])}{more} paired")]


def _ports() -> list[Finding]:
    """Whether the usual two ports are free, as findings. They are opened and closed again."""
    from discovery.errors import DiscoveryError
    from discovery.link_listener import USUAL_PORT, bind_pair

    try:
        pair = bind_pair()
    except (DiscoveryError, OSError) as error:
        return [
            Finding(
                "ports",
                str(error),
                "problem",
                "stop the program that uses them, or choose another port with --listen HOST:PORT",
            )
        ]
    pair.listener.close()
    where = f"{pair.control} (control) and {pair.control + 1} (links)"
    if pair.control != USUAL_PORT:
        return [
            Finding(
                "ports",
                f"{USUAL_PORT} is in use; {where} would be used instead",
                "note",
                "nothing to do: other machines are told the port that is used",
            )
        ]
    return [Finding("ports", f"{where} are free")]


def _reach() -> list[Finding]:
    from discovery.checks import network_facts, network_problems

    facts = network_facts()
    problems = network_problems(facts)
    found = [
        Finding(problem.step, problem.what, _MARKS.get(problem.step, "problem"), problem.remedy) for problem in problems
    ]
    return [_interfaces(facts), *(found or [Finding("multicast", "works on every interface")])]


def _interfaces(facts: NetworkFacts) -> Finding:
    shown = [f"{address.interface} {address.ip}" for address in facts.addresses if not address.is_loopback]
    firewall = f"; firewall: {facts.firewall}" if facts.firewall else ""
    return Finding("interfaces", (", ".join(shown[:_SHOWN]) or "only loopback") + firewall)


def _walk(folder: Path, address: str) -> list[Finding]:
    """The steps of reaching a machine, from its name to its greeting, up to the first that fails."""
    from app.settings.fields import host_and_port
    from discovery.checks import probe_peer

    host, port = host_and_port(address)
    findings = [_step(step) for step in probe_peer(host, port)]
    if all(step.mark == "ok" for step in findings):
        peer, trusted = _trust(folder, host, port)
        findings.append(trusted)
        if peer is not None:
            findings.append(_greeted(peer, address))
    return findings


def _step(step: PeerStep) -> Finding:
    if step.problem is None:
        return Finding(f"peer: {step.step}", step.said)
    return Finding(f"peer: {step.step}", step.problem.what, "problem", step.problem.remedy)


def _trust(folder: Path, host: str, port: int) -> tuple[Peer | None, Finding]:
    """Whether the certificate that the machine shows is one that was paired here."""
    from discovery.certificates import fingerprint
    from discovery.errors import DiscoveryError
    from discovery.identity import fingerprint_words, short
    from discovery.peers import PeersFile
    from discovery.tls import shown_certificate

    about, pair = "peer: trust", f"privatellm peers pair {host}:{port}"
    try:
        node_id = fingerprint(shown_certificate(host, port))
        peers = PeersFile(folder).all()
    except DiscoveryError as error:
        return None, Finding(about, str(error), "problem", f"see {folder}")
    except OSError as error:
        what = f"the program on port {port} is not privatellm ({error.strerror or error})"
        return None, Finding(about, what, "problem", "compare the port with the one that `privatellm join` shows there")
    for peer in peers:
        if peer.node_id == node_id:
            return peer, Finding(about, f"{one_line(peer.label)}, with its paired certificate")
    who = f"{short(node_id)} ({' '.join(fingerprint_words(node_id))})"
    changed = [peer for peer in peers if f"{host}:{port}" in peer.addresses]
    if changed:
        name = one_line(changed[0].label)
        what = f"{name} was found here before, but {who} answers now: another machine, or a new identity"
        way_out = f"if it has a new identity: privatellm peers forget {short(changed[0].node_id)}, then {pair}"
        return None, Finding(about, what, "problem", way_out)
    way_out = f"have it show a code (`privatellm peers code` there, or c on its screen), then {pair}"
    return None, Finding(about, f"{who} is not paired with this machine", "problem", way_out)


def _greeted(peer: Peer, address: str) -> Finding:
    """The machine's reply to a greeting from an engine process that no other machine can reach."""
    about, name = "peer: hello", one_line(peer.label)
    try:
        facts = asyncio.run(_facts_of(peer.node_id, address))
    except (EngineDied, NetworkProblem) as error:
        return Finding(about, str(error), "problem", f"the end of {locate('logs') / 'engine.log'} says why")
    if facts is None or facts.state in ("paired", "lost"):
        return Finding(about, f"{name} listens but does not answer this machine", "problem", "restart it there")
    if facts.problem:
        what, _, way_out = as_clause(one_line(facts.problem)).rpartition("; ")
        what = what or way_out
        greeting = f"{name}{what[2:]}" if what.startswith("it ") else f"{name}: {what}"
        return Finding(about, greeting, "problem", way_out if way_out != what else "see `privatellm --version` on both")
    greeting = f"{name} answers, privatellm {one_line(facts.version)}"
    if facts.state == "busy":
        return Finding(about, f"{greeting}; {state_words(facts)}", "note", "leave the ring there, or wait")
    if not facts.lends:
        return Finding(about, f"{greeting}; not lent", "note", "run privatellm join there")
    return Finding(about, f"{greeting}; lent, and free")


async def _facts_of(node_id: str, address: str) -> PeerFacts | None:
    """Raises NetworkProblem, EngineDied."""
    engine = EngineClient()
    network = NetworkClient(engine)
    wanted = open_network(open_settings(look_only=True).settings)
    try:
        await engine.start()
        await network.ensure_open(msgspec.structs.replace(wanted, listen=_UNREACHABLE, peers=[address]), wait=False)
        await network.wait_for(lambda state: any(_has_told(one) for one in state.peers if one.node_id == node_id))
        found = [one for one in network.paired if one.node_id == node_id]
        await close_quietly(network)
    finally:
        await engine.close()
    return next(iter(found), None)


def _has_told(peer: PeerFacts) -> bool:
    """Whether it is known what the machine does. A machine that only answered the greeting has yet to say to whom it is
    lent: it does so with its memory."""
    return peer.state in ("lost", "refused") or peer.memory_total > 0
