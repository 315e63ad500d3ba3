"""Why machines do not find each other: probes of the network, and the judgement of their results.

Every problem names the failing step and a remedy. The probes open sockets, so they run only when a person asked for the
network or for a check of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from discovery.addresses import OwnAddress, announced, is_inside, own_addresses
from discovery.link_listener import USUAL_PORT, local_network_permission, may_use_local_network, permission_lacked

GROUP = "224.0.0.251"
MDNS_PORT = 5353
_QUIET_SECONDS = 5.0
"""Seconds without its own announcement after which a machine reports a problem."""
_ALONE_SECONDS = 15.0
"""Seconds without any other machine after which a machine reports a problem."""
_ANSWER_SECONDS = 1.0

Firewall = Literal["", "ufw", "firewalld", "macos", "macos-blocks-all"]


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy. ``str()`` gives one sentence for the screen."""

    step: str
    what: str
    """The failure, with its value."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.what[:1].upper()}{self.what[1:]}: {self.remedy}."


@dataclass(frozen=True)
class MulticastProbe:
    """The result of one question sent to the mDNS group from one address."""

    interface: str
    ip: str
    error: str = ""
    """The system's text."""
    code: int = 0
    """errno."""
    heard_itself: bool = False
    others: int = 0
    """Other addresses that answered meanwhile, of any service."""


@dataclass(frozen=True)
class NetworkFacts:
    """The facts that :func:`network_problems` judges."""

    system: str
    """``sys.platform``."""
    addresses: tuple[OwnAddress, ...]
    probes: tuple[MulticastProbe, ...] = ()
    firewall: Firewall = ""
    port: int = USUAL_PORT
    in_container: bool = False
    exempt: bool = False
    """Whether macOS asks for no Local Network permission: Terminal.app and remote logins have it."""
    terminal: str = ""
    """The terminal app to which the permission belongs; empty if it is not known."""


@dataclass(frozen=True)
class PeerStep:
    """One step on the way to ``--peer HOST:PORT``, with what was found or the problem."""

    step: str
    said: str
    """The result in words."""
    problem: Problem | None = None


def network_problems(facts: NetworkFacts) -> list[Problem]:
    """Problems that keep machines from being found, most fundamental first; empty if none is visible from here.
    Pure."""
    reachable = [one for one in facts.addresses if not one.is_loopback and not is_inside(one.interface)]
    if not reachable:
        what = "this machine has no network interface that others could reach"
        if facts.in_container:
            return [Problem("interface", what, "run the container with the host's network (`--network host`)")]
        return [Problem("interface", what, "connect it by cable, Thunderbolt or Wi-Fi")]
    problems = []
    failed = [probe for probe in facts.probes if probe.error]
    silent = [probe for probe in facts.probes if not probe.error and not probe.heard_itself]
    alone = bool(facts.probes) and not any(probe.others for probe in facts.probes)
    problems += [_unsent(probe, facts) for probe in failed]
    problems += [_unheard(probe, facts) for probe in silent]
    if not failed and not silent and alone:
        problems += _nobody("this machine hears itself, but no other device of the network", facts)
    return problems


def hearing_problems(seconds: float, failure: str, own: bool, others: int, facts: NetworkFacts) -> list[Problem]:
    """Problems of an open network, from the fields of :class:`discovery.mdns.Hearing`, without sending anything.
    Pure."""
    if failure:
        return [_announcing_failed(failure, facts)]
    if seconds < _QUIET_SECONDS or others:
        return []
    if not own:
        interfaces = ", ".join(dict.fromkeys(one.interface for one in announced(facts.addresses)))
        what = f"not even this machine's own announcement came back to it on {interfaces}"
        return [Problem("multicast", what, _allowed_first(_let_in(facts), facts))]
    if seconds >= _ALONE_SECONDS:
        return _nobody("no other machine with privatellm was heard of", facts)
    return []


def network_facts(port: int = USUAL_PORT, probe: bool = True) -> NetworkFacts:
    """Collect the facts of this machine. With ``probe`` a question is sent to the mDNS group on every interface (about
    a second)."""
    addresses = tuple(own_addresses())
    return NetworkFacts(
        system=sys.platform,
        addresses=addresses,
        probes=tuple(probe_multicast(addresses)) if probe else (),
        firewall=_firewall(),
        port=port,
        in_container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        exempt=may_use_local_network(os.environ),
        terminal=os.environ.get("TERM_PROGRAM", ""),
    )


def probe_multicast(addresses: Sequence[OwnAddress], seconds: float = _ANSWER_SECONDS) -> list[MulticastProbe]:
    """Send a question on each interface over IPv4, and note whether it is heard here, and who else answers."""
    own = {one.ip for one in addresses}
    chosen = {one.interface: one for one in reversed(announced(addresses)) if one.parsed.version == 4}
    return [_probe(one, own, seconds) for one in sorted(chosen.values())]


def probe_peer(host: str, port: int, seconds: float = 3.0) -> list[PeerStep]:
    """Connect to another machine's control port and link listener, until a step fails."""
    steps: list[PeerStep] = []
    try:
        ip = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        what = f"the name {host} is not known here ({error.strerror})"
        remedy = "use its address, as `privatellm join` shows it there"
        return [PeerStep("name", "", Problem("name", what, remedy))]
    steps.append(PeerStep("name", f"{host} is {ip}"))
    for step, number in (("control", port), ("links", port + 1)):
        try:
            socket.create_connection((host, number), timeout=seconds).close()
        except OSError as error:
            steps.append(PeerStep(step, "", _unreachable(step, host, number, error)))
            return steps
        steps.append(PeerStep(step, f"port {number} answers"))
    return steps


def _unreachable(step: str, host: str, port: int, error: OSError) -> Problem:
    if isinstance(error, ConnectionRefusedError):
        what = f"{host} is there, but nobody listens on port {port}"
        return Problem(step, what, "start `privatellm join` there, and compare the port it shows")
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        what = f"nothing came back from {host} port {port}"
        remedy = f"let TCP {port} through the firewall there, and see that both are in the same network"
        return Problem(step, what, remedy)
    remedy = "see that both machines are in the same network, and that a VPN does not take the way"
    remedy = permission_lacked(error, os.environ, sys.platform) or remedy
    return Problem(step, f"there is no way to {host} port {port} ({error.strerror or error})", remedy)


def _unsent(probe: MulticastProbe, facts: NetworkFacts) -> Problem:
    what = f"mDNS questions cannot be sent on {probe.interface} ({probe.ip}: {probe.error})"
    if _may_lack_permission(facts) and probe.code in (errno.EHOSTUNREACH, errno.EPERM):
        return Problem("multicast", what, _local_network(facts))
    if probe.code == errno.EADDRINUSE:
        return Problem("multicast", what, _shared_port(facts))
    if probe.code in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        command = f"ip route add 224.0.0.0/4 dev {probe.interface}"
        if facts.system == "darwin":
            command = f"route -n add -net 224.0.0.0/4 -interface {probe.interface}"
        remedy = f"give {probe.interface} a route for multicast (`sudo {command}`)"
        return Problem("multicast", what, remedy)
    return Problem("multicast", what, _let_in(facts))


def _unheard(probe: MulticastProbe, facts: NetworkFacts) -> Problem:
    what = f"what this machine sends to the mDNS group on {probe.interface} ({probe.ip}) does not come back to it"
    return Problem("multicast", what, _allowed_first(_let_in(facts), facts))


def _nobody(what: str, facts: NetworkFacts) -> list[Problem]:
    if facts.firewall and facts.system != "darwin":
        return [Problem("neighbours", what, _let_in(facts))]
    apart = "the router keeps its clients apart (“AP isolation”, guest network) or drops multicast"
    apart = _allowed_first(apart, facts)
    named = f"name the machine: `--peer HOST:{facts.port}`"
    remedy = f"if others are there and run it, {apart}; use the same network, or {named}"
    return [Problem("neighbours", what, remedy)]


def _announcing_failed(failure: str, facts: NetworkFacts) -> Problem:
    what = f"this machine cannot announce itself ({failure})"
    lowered = failure.lower()
    if "in use" in lowered:
        return Problem("announcing", what, _shared_port(facts))
    if _may_lack_permission(facts) and ("no route" in lowered or "not permitted" in lowered):
        return Problem("announcing", what, _local_network(facts))
    if "no network interface" in lowered:
        return Problem("announcing", what, "connect it by cable, Thunderbolt or Wi-Fi")
    return Problem("announcing", what, _let_in(facts))


def _may_lack_permission(facts: NetworkFacts) -> bool:
    return facts.system == "darwin" and not facts.exempt


def _allowed_first(remedy: str, facts: NetworkFacts) -> str:
    """``remedy`` after the permission, where that may be lacking: without it macOS drops what is sent."""
    return f"{local_network_permission(facts.terminal)}; else {remedy}" if _may_lack_permission(facts) else remedy


def _local_network(facts: NetworkFacts) -> str:
    return f"{local_network_permission(facts.terminal)}, or name the other machine: `--peer HOST:{USUAL_PORT}`"


def _shared_port(facts: NetworkFacts) -> str:
    remedy = f"another mDNS service holds UDP {MDNS_PORT} for itself"
    if facts.system.startswith("linux"):
        remedy += " (avahi: set disallow-other-stacks=no in /etc/avahi/avahi-daemon.conf)"
    else:
        remedy += f" (find it with `sudo lsof -i UDP:{MDNS_PORT}` and end it)"
    return f"{remedy}; or name the other machine: `--peer HOST:{facts.port}`"


def _let_in(facts: NetworkFacts) -> str:
    ports = f"{facts.port}:{facts.port + 1}"
    where = f"let UDP {MDNS_PORT} and TCP {ports} through the firewall"
    match facts.firewall:
        case "ufw":
            where = f"`sudo ufw allow {MDNS_PORT}/udp && sudo ufw allow {ports}/tcp`"
        case "firewalld":
            range_ = ports.replace(":", "-")
            rule = f"sudo firewall-cmd --permanent --add-service=mdns --add-port={range_}/tcp"
            where = f"`{rule} && sudo firewall-cmd --reload`"
        case "macos-blocks-all":
            where = "switch off “Block all incoming connections” under System Settings > Network > Firewall > Options"
        case "macos":
            where = "allow python under System Settings > Network > Firewall > Options"
        case "":
            pass
    if facts.in_container:
        where += ", and run the container with the host's network (`--network host`)"
    return f"{where}; or name the other machine: `--peer HOST:{facts.port}`"


def _question() -> bytes:
    """Two mDNS questions: which machines run this program, and which responders exist at all.

    Every responder answers the second one. The number, which others ignore, identifies the questions here.
    """
    header = struct.pack("!6H", secrets.randbelow(0xFFFF) + 1, 0, 2, 0, 0, 0)
    asked = b""
    for name in ("_privatellm._tcp.local", "_services._dns-sd._udp.local"):
        labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
        asked += labels + b"\0" + struct.pack("!2H", 12, 1)
    return header + asked


def _probe(address: OwnAddress, own: set[str], seconds: float) -> MulticastProbe:
    question = _question()
    try:
        with _mdns_socket(address.ip) as probe:
            probe.sendto(question, (GROUP, MDNS_PORT))
            heard, others = _listen(probe, question, own, seconds)
    except OSError as error:
        code = error.errno or 0
        return MulticastProbe(address.interface, address.ip, error=error.strerror or str(error), code=code)
    return MulticastProbe(address.interface, address.ip, heard_itself=heard, others=others)


def _mdns_socket(ip: str) -> socket.socket:
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError, AttributeError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(("", MDNS_PORT))
        interface = socket.inet_aton(ip)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + interface)
    except OSError:
        opened.close()
        raise
    return opened


def _listen(probe: socket.socket, question: bytes, own: set[str], seconds: float) -> tuple[bool, int]:
    end = time.monotonic() + seconds
    heard = False
    others: set[str] = set()
    while (left := end - time.monotonic()) > 0 and len(others) < 64:
        probe.settimeout(left)
        try:
            packet, (ip, _) = probe.recvfrom(9000)
        except TimeoutError:
            break
        heard = heard or packet == question
        if ip not in own:
            others.add(ip)
    return heard, len(others)


def _firewall() -> Firewall:
    if sys.platform == "darwin":
        return _macos_firewall()
    ufw = _text_of(Path("/etc/ufw/ufw.conf"))
    if "enabled=yes" in ufw.lower().replace(" ", ""):
        return "ufw"
    return "firewalld" if _says(["firewall-cmd", "--state"]).startswith("running") else ""


def _macos_firewall() -> Firewall:
    tool = "/usr/libexec/ApplicationFirewall/socketfilterfw"
    state = _says([tool, "--getglobalstate"]).lower()
    if "state = 1" not in state and "state = 2" not in state:
        return ""
    blocks = "state = 2" in state or "enabled" in _says([tool, "--getblockall"]).lower()
    return "macos-blocks-all" if blocks else "macos"


def _says(command: list[str], run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str:
    """The output of a system tool; empty if it is absent or slow."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return run(command, capture_output=True, text=True, timeout=3, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
