"""Why machines do not find each other: every judgement names the step and a way out; the probes are real."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from discovery import checks
from discovery.addresses import OwnAddress
from discovery.checks import MulticastProbe, NetworkFacts, hearing_problems, network_problems, probe_peer
from discovery.errors import LinkListenerError
from discovery.link_listener import LinkListener, bind_pair, dial, may_use_local_network, permission_lacked
from tests.support.network_namespaces import network

LOOP = OwnAddress("lo", "127.0.0.1", 8)
WIFI = OwnAddress("en0", "192.168.1.7", 24)
FINE = MulticastProbe("en0", "192.168.1.7", heard_itself=True, others=2)
LINUX = NetworkFacts(system="linux", addresses=(LOOP, WIFI), probes=(FINE,))
MAC = replace(LINUX, system="darwin")
SETTINGS = "System Settings > Privacy & Security > Local Network"


def only(facts: NetworkFacts) -> str:
    (problem,) = network_problems(facts)
    text = str(problem)
    assert text.endswith(".") and text[0].isupper() and ": " in text
    return text


def test_a_network_that_works_is_no_problem() -> None:
    assert network_problems(LINUX) == network_problems(MAC) == []
    assert network_problems(replace(LINUX, probes=())) == []


def test_no_interface() -> None:
    assert "no network interface" in only(replace(LINUX, addresses=(LOOP,)))
    docker = OwnAddress("docker0", "172.17.0.1", 16)
    assert "no network interface" in only(replace(LINUX, addresses=(LOOP, docker)))
    assert "--network host" in only(replace(LINUX, addresses=(LOOP,), in_container=True))


def test_macos_without_the_permission() -> None:
    probe = MulticastProbe("en0", "192.168.1.7", error="No route to host", code=errno.EHOSTUNREACH)
    text = only(replace(MAC, probes=(probe,)))
    assert "en0" in text and SETTINGS in text and "--peer" in text
    nobody = replace(FINE, others=0)
    assert SETTINGS in only(replace(MAC, probes=(nobody,)))


def test_macos_asks_nothing_of_its_own_terminal_and_of_remote_logins() -> None:
    """The permission is in no list there: it is not blamed."""
    exempt = replace(MAC, exempt=True)
    text = only(replace(exempt, probes=(replace(FINE, others=0),)))
    assert SETTINGS not in text and "AP isolation" in text
    assert "AP isolation" in only(replace(MAC, probes=(replace(FINE, others=0),)))
    blocked = MulticastProbe("en0", "192.168.1.7", error="No route to host", code=errno.EHOSTUNREACH)
    assert SETTINGS not in only(replace(exempt, probes=(blocked,)))
    said = " ".join(map(str, hearing_problems(1, "No route to host", False, 0, exempt)))
    assert said and SETTINGS not in said
    assert may_use_local_network({"TERM_PROGRAM": "Apple_Terminal"})
    assert may_use_local_network({"SSH_CONNECTION": "1.2.3.4"})
    assert not may_use_local_network({"TERM_PROGRAM": "ghostty"})


def test_macos_drops_what_is_sent_without_the_permission() -> None:
    """Nothing fails then, and no firewall is to blame."""
    for facts in (MAC, replace(MAC, firewall="macos")):
        (heard,) = map(str, hearing_problems(6, "", False, 0, replace(facts, terminal="ghostty")))
        assert "own announcement" in heard and "allow Ghostty under " + SETTINGS in heard
        assert heard.index(SETTINGS) < heard.lower().index("firewall")
        assert SETTINGS not in str(hearing_problems(6, "", False, 0, replace(facts, exempt=True))[0])
    silent = only(replace(MAC, probes=(replace(FINE, heard_itself=False),)))
    assert silent.index("your terminal app") < silent.index("firewall")


def test_a_connection_without_the_permission() -> None:
    error = OSError(errno.EHOSTUNREACH, "No route to host")
    said = permission_lacked(error, {"TERM_PROGRAM": "iTerm.app"}, "darwin")
    assert said.startswith("allow iTerm under " + SETTINGS)
    for terminal in ("", "tmux", "\x1b[31m"):
        assert permission_lacked(error, {"TERM_PROGRAM": terminal}, "darwin").startswith("allow your terminal app ")
    assert permission_lacked(error, {"TERM_PROGRAM": "iTerm.app"}, "linux") == ""
    assert permission_lacked(error, {"SSH_CONNECTION": "1.2.3.4"}, "darwin") == ""
    assert permission_lacked(OSError(errno.ECONNREFUSED, "refused"), {}, "darwin") == ""


def test_dialling_without_the_permission_names_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(address: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "WezTerm")
    with pytest.raises(LinkListenerError, match=r"Nobody answers .*allow WezTerm under .*firewall"):
        dial(("192.168.1.9", 47821), "pair")


def test_a_mac_is_given_the_command_of_a_mac() -> None:
    probe = MulticastProbe("en7", "10.0.0.1", error="Network is unreachable", code=errno.ENETUNREACH)
    text = only(replace(MAC, probes=(probe,)))
    assert "route -n add -net 224.0.0.0/4 -interface en7" in text and "ip route" not in text


def test_linux_without_a_route() -> None:
    probe = MulticastProbe("eth7", "10.0.0.1", error="Network is unreachable", code=errno.ENETUNREACH)
    assert "ip route add 224.0.0.0/4 dev eth7" in only(replace(LINUX, probes=(probe,)))


def test_the_port_is_taken() -> None:
    probe = MulticastProbe("en0", "192.168.1.7", error="Address already in use", code=errno.EADDRINUSE)
    assert "avahi-daemon.conf" in only(replace(LINUX, probes=(probe,)))
    assert "lsof -i UDP:5353" in only(replace(MAC, probes=(probe,)))


@pytest.mark.parametrize(
    ("firewall", "way_out"),
    [
        ("", "let UDP 5353 and TCP 47820:47821 through"),
        ("ufw", "sudo ufw allow 5353/udp && sudo ufw allow 47820:47821/tcp"),
        ("firewalld", "--add-service=mdns --add-port=47820-47821/tcp"),
        ("macos", "Firewall > Options"),
        ("macos-blocks-all", "Block all incoming connections"),
    ],
)
def test_what_is_sent_does_not_come_back(firewall: checks.Firewall, way_out: str) -> None:
    silent = MulticastProbe("en0", "192.168.1.7")
    text = only(replace(LINUX, probes=(silent,), firewall=firewall))
    assert way_out in text and "does not come back" in text and "--peer HOST:47820" in text
    assert "--network host" in only(replace(LINUX, probes=(silent,), firewall=firewall, in_container=True))


def test_nobody_else_answers() -> None:
    alone = replace(FINE, others=0)
    assert "AP isolation" in only(replace(LINUX, probes=(alone,)))
    assert "ufw" in only(replace(LINUX, probes=(alone,), firewall="ufw"))


def test_every_interface_that_fails_is_named() -> None:
    probes = (
        replace(FINE, others=0),
        MulticastProbe("eth1", "10.0.0.1", error="x", code=1),
        MulticastProbe("e2", "1.1.1.1"),
    )
    assert [problem.what.count("eth1") for problem in network_problems(replace(LINUX, probes=probes))] == [1, 0]


def test_an_open_network_is_judged_by_what_it_hears() -> None:
    def said(seconds: float, failure: str, own: bool, others: int, facts: NetworkFacts = LINUX) -> str:
        return " ".join(map(str, hearing_problems(seconds, failure, own, others, facts)))

    assert said(1, "", False, 0) == said(100, "", True, 1) == said(100, "", False, 1) == said(10, "", True, 0) == ""
    assert "own announcement" in said(6, "", False, 0)
    assert "No other machine" in said(20, "", True, 0)
    assert SETTINGS in said(20, "", True, 0, MAC)
    assert "avahi" in said(1, "Address already in use", False, 0)
    assert SETTINGS in said(1, "No route to host", False, 0, MAC)
    assert "cable" in said(1, "no network interface is up", False, 0)
    assert "firewall" in said(1, "Operation not permitted", False, 0)


def test_the_way_to_a_machine_is_walked_step_by_step() -> None:
    pair = bind_pair("127.0.0.1", 0)
    listener = LinkListener(pair.listener)
    try:
        name, control = probe_peer("127.0.0.1", pair.control)
        assert name.said == "127.0.0.1 is 127.0.0.1"
        assert control.problem is not None and "nobody listens" in str(control.problem)
        with socket.create_server(("127.0.0.1", pair.control)):
            assert [step.problem for step in probe_peer("127.0.0.1", pair.control)] == [None, None, None]
            listener.close()
            steps = probe_peer("127.0.0.1", pair.control)
        assert [step.step for step in steps] == ["name", "control", "links"]
        assert steps[-1].problem is not None and str(pair.control + 1) in steps[-1].problem.what
    finally:
        listener.close()


def test_a_name_nobody_knows_and_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    (unknown,) = probe_peer("no-such-machine.invalid", 47820)
    assert unknown.problem is not None and "no-such-machine.invalid" in unknown.problem.what

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    assert "TCP 47820 through the firewall" in str(probe_peer("127.0.0.1", 47820)[-1].problem)

    def nowhere(address: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", nowhere)
    assert "VPN" in str(probe_peer("127.0.0.1", 47820)[-1].problem)
    monkeypatch.setattr(sys, "platform", "darwin")
    for variable in ("TERM_PROGRAM", "SSH_CONNECTION"):
        monkeypatch.delenv(variable, raising=False)
    assert SETTINGS in str(probe_peer("127.0.0.1", 47820)[-1].problem)
    monkeypatch.setenv("TERM_PROGRAM", "Apple_Terminal")
    assert SETTINGS not in str(probe_peer("127.0.0.1", 47820)[-1].problem)


def test_system_tools_that_are_absent_slow_or_broken_say_nothing() -> None:
    def slow(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("tool", 3)

    assert checks._says(["no-such-tool-anywhere"]) == ""
    assert checks._says(["sh"], slow) == ""
    assert checks._says(["sh", "-c", "echo running"]) == "running\n"


def test_the_macos_firewall_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"--getglobalstate": "Firewall is enabled. (State = 1)", "--getblockall": "Block all DISABLED!"}
    monkeypatch.setattr(checks, "_says", lambda command: answers[command[1]])
    assert checks._macos_firewall() == "macos"
    answers["--getblockall"] = "Block all ENABLED!"
    assert checks._macos_firewall() == "macos-blocks-all"
    answers |= {"--getglobalstate": "Firewall is enabled. (State = 2)", "--getblockall": ""}
    assert checks._macos_firewall() == "macos-blocks-all"
    answers["--getglobalstate"] = "Firewall is disabled. (State = 0)"
    assert checks._macos_firewall() == ""


def test_the_probe_on_real_interfaces() -> None:
    """No cable at all; then one that works, at whose other end nobody speaks."""
    program = (
        "import json\n"
        "from discovery.checks import network_facts, network_problems\n"
        "facts = network_facts()\n"
        "probes = [[probe.interface, probe.error, probe.heard_itself] for probe in facts.probes]\n"
        "print(json.dumps([probes, [problem.step for problem in network_problems(facts)]]))\n"
    )
    root = Path(checks.__file__).parents[1]
    with network(2) as cables:
        command = [*cables.spaces[0].prefix, sys.executable, "-c", program]

        def report() -> tuple[list[object], list[str]]:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            probes, steps = json.loads(done.stdout)
            return probes, steps

        cables.pull(0)
        assert report()[1] == ["interface"]
        cables.plug(0)
        assert report() == ([["lan0", "", True]], ["neighbours"])
