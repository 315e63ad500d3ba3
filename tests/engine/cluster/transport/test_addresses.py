"""Addresses of machines: read, shown, listed and dialled."""

from __future__ import annotations

import pytest

from discovery.addresses import OwnAddress, shown_address
from engine.cluster.transport import addresses as transport_addresses
from engine.cluster.transport.addresses import (
    as_dialled,
    as_sent,
    listener_address,
    own_addresses,
    parse_address,
    plain_ip,
)
from engine.errors import ModelError

pytestmark = pytest.mark.usefixtures("no_keyring")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:47820", "10.0.0.1", 47820), ("[fe80::1]:5", "fe80::1", 5), ("mac.local:80", "mac.local", 80)],
)
def test_addresses_are_read_and_shown(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert shown_address(host, port) == text
    assert parse_address(listener_address(text)) == (host, port + 1)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1"])
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(ModelError, match="HOST:PORT"):
        parse_address(text)


def test_own_addresses_are_those_that_are_listened_at() -> None:
    assert own_addresses("127.0.0.1", 9) == ["127.0.0.1:9"]
    for address in own_addresses("", 9):
        host, port = parse_address(address)
        assert port == 9
        assert not host.startswith("127.")


def test_a_link_local_address_is_sent_without_scope_and_dialled_on_every_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [
        OwnAddress("lo", "::1", 128),
        OwnAddress("eth0", "192.168.1.7", 24),
        OwnAddress("eth0", "fe80::7", 64),
        OwnAddress("eth1", "fe80::8", 64),
        OwnAddress("docker0", "fe80::9", 64),
        OwnAddress("wlan0", "10.0.0.7", 24),
    ]
    monkeypatch.setattr(transport_addresses, "addresses_here", lambda: own)
    sent = ["192.168.1.7:9", "10.0.0.7:9", "[fe80::7]:9", "[fe80::8]:9"]
    assert sorted(own_addresses("", 9)) == sorted(sent)
    assert own_addresses("fe80::7%eth0", 9) == ["[fe80::7]:9"]
    assert as_sent(["[fe80::1%en7]:9", "[fe80::1%en8]:9", "10.0.0.1:9", "name:9", "[fd00::1]:9", "wrong"]) == [
        "[fe80::1]:9",
        "10.0.0.1:9",
        "name:9",
        "[fd00::1]:9",
        "wrong",
    ]
    assert as_dialled(["[fe80::1]:9", "10.0.0.1:9", "wrong"]) == [
        "[fe80::1%eth0]:9",
        "[fe80::1%eth1]:9",
        "10.0.0.1:9",
        "wrong",
    ]
    # Where it is known by which interface it is reached, no other is tried.
    assert as_dialled(["[fe80::1]:9", "[fe80::1%eth1]:9", "[fe80::2]:9"]) == [
        "[fe80::1%eth1]:9",
        "[fe80::2%eth0]:9",
        "[fe80::2%eth1]:9",
    ]
    monkeypatch.setattr(transport_addresses, "addresses_here", lambda: own[:2])
    assert as_dialled(["[fe80::1]:9", "10.0.0.1:9"]) == ["10.0.0.1:9"], "no cable has such an address"


def test_ipv4_in_an_ipv6_socket_is_ipv4() -> None:
    assert plain_ip("::ffff:10.1.2.3") == "10.1.2.3"
    assert plain_ip("fe80::1%eth0") == "fe80::1%eth0"
    assert plain_ip("name") == "name"
