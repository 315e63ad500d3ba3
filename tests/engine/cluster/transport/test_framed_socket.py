"""Frames: they arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import random
import socket
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster.transport.exchange import PeerLost, RingProtocolError
from engine.cluster.transport.framed_socket import (
    GOODBYE,
    HEADER,
    LARGEST_FRAME,
    SILENT_S,
    FramedLink,
    FramedSocket,
    _silence_options,
)
from engine.cluster.transport.plain_socket import TAG_BYTES, PlainSocket
from tests.engine.cluster.linked_nodes import make_identity
from tests.engine.cluster.socket_pairs import LIMIT_S, close_all, plain_pair, plain_victim, recorded_frames, tls_pair
from tests.support.eventually import eventually
from tests.support.random_examples import examples

IDENTITIES = (make_identity(), make_identity())
SIZES = (0, 1, 11, 12, 13, 16_383, 16_384, 65_507, 65_508, 65_509, 65_536, 70_000, 262_144, 262_145, 2_000_000)


def pair(kind: str) -> tuple[FramedSocket, FramedSocket]:
    return plain_pair() if kind == "socket" else tls_pair(IDENTITIES)


def carry(sender: FramedSocket, receiver: FramedSocket, payload: bytes, cuts: tuple[int, ...] = ()) -> bytes:
    """Send in one thread and receive in this one."""
    edges = (0, *cuts, len(payload))
    parts = [payload[start:end] for start, end in pairwise(edges)]

    def send() -> None:
        sender.push(parts)
        sender.flush(wait=True)

    thread = threading.Thread(target=send)
    thread.start()
    frame = receiver.pull(len(payload), wait=True)
    assert frame is not None
    got = bytes(frame)
    thread.join()
    return got


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_frames_of_every_size_arrive_whole_and_in_order(kind: str) -> None:
    left, right = pair(kind)
    for size in SIZES:
        payload = random.Random(size).randbytes(size)
        assert carry(left, right, payload) == payload
        assert carry(right, left, payload) == payload
    close_all(left, right)


@pytest.mark.parametrize("kind", ["socket", "tls"])
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_parts_are_joined_wherever_they_are_cut(kind: str, data: st.DataObject) -> None:
    left, right = pair(kind)
    for size in data.draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=4)):
        payload = random.Random(size).randbytes(size)
        cuts = tuple(sorted(data.draw(st.lists(st.integers(0, size), max_size=5))))
        assert carry(left, right, payload, cuts) == payload
    close_all(left, right)


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_frames_sent_ahead_of_the_reader_are_kept_apart(kind: str) -> None:
    left, right = pair(kind)
    payloads = [bytes([number]) * (number * 997) for number in range(12)]
    for payload in payloads:
        left.push((payload,))
    assert not left.unsent
    for payload in payloads:
        frame = right.pull(20_000, wait=True)
        assert frame is not None and bytes(frame) == payload
    close_all(left, right)


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_a_frame_larger_than_allowed_is_refused_before_anything_is_allocated(kind: str) -> None:
    left, right = pair(kind)
    left.push((bytes(1001),))
    with pytest.raises(RingProtocolError, match="1001 bytes where 1000 are allowed"):
        right.pull(1000, wait=True)
    close_all(left, right)


def test_an_announced_length_allocates_nothing() -> None:
    victim, attacker = plain_victim()
    attacker.sendall(HEADER.pack(LARGEST_FRAME + 1, 0))
    with pytest.raises(RingProtocolError, match="allowed"):
        victim.pull(1 << 40, wait=True)
    assert victim._large is None
    attacker.close()
    victim.close()


def test_a_frame_too_large_is_not_begun() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return LARGEST_FRAME + 1

    left, right = plain_pair()
    with pytest.raises(RingProtocolError, match="more than a link carries"):
        left.push((Huge(),))
    assert carry(left, right, b"next") == b"next"
    close_all(left, right)


@settings(max_examples=examples(30), deadline=None)
@given(noise=st.binary(min_size=1, max_size=2000))
def test_random_bytes_on_a_live_plain_link_are_refused(noise: bytes) -> None:
    victim, attacker = plain_victim()
    (first,) = recorded_frames(b"a real frame")
    attacker.sendall(first)
    frame = victim.pull(1 << 20, wait=True)
    assert frame is not None and bytes(frame) == b"a real frame"
    attacker.sendall(noise)
    attacker.close()
    with pytest.raises((RingProtocolError, PeerLost)):
        victim.pull(1 << 20, wait=True)
    victim.close()


@settings(max_examples=examples(20), deadline=None)
@given(noise=st.binary(min_size=1, max_size=2000))
def test_random_bytes_on_a_live_tls_link_are_refused(noise: bytes) -> None:
    left, right = tls_pair(IDENTITIES)
    assert carry(left, right, b"a real frame") == b"a real frame"
    left._socket.sendall(noise)
    left._socket.shutdown(socket.SHUT_WR)
    with pytest.raises((RingProtocolError, PeerLost)):
        right.pull(1 << 20, wait=True)
    close_all(left, right)


@settings(max_examples=examples(30), deadline=None)
@given(payload=st.binary(max_size=300), where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_changed_bit_anywhere_is_refused(payload: bytes, where: int, bit: int) -> None:
    victim, attacker = plain_victim()
    changed = bytearray(recorded_frames(payload)[0])
    changed[where % len(changed)] ^= 1 << bit
    attacker.sendall(changed)
    attacker.close()
    with pytest.raises((RingProtocolError, PeerLost)):
        victim.pull(1 << 20, wait=True)
    victim.close()


@settings(max_examples=examples(12), deadline=None)
@given(payload=st.binary(max_size=300), kept=st.integers(0, 10_000))
def test_a_truncated_frame_is_a_lost_peer(payload: bytes, kept: int) -> None:
    victim, attacker = plain_victim()
    (frame,) = recorded_frames(payload)
    attacker.sendall(frame[: kept % len(frame)])
    attacker.close()
    with pytest.raises(PeerLost):
        victim.pull(1 << 20, wait=True)
    victim.close()


def test_a_frame_that_is_played_again_is_refused() -> None:
    victim, attacker = plain_victim()
    (frame,) = recorded_frames(b"once")
    attacker.sendall(frame + frame)
    first = victim.pull(100, wait=True)
    assert first is not None and bytes(first) == b"once"
    with pytest.raises(RingProtocolError, match="frame 0 where 1 was expected"):
        victim.pull(100, wait=True)
    attacker.close()
    victim.close()


def test_frames_out_of_order_are_refused() -> None:
    victim, attacker = plain_victim()
    first, second = recorded_frames(b"first", b"second")
    attacker.sendall(second + first)
    with pytest.raises(RingProtocolError, match="frame 1 where 0 was expected"):
        victim.pull(100, wait=True)
    attacker.close()
    victim.close()


def test_a_renumbered_frame_does_not_pass_its_code() -> None:
    victim, attacker = plain_victim()
    (frame,) = recorded_frames(b"moved")
    (frame2,) = recorded_frames(b"moved")
    attacker.sendall(frame)
    assert victim.pull(100, wait=True) is not None
    attacker.sendall(HEADER.pack(5, 1) + frame2[HEADER.size :])
    with pytest.raises(RingProtocolError, match="changed on its way"):
        victim.pull(100, wait=True)
    attacker.close()
    victim.close()


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    victim, attacker = plain_victim()
    victim.push((b"to be reflected",))
    attacker.sendall(attacker.recv(1000))
    with pytest.raises(RingProtocolError, match="changed on its way"):
        victim.pull(100, wait=True)
    attacker.close()
    victim.close()


def test_a_node_with_another_key_is_refused() -> None:
    left, right = socket.socketpair()
    mine = PlainSocket(left, "right", 1, b"k" * 32, b"l" * 32)
    other = PlainSocket(right, "left", 0, b"x" * 32, b"k" * 32)
    other.push((b"hello",))
    with pytest.raises(RingProtocolError, match="changed on its way"):
        mine.pull(100, wait=True)
    close_all(mine, other)


def test_a_forged_goodbye_is_refused() -> None:
    victim, attacker = plain_victim()
    attacker.sendall(HEADER.pack(GOODBYE, 0) + bytes(TAG_BYTES))
    with pytest.raises(RingProtocolError, match="changed on its way"):
        victim.pull(100, wait=True)
    attacker.close()
    victim.close()


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_an_orderly_end_blames_nobody_and_a_sudden_one_names_the_rank(kind: str) -> None:
    left, right = pair(kind)
    left.close()
    with pytest.raises(PeerLost, match="left left the ring") as orderly:
        right.pull(100, wait=True)
    assert orderly.value.ranks == ()
    right.close()
    left, right = pair(kind)
    left._socket.close()
    with pytest.raises(PeerLost, match="left is gone") as sudden:
        right.pull(100, wait=True)
    assert sudden.value.ranks == (0,)
    right.close()


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_closing_from_another_thread_wakes_a_receiver(kind: str) -> None:
    left, right = pair(kind)
    link = FramedLink(left)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            link.receive(100)
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(link._in_use.locked)
    link.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len(caught) == 1
    link.close()
    with pytest.raises(PeerLost, match="closed"):
        link.send(b"too late")
    with pytest.raises(PeerLost, match="left the ring"):  # the other end was told, although a receiver waited
        right.pull(100, wait=True)
    right.close()


@pytest.mark.parametrize("kind", ["socket", "tls"])
def test_closing_from_another_thread_wakes_a_sender_nobody_reads(kind: str) -> None:
    left, right = pair(kind)
    link = FramedLink(left)
    caught: list[BaseException] = []

    def send() -> None:
        try:
            link.send(bytes(50_000_000))
        except PeerLost as error:
            caught.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    eventually(link._in_use.locked)
    link.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert len(caught) == 1
    right.close()


def test_the_buffer_of_a_large_frame_is_given_back() -> None:
    left, right = plain_pair()
    assert carry(left, right, bytes(8_000_000)) == bytes(8_000_000)
    assert right._large is not None and len(right._large) > 8_000_000
    assert carry(left, right, bytes(70_000)) == bytes(70_000)
    assert right._large is not None and len(right._large) < 100_000
    close_all(left, right)


def test_a_silent_link_ends_in_time_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Darwin has no TCP_USER_TIMEOUT; what it has instead counts seconds, and has no name in the socket module."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    assert (0x80, SILENT_S) in _silence_options("darwin")
    assert all(option != 0x80 for option, _ in _silence_options("linux"))
    names = {"TCP_KEEPINTVL": 1, "TCP_KEEPCNT": SILENT_S - 1}
    for system in ("linux", "darwin"):
        assert {(getattr(socket, name), value) for name, value in names.items()} <= set(_silence_options(system))
