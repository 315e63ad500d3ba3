"""The part of ``privatellm doctor`` about other machines: identity, paired machines, ports, multicast.

What sends something is done only where a ring was set up already, or when the person asks with ``--network``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.finding import Finding, Mark
from app.text_safety import one_line
from engine.models.locations import locate

if TYPE_CHECKING:
    from discovery.checks import NetworkFacts, PeerStep

_CERTIFICATE = "certificate.pem"
_KEY = "private-key.pem"
_SHOWN = 8
_MARKS: dict[str, Mark] = {"neighbours": "note"}
"""That nobody else is heard is no fault where nobody else is."""


def network(*, probe: bool, peer: str = "") -> list[Finding]:
    """The findings. ``probe``: look at the network although no ring was set up; ``peer``: HOST:PORT to walk to."""
    folder = locate("config") / "network"
    set_up = (folder / _CERTIFICATE).exists()
    if not set_up and not probe and not peer:
        hint = "privatellm doctor --network looks at the network"
        return [Finding("network", "no ring was set up; no socket was opened", "note", hint)]
    found = [*_identity(folder), *_peers(folder)] if set_up else []
    return [*found, *_ports(), *_reach(), *(_walk(peer) if peer else [])]


def _identity(folder: Path) -> list[Finding]:
    """Who this machine is, and where its key should be; nothing is made anew here."""
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
        return [Finding("machines", "none is paired", "note", "privatellm join on the other, f8 in the chat here")]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [Finding("machines", f"{', '.join(names[:_SHOWN])}{more} paired")]


def _ports() -> list[Finding]:
    """Whether the usual pair of ports could be listened at now; they are let go again."""
    from discovery.door import USUAL_PORT, bind_pair
    from discovery.errors import DiscoveryError

    try:
        pair = bind_pair()
    except (DiscoveryError, OSError) as error:
        return [Finding("ports", str(error), "problem", "end what holds them, or choose another: --listen HOST:PORT")]
    pair.door.close()
    where = f"{pair.control} (control) and {pair.control + 1} (door)"
    if pair.control != USUAL_PORT:
        return [Finding("ports", f"{USUAL_PORT} is taken; {where} would be used", "note", "other machines are told")]
    return [Finding("ports", f"{where} are free")]


def _reach() -> list[Finding]:
    from discovery.checks import network_facts, network_problems

    facts = network_facts()
    problems = network_problems(facts)
    found = [
        Finding(problem.step, problem.what, _MARKS.get(problem.step, "problem"), problem.remedy) for problem in problems
    ]
    return [_interfaces(facts), *(found or [Finding("multicast", "heard, on every interface")])]


def _interfaces(facts: NetworkFacts) -> Finding:
    shown = [f"{address.interface} {address.ip}" for address in facts.addresses if not address.is_loopback]
    firewall = f"; firewall: {facts.firewall}" if facts.firewall else ""
    return Finding("interfaces", (", ".join(shown[:_SHOWN]) or "none but loopback") + firewall)


def _walk(peer: str) -> list[Finding]:
    from app.setting_items import host_and_port
    from discovery.checks import probe_peer

    host, port = host_and_port(peer)
    return [_step(step) for step in probe_peer(host, port)]


def _step(step: PeerStep) -> Finding:
    if step.problem is None:
        return Finding(f"peer: {step.step}"[:14], step.said)
    return Finding(f"peer: {step.step}"[:14], step.problem.what, "problem", step.problem.remedy)
