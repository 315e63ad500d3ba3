"""Which addresses are told to others, and in which order theirs are tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from discovery.addresses import Address, OwnAddress, announced, is_inside, own_addresses, towards

WIFI = OwnAddress("en0", "192.168.1.7", 24)
WIFI6 = OwnAddress("en0", "fe80::7", 64)
THUNDERBOLT = OwnAddress("bridge0", "169.254.3.4", 16)
LOOP = OwnAddress("lo", "127.0.0.1", 8)
DOCKER = OwnAddress("docker0", "172.17.0.1", 16)
TAILSCALE = OwnAddress("tailscale0", "100.90.1.1", 32)


@pytest.mark.parametrize(
    ("interface", "inside"),
    [
        ("docker0", True),
        ("br-0a1b2c3d4e5f", True),
        ("virbr0", True),
        ("veth1a2b3c4", True),
        ("bridge100", True),
        ("awdl0", True),
        ("ap1", True),
        ("bridge0", False),
        ("br-lan", False),
        ("br0", False),
        ("en0", False),
        ("eth0", False),
        ("enp3s0", False),
        ("wlan0", False),
        ("tailscale0", False),
        ("apple0", False),
    ],
)
def test_inner_bridges_are_told_from_links_to_others(interface: str, inside: bool) -> None:
    assert is_inside(interface) is inside


def test_what_is_announced_leaves_out_loopback_and_containers() -> None:
    told = announced([LOOP, DOCKER, TAILSCALE, WIFI6, THUNDERBOLT, WIFI])
    assert told == [WIFI, THUNDERBOLT, WIFI6, TAILSCALE]
    assert announced([LOOP, DOCKER]) == [DOCKER]
    system = OwnAddress("utun3", "fe80::3", 64)
    assert announced([system, WIFI, WIFI6]) == [WIFI, WIFI6] and announced([LOOP, system]) == [system]
    assert announced([LOOP]) == [LOOP]
    assert announced([]) == []


def test_the_interface_of_the_default_route_comes_first_of_its_kind() -> None:
    bridge, eth = OwnAddress("br-lan", "10.0.5.1", 24), OwnAddress("eth0", "192.168.1.8", 24, is_default=True)
    vpn = OwnAddress("tun0", "10.8.0.2", 24, is_default=True)
    eth6, bridge6 = OwnAddress("eth0", "2001:db8::8", 64, is_default=True), OwnAddress("br-lan", "2001:db8:1::1", 64)
    assert announced([bridge6, bridge, vpn, eth6, eth]) == [eth, bridge, eth6, bridge6, vpn]


def test_addresses_in_a_network_of_this_machine_come_first_and_container_networks_last() -> None:
    heard = [(ip, 47820) for ip in ("172.17.0.2", "10.9.9.9", "100.90.1.2", "192.168.1.9", "169.254.9.9")]
    found = towards(heard, [WIFI, THUNDERBOLT, DOCKER, LOOP])
    assert [address.ip for address in found] == ["192.168.1.9", "169.254.9.9", "10.9.9.9", "100.90.1.2", "172.17.0.2"]
    assert [address.interface for address in found] == ["en0", "bridge0", "", "", "docker0"]


def test_an_address_in_the_network_of_two_cables_is_where_its_packets_go() -> None:
    cables = [
        OwnAddress("en5", "169.254.5.1", 16),
        OwnAddress("en6", "169.254.6.1", 16),
        OwnAddress("en0", "10.0.0.1", 8),
    ]
    routes = {"169.254.1.2": "169.254.6.1", "169.254.1.3": "169.254.5.1"}
    heard = [("169.254.1.2", 1), ("169.254.1.3", 1), ("169.254.1.4", 1), ("10.0.0.2", 1)]
    asked: list[str] = []

    def source(ip: str) -> str:
        asked.append(ip)
        return routes.get(ip, "")

    found = {address.ip: address.interface for address in towards(heard, cables, source)}
    assert found == {"169.254.1.2": "en6", "169.254.1.3": "en5", "169.254.1.4": "en5", "10.0.0.2": "en0"}
    assert "10.0.0.2" not in asked


def test_link_local_ipv6_keeps_its_interface() -> None:
    (found,) = towards([("fe80::9%en0", 47820), ("fe80::9%en0", 47820)], [WIFI6])
    assert found == Address("fe80::9%en0", 47820, "en0")
    assert found.text == "[fe80::9%en0]:47820"
    assert Address("10.0.0.1", 5).text == "10.0.0.1:5"


def test_addresses_that_cannot_be_a_machines_are_left_out() -> None:
    assert towards([("0.0.0.0", 1), ("::", 1), ("224.0.0.251", 1), ("ff02::fb", 1), ("none", 1)], [WIFI]) == ()


def test_this_machines_own_addresses_are_found() -> None:
    own = own_addresses()
    assert any(one.is_loopback and one.ip == "127.0.0.1" and one.prefix == 8 for one in own)
    assert own == sorted(set(own))
    assert all("%" not in one.ip and 0 <= one.prefix <= one.parsed.max_prefixlen for one in own)


@given(st.lists(st.tuples(st.one_of(st.ip_addresses().map(str), st.text(max_size=12)), st.integers(1, 65534))))
def test_no_address_is_doubled_or_lost(heard: list[tuple[str, int]]) -> None:
    found = towards(heard, [WIFI, WIFI6, LOOP])
    assert len({address.ip for address in found}) == len(found) <= len(heard)
