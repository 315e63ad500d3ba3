"""What leads up to JACCL: which RDMA device reaches whom, and how the nodes tell each other of their connections."""

from __future__ import annotations

import pytest

from engine.cluster.transport.mesh import Mesh

group = pytest.importorskip("engine.cluster.transport.mlx_group", reason="mlx is not installed", exc_type=ImportError)

PORTS = ["en5", "en6", "en7"]
SAID = """
Hardware Port: Ethernet Adapter (en3)
Device: en3
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt 1
Device: en1
Ethernet Address: 00:00:00:00:00:03

Hardware Port: Thunderbolt 2
Device: en2
Ethernet Address: 00:00:00:00:00:04
"""
"""As `networksetup -listallhardwareports` prints it."""
INTERFACES = {"10.0.0.1": "en5", "10.0.1.1": "en6", "127.0.0.1": "lo0", "fe80::1": "en7"}


def test_devices_are_named_after_the_interfaces_of_the_links() -> None:
    assert group.device_row({0: "10.0.0.1", 2: "10.0.1.1"}, INTERFACES, PORTS, 1, 3) == ["rdma_en5", "", "rdma_en6"]
    assert group.device_row({1: "fe80::1%en7"}, INTERFACES, PORTS, 0, 2) == ["", "rdma_en7"]


@pytest.mark.parametrize("address", ["127.0.0.1", "192.168.0.9", ""])
def test_no_device_where_no_cable_ends(address: str) -> None:
    assert group.device_row({1: address}, INTERFACES, PORTS, 0, 2) == []


def test_only_thunderbolt_ports_have_a_device() -> None:
    assert group.thunderbolt_ports(SAID) == ["en1", "en2"] and group.thunderbolt_ports("") == []
    wireless = {"192.168.1.7": "en0", "169.254.1.1": "bridge0", "10.0.0.1": "en1"}
    ports = group.thunderbolt_ports(SAID)
    assert group.device_row({1: "192.168.1.7"}, wireless, ports, 0, 2) == []
    assert group.device_row({1: "169.254.1.1"}, wireless, ports, 0, 2) == []
    assert group.device_row({1: "10.0.0.1"}, wireless, ports, 0, 2) == ["", "rdma_en1"]


def test_the_matrix_has_a_device_for_every_pair_and_null_for_oneself() -> None:
    rows = [["", "rdma_en5", "rdma_en6"], ["rdma_en5", "", "rdma_en6"], ["rdma_en5", "rdma_en6", ""]]
    assert group.device_matrix(rows) == [
        [None, "rdma_en5", "rdma_en6"],
        ["rdma_en5", None, "rdma_en6"],
        ["rdma_en5", "rdma_en6", None],
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [["", "rdma_en5"], []],
        [["", "rdma_en5"], ["", ""]],
        [["", "a"], ["a", "", "b"]],
        [["", "en", "en"], ["a", "", "b"], ["a", "b", ""]],
    ],
)
def test_no_matrix_unless_all_nodes_have_a_device_for_each_other(rows: list[list[str]]) -> None:
    assert group.device_matrix(rows) is None


class _Given(Mesh):
    """What the others told is given."""

    def __init__(self, *told: bytes) -> None:
        self.told = told
        self.sent: list[bytes] = []

    def send(self, parts: object, capacity: int) -> None:
        assert isinstance(parts, list)
        self.sent += parts

    def receive(self) -> list[memoryview]:
        return [memoryview(each) for each in self.told]


def test_the_side_channel_gives_all_in_the_order_of_their_ranks() -> None:
    mesh = _Given(b"abcd", b"efgh")
    assert group.side_channel(mesh)(b"abcd", 4) == b"abcdefgh"
    assert mesh.sent == [b"abcd"]


def test_the_side_channel_refuses_another_length() -> None:
    with pytest.raises(RuntimeError, match="5 bytes"):
        group.side_channel(_Given(b"abcd", b"efghi"))(b"abcd", 4)
