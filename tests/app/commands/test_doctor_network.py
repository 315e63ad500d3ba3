"""The network in ``privatellm doctor``: nothing is opened before a ring was set up or the person asks."""

from __future__ import annotations

import errno
import json
import socket
from pathlib import Path

import pytest

from app.commands import doctor_network
from app.commands.root import run
from discovery import checks
from discovery.addresses import OwnAddress
from discovery.checks import MulticastProbe, NetworkFacts


def no_socket(*arguments: object, **more: object) -> socket.socket:
    raise AssertionError("a socket was opened")


def facts(error: str = "", others: int = 1, system: str = "linux", code: int = 0) -> NetworkFacts:
    address = OwnAddress("eth0", "192.168.7.2", 24)
    probe = MulticastProbe("eth0", "192.168.7.2", error=error, code=code, heard_itself=not error, others=others)
    return NetworkFacts(system=system, addresses=(address,), probes=(probe,))


def look_at(monkeypatch: pytest.MonkeyPatch, found: NetworkFacts) -> None:
    monkeypatch.setattr(checks, "network_facts", lambda: found)


def test_no_socket_is_opened_before_anybody_asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", no_socket)
    (finding,) = doctor_network.network(probe=False)
    assert finding.mark == "note" and "no socket was opened" in finding.text and "--network" in finding.way_out
    assert not (home / "config").exists()


def test_a_ring_that_was_set_up_is_examined(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["peers", "new-identity", "--yes"]) == 0
    look_at(monkeypatch, facts())
    found = {finding.about: finding for finding in doctor_network.network(probe=False)}
    assert set(found) == {"identity", "machines", "ports", "interfaces", "multicast"}
    assert "key in" in found["identity"].text and len(found["identity"].text.split("(")[1].split(")")[0].split()) == 6
    assert found["machines"].mark == "note" and found["multicast"].mark == "ok"
    assert found["interfaces"].text == "eth0 192.168.7.2"


def test_a_damaged_certificate_is_said_and_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "config" / "network"
    folder.mkdir(parents=True)
    (folder / "certificate.pem").write_text("nothing of the kind")
    look_at(monkeypatch, facts())
    finding = next(finding for finding in doctor_network.network(probe=False) if finding.about == "identity")
    assert finding.mark == "problem" and [entry.name for entry in folder.iterdir()] == ["certificate.pem"]


@pytest.mark.parametrize(
    ("found", "about", "mark", "said"),
    [
        (facts(error="No route", system="darwin", code=errno.EHOSTUNREACH), "multicast", "problem", "Local Network"),
        (facts(others=0), "neighbours", "note", "--peer"),
        (NetworkFacts(system="linux", addresses=()), "interface", "problem", "cable"),
    ],
)
def test_what_fails_is_named_with_the_way_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, found: NetworkFacts, about: str, mark: str, said: str
) -> None:
    look_at(monkeypatch, found)
    finding = next(finding for finding in doctor_network.network(probe=True) if finding.about == about)
    assert finding.mark == mark and said in finding.way_out


def test_the_way_to_a_machine_is_walked(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look_at(monkeypatch, facts())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        steps = {
            finding.about: finding.mark
            for finding in doctor_network.network(probe=False, peer=f"127.0.0.1:{port}")
            if finding.about.startswith("peer")
        }
    assert steps == {"peer: name": "ok", "peer: control": "ok", "peer: links": "problem"}
    assert run(["doctor", "--peer", "nowhere"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_it_is_part_of_what_doctor_prints(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", "--json"])
    assert "network" in [finding["about"] for finding in json.loads(capsys.readouterr().out)]
