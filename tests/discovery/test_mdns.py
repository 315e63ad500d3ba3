"""Machines that announce themselves: between processes, over several interfaces, when addresses change."""

from __future__ import annotations

import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import zeroconf
from hypothesis import given
from hypothesis import strategies as st

from discovery import mdns
from discovery.addresses import Address, OwnAddress
from discovery.identity import copied_identities
from discovery.mdns import MAX_SERVICES, SERVICE, FoundNode, Neighbourhood, _Seen
from tests.discovery.announcing_machines import LOOPBACK, OFTEN, WITHIN, Listening, Process, ids


def test_two_processes_see_each_other_and_a_goodbye(start: Callable[..., Process]) -> None:
    (one, one_instance), (other, other_instance) = ids(), ids()
    first = start(one, one_instance, 4001, "127.0.0.1")
    second = start(other, other_instance, 4002, "127.0.0.1")
    assert first.wait(lambda heard: heard.get(other) == ["127.0.0.1:4002"])
    assert second.wait(lambda heard: heard.get(one) == ["127.0.0.1:4001"])
    second.close()
    assert first.wait(lambda heard: other not in heard)


def test_a_machine_that_comes_back_on_another_port_is_seen_there(
    start: Callable[..., Process], listen: Callable[..., Listening]
) -> None:
    node_id, instance = ids()
    listening = listen(*ids(), 4000)
    first = start(node_id, instance, 4001, "127.0.0.1")
    assert listening.hears(node_id, ("127.0.0.1:4001",))
    first.kill()
    start(node_id, instance, 4003, "127.0.0.1")
    assert listening.wait(lambda found: any(one.node_id == node_id and "127.0.0.1:4003" in one.texts for one in found))


def test_its_own_announcement_is_heard_and_not_listed(listen: Callable[..., Listening]) -> None:
    one, other = listen(*ids(), 4000), listen(*ids(), 4001)
    assert one.hears(other.node_id) and other.hears(one.node_id)
    end = time.monotonic() + WITHIN
    while not one.neighbourhood.hearing().own and time.monotonic() < end:
        threading.Event().wait(0.05)
    hearing = one.neighbourhood.hearing()
    assert hearing.own and hearing.others >= 1 and hearing.failure == ""
    assert all(found.node_id != one.node_id for found in one.found)


def test_what_is_announced_is_an_id_a_version_and_a_port(listen: Callable[..., Listening]) -> None:
    """No name of a person or a machine: those are told after pairing only."""
    announcing, hearing = listen(*ids(), 4000), listen(*ids(), 4001)
    assert hearing.hears(announcing.node_id)
    opened = zeroconf.Zeroconf(interfaces=["127.0.0.1"])
    try:
        name = announcing.neighbourhood._name
        info = opened.get_service_info(SERVICE, name, timeout=int(WITHIN * 1000))
    finally:
        opened.close()
    assert info is not None and info.server is not None and info.port == 4000
    node_id, instance = announcing.node_id, announcing.instance
    assert info.decoded_properties == {"v": "1", "id": node_id, "i": instance}
    assert name == f"{node_id[:16]}-{instance}-4000.{SERVICE}"
    host, generation, started = info.server.removesuffix(".local.").split("-")
    assert host == instance and int(generation) >= 1 and int(started, 16) >= 0


def test_a_copied_identity_is_heard_and_named(listen: Callable[..., Listening]) -> None:
    node_id, instance = ids()
    original = listen(node_id, instance, 4000)
    listen(node_id, secrets.token_hex(8), 4001)
    assert original.hears(node_id)
    mine = FoundNode(node_id, instance, (), 1)
    (sentence,) = copied_identities(mine, [found for found in original.found if found.node_id == node_id])
    assert node_id[:8] in sentence and "copied" in sentence


def test_addresses_that_change_are_announced_anew(listen: Callable[..., Listening]) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux has all of 127.0.0.0/8 on its loopback")
    addresses = [LOOPBACK]
    moving = listen(*ids(), 4000, own=lambda: list(addresses))
    watching = listen(*ids(), 4001)
    assert watching.hears(moving.node_id, ("127.0.0.1:4000",))
    addresses[:] = [OwnAddress("lo", "127.0.0.7", 8)]
    assert watching.hears(moving.node_id, ("127.0.0.7:4000",))
    assert moving.hears(watching.node_id)


def test_a_machine_that_slept_announces_itself_anew(
    listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping = listen(*ids(), 4000)
    end = time.monotonic() + WITHIN
    while not sleeping.neighbourhood.hearing().own and time.monotonic() < end:
        threading.Event().wait(0.05)
    generation = sleeping.neighbourhood._generation
    monkeypatch.setattr(mdns, "_asleep", lambda: time.time() - time.monotonic() + 3600)
    while sleeping.neighbourhood._generation == generation and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert sleeping.neighbourhood._generation == generation + 1
    other = listen(*ids(), 4001)
    assert other.hears(sleeping.node_id) and sleeping.hears(other.node_id)


def test_a_listener_that_fails_does_not_end_it(listen: Callable[..., Listening]) -> None:
    heard: queue.SimpleQueue[set[str]] = queue.SimpleQueue()

    def failing(found: list[FoundNode]) -> None:
        heard.put({one.node_id for one in found})
        raise RuntimeError("on purpose")

    neighbourhood = Neighbourhood(*ids(), 4000, failing, own=lambda: [LOOPBACK], intervals=OFTEN)
    try:
        for port in (4001, 4002):
            other = listen(*ids(), port).node_id
            while other not in heard.get(timeout=WITHIN):
                pass
    finally:
        neighbourhood.close()


def test_without_an_interface_it_says_so_and_begins_when_there_is_one(
    listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[OwnAddress] = []
    waiting = listen(*ids(), 4000, own=lambda: list(addresses))
    other = listen(*ids(), 4001)
    end = time.monotonic() + WITHIN
    while not waiting.neighbourhood.hearing().failure and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert waiting.neighbourhood.hearing().failure == "no network interface is up"
    addresses.append(LOOPBACK)
    assert waiting.hears(other.node_id) and other.hears(waiting.node_id)
    assert waiting.neighbourhood.hearing().failure == ""


def test_a_socket_that_cannot_be_opened_is_told_and_tried_again(
    listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = mdns._open
    failing = threading.Event()
    tries: list[int] = []

    def refuse(told: list[OwnAddress]) -> list[zeroconf.Zeroconf]:
        tries.append(1)
        if not failing.is_set():
            raise OSError(98, "Address already in use")
        return opened(told)

    monkeypatch.setattr(mdns, "_open", refuse)
    refused = listen(*ids(), 4000)
    end = time.monotonic() + WITHIN
    while len(tries) < 2 and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert refused.neighbourhood.hearing().failure == "Address already in use"
    failing.set()
    other = listen(*ids(), 4001)
    assert other.hears(refused.node_id)


def test_where_families_are_apart_each_group_is_joined_by_its_own_sockets(
    listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Darwin: an IPv6 socket joins no IPv4 group there, so machines that have IPv6 would not hear IPv4."""
    import socket

    both = [LOOPBACK, OwnAddress("lo" if sys.platform == "linux" else "lo0", "::1", 128)]
    monkeypatch.setattr(mdns, "_FAMILIES_APART", True)
    opened = mdns._open(both)
    try:
        assert 1 <= len(opened) <= 2  # there may be no IPv6 here
        for one, family in zip(opened, (socket.AF_INET, socket.AF_INET6), strict=False):
            sockets = [reader.sock for reader in one.engine.readers]
            assert sockets and {each.family for each in sockets} == {family}
    finally:
        for one in opened:
            one.close()
    apart = [listen(*ids(), 4000 + number, own=lambda: both) for number in range(2)]
    monkeypatch.setattr(mdns, "_FAMILIES_APART", False)
    other = listen(*ids(), 4002)
    for one in (*apart, other):
        assert all(one.hears(another.node_id) for another in (*apart, other) if another is not one)
    apart[0].neighbourhood.close()
    assert other.hears_no_more_of(apart[0].node_id) and apart[1].hears_no_more_of(apart[0].node_id)


def test_announcements_that_are_none_are_ignored(listen: Callable[..., Listening]) -> None:
    good, instance = ids()
    listening = listen(*ids(), 4000)
    bad: list[dict[str, str | bytes]] = [
        {"v": "1", "id": "zz" * 32, "i": instance},
        {"v": "1", "id": good[:-2], "i": instance},
        {"v": "one", "id": good, "i": instance},
        {"v": "1", "id": good, "i": "\x1b[2J"},
        {"id": good, "i": instance},
        {"v": "1", "id": b"\xff" * 64, "i": instance},
        {},
    ]
    opened = zeroconf.Zeroconf(interfaces=["127.0.0.1"])

    def announce(number: int, properties: dict[str, str | bytes]) -> None:
        info = zeroconf.ServiceInfo(
            SERVICE,
            f"{good[:8]}-{number}.{SERVICE}",
            port=4010,
            properties=properties,  # type: ignore[arg-type]
            server=f"{good[:8]}-{number}.local.",
            parsed_addresses=["127.0.0.1"],
        )
        opened.register_service(info, cooperating_responders=True)

    try:
        with ThreadPoolExecutor(len(bad)) as pool:
            list(pool.map(announce, range(len(bad)), bad))
        announce(len(bad), {"v": "1", "id": good, "i": instance, "more": "x" * 200})
        assert listening.hears(good, ("127.0.0.1:4010",))
        # The last one was heard, and none of those before it.
        assert sum(one.node_id == good for one in listening.found) == 1
        assert not any(one.node_id in ("zz" * 32, good[:-2]) for one in listening.found)
    finally:
        opened.close()


def test_garbage_on_the_mdns_port_harms_nobody(listen: Callable[..., Listening]) -> None:
    import random
    import socket

    numbers = random.Random(3)
    listening = listen(*ids(), 4000)
    first = listen(*ids(), 4001)
    assert listening.hears(first.node_id)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        header = bytes(2) + b"\x84\x00" + bytes(2) + b"\x00\x02" + bytes(4)
        for number in range(200):
            junk = numbers.randbytes(numbers.randint(0, 300))
            sender.sendto(header + junk if number % 2 else junk, ("224.0.0.251", 5353))
    second = listen(*ids(), 4002)
    assert listening.hears(second.node_id)


def test_closing_leaves_nothing_behind(listen: Callable[..., Listening]) -> None:
    def threads() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        return {name for name in names if name == "neighbourhood" or "zeroconf" in name.lower()}

    descriptors = Path("/proc/self/fd")
    listen(*ids(), 4000).neighbourhood.close()  # what the library loads on its first use stays
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    for _ in range(2):
        one = listen(*ids(), 4000)
        one.neighbourhood.close()
        one.neighbourhood.close()
    assert threads() == set()
    if before:
        assert len(list(descriptors.iterdir())) <= before


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"id", b"i", b"x"]),
        st.one_of(st.none(), st.binary(max_size=80), st.just(b"1"), st.just(b"a" * 64), st.just(b"b" * 16)),
    ),
    st.one_of(st.none(), st.integers(-1, 70000)),
    st.lists(st.one_of(st.text(max_size=20), st.ip_addresses().map(str), st.just("fe80::1%1")), max_size=30),
)
def test_any_announcement_is_a_sound_hint_or_nothing(
    properties: dict[bytes, bytes | None], port: int | None, addresses: list[str]
) -> None:
    found = mdns._parsed(properties, port, addresses, [LOOPBACK])
    if found is not None:
        assert len(found.node_id) == 64 and len(found.instance) == 16 and found.version >= 0
        assert 0 < len(found.addresses) <= 16
        assert all(isinstance(address, Address) and 0 < address.port < 65535 for address in found.addresses)


def test_a_flood_of_announcements_takes_no_memory() -> None:
    """What is kept of announcements has limits here, and in the library whose records these are."""
    heard = Neighbourhood("a" * 64, "b" * 16, 1234, lambda found: None, own=list)
    try:
        other = FoundNode("c" * 64, "d" * 16, (Address("10.0.0.1", 1),), 1)
        with heard._mutex:
            heard._seen = {f"real-{number}": _Seen(other, time.monotonic()) for number in range(MAX_SERVICES)}
        library = SimpleNamespace(loop=None)
        for number in range(20_000):
            heard._heard(library, SERVICE, f"{number}.{SERVICE}", SimpleNamespace(name="Added"))  # type: ignore[arg-type]
        assert len(heard._seen) == MAX_SERVICES
        assert not heard._resolving
    finally:
        heard.close()
    assert zeroconf.const._MAX_CACHE_RECORDS <= 100_000


def forged(number: int, ttl: int) -> list[zeroconf.DNSRecord]:
    """All records of a machine that is not there."""
    node_id, instance = ids()
    name, server = f"{node_id[:16]}-{instance}-4000.{SERVICE}", f"{instance}.local."
    where, unique = zeroconf.const._CLASS_IN, zeroconf.const._CLASS_IN_UNIQUE
    text = b"".join(
        bytes([len(item)]) + item for item in (b"v=1", b"id=" + node_id.encode(), b"i=" + instance.encode())
    )
    return [
        zeroconf.DNSPointer(SERVICE, zeroconf.const._TYPE_PTR, where, ttl, name),
        zeroconf.DNSService(name, zeroconf.const._TYPE_SRV, unique, ttl, 0, 0, 4000, server),
        zeroconf.DNSText(name, zeroconf.const._TYPE_TXT, unique, ttl, text),
        zeroconf.DNSAddress(server, zeroconf.const._TYPE_A, unique, ttl, bytes([127, 9, number >> 8, number & 255])),
    ]


def test_a_burst_of_forged_announcements_is_over_when_it_is_over(listen: Callable[..., Listening]) -> None:
    """However long the forged records say that they live."""
    import socket

    # A machine that is there is asked several times before it counts as gone, also where all are slow.
    often = replace(OFTEN, refresh=0.3, unseen=3.0, resolve=1.0)
    listening, known = listen(*ids(), 4000, intervals=often), listen(*ids(), 4001, intervals=often)
    assert listening.hears(known.node_id)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        for number in range(MAX_SERVICES):
            packet = zeroconf.DNSOutgoing(zeroconf.const._FLAGS_QR_RESPONSE | zeroconf.const._FLAGS_AA)
            for record in forged(number, 2**31 - 1):
                packet.add_answer_at_time(record, 0)
            for data in packet.packets():
                sender.sendto(data, ("224.0.0.251", 5353))
    assert listening.wait(lambda found: len(found) > MAX_SERVICES // 2)
    assert listening.wait(lambda found: [one.node_id for one in found] == [known.node_id])
    third = listen(*ids(), 4002)
    assert listening.hears(third.node_id) and listening.hears(known.node_id)


def found_at(node_id: str, ip: str) -> FoundNode:
    return FoundNode(node_id, "b" * 16, (Address(ip, 4000),), 1)


def test_who_gives_way_where_there_is_no_room() -> None:
    paired = {"p" * 64}
    few = {f"n{number}": found_at(f"{number:064x}", f"10.0.0.{number}") for number in range(3)}
    stranger, friend = found_at("f" * 64, "10.0.1.1"), found_at("p" * 64, "10.0.1.2")
    assert mdns._who_gives_way(stranger, few, paired) == ""
    copies = {f"n{number}": found_at("f" * 64, f"10.0.0.{number}") for number in range(4)}
    assert mdns._who_gives_way(stranger, copies, paired) is None

    full = {f"n{number}": found_at(f"{number:064x}", f"10.0.0.{number}") for number in range(MAX_SERVICES)}
    assert mdns._who_gives_way(stranger, full, paired) is None
    assert mdns._who_gives_way(friend, full, paired) in full
    crowded = {**full, **{f"n{number}": found_at(f"{number:064x}", "10.9.9.9") for number in range(5)}}
    for newcomer in (stranger, friend):
        assert mdns._who_gives_way(newcomer, crowded, paired) in {f"n{number}" for number in range(5)}
    friends = {name: found_at(f"{name:p>64}", "10.0.0.1") for name in full}
    assert mdns._who_gives_way(friend, friends, {one.node_id for one in friends.values()}) is None


def test_a_paired_machine_is_heard_where_there_is_no_room(
    listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mdns, "MAX_SERVICES", 3)
    friend, friends_instance = ids()
    listening = listen(*ids(), 4000, paired=lambda: {friend})
    strangers = [listen(*ids(), 4001 + number) for number in range(4)]
    assert listening.wait(lambda found: len(found) == 2)
    listen(friend, friends_instance, 4009)
    assert listening.hears(friend)
    assert len(listening.found) == 2 and all(one.neighbourhood.hearing().failure == "" for one in strangers)
