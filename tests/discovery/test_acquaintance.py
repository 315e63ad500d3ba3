"""Whether another machine still knows this one: told to itself, and to nobody else."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator

import msgspec
import pytest

from discovery import acquaintance
from discovery.acquaintance import KIND, answer, is_known
from discovery.frames import Deadline, FrameError, receive_frame, send_frame
from discovery.link_listener import LinkListener, dial
from discovery.tls import client_context
from tests.discovery.discovery_machines import Machine

MakeMachine = Callable[[str], Machine]


@pytest.fixture
def asked(machine: MakeMachine) -> Iterator[tuple[Machine, LinkListener]]:
    """A machine that is asked."""
    one = machine("asked")
    listener = LinkListener.open("127.0.0.1")
    listener.register(KIND, answer(one.identity, lambda node_id: one.peers.get(node_id) is not None))
    yield one, listener
    listener.close()


def test_a_machine_learns_whether_it_was_forgotten(asked: tuple[Machine, LinkListener], machine: MakeMachine) -> None:
    other, listener = asked
    me = machine("me")
    known = lambda: is_known(me.identity, other.as_peer(), "127.0.0.1", listener.port)  # noqa: E731
    assert known() is False
    other.peers.add(me.as_peer())
    assert known() is True
    other.peers.forget(me.identity.node_id)
    assert known() is False
    listener.close()
    assert known() is None


def test_another_machine_at_that_listener_is_told_nothing(
    asked: tuple[Machine, LinkListener], machine: MakeMachine
) -> None:
    """Somebody who announces the address of another: it does not even see who asks."""
    _, listener = asked
    assert is_known(machine("me").identity, machine("elsewhere").as_peer(), "127.0.0.1", listener.port) is None


def said_to(asked: tuple[Machine, LinkListener], me: Machine, claim: Callable[[bytes], bytes]) -> bytes | None:
    """What is said to the frame that ``claim`` makes of the nonce; None: nothing."""
    other, listener = asked
    deadline = Deadline(10)
    with (
        contextlib.closing(dial(("127.0.0.1", listener.port), KIND)) as plain,
        client_context(me.identity, other.as_peer()).wrap_socket(plain) as secured,
    ):
        nonce = receive_frame(secured, deadline)
        try:
            send_frame(secured, claim(nonce), deadline)
            return receive_frame(secured, deadline)
        except (FrameError, ssl.SSLError, OSError):
            return None


def test_nobody_is_told_of_another_machine(asked: tuple[Machine, LinkListener], machine: MakeMachine) -> None:
    other, _ = asked
    friend, stranger, third = machine("friend"), machine("stranger"), machine("third")
    other.peers.add(friend.as_peer())

    def claim(certificate: bytes, key_of: Machine, about: str = "", nonce: bytes = b"") -> Callable[[bytes], bytes]:
        def make(given: bytes) -> bytes:
            question = acquaintance._question(nonce or given, about or other.identity.node_id)
            signed = acquaintance._signed(key_of.identity, question)
            return msgspec.msgpack.encode([certificate, signed])

        return make

    of_friend = friend.identity.certificate_der
    assert said_to(asked, stranger, claim(of_friend, friend)) == b"yes"  # whoever has the key is the machine
    attempts = {
        "another key": claim(of_friend, stranger),
        "another key, not paired": claim(third.identity.certificate_der, stranger),
        "a signature for another machine": claim(of_friend, friend, about=third.identity.node_id),
        "a signature from before": claim(of_friend, friend, nonce=bytes(32)),
        "no certificate": claim(b"none", friend),
        "no claim": lambda nonce: b"\xc1",
        "nothing": lambda nonce: b"",
    }
    assert {what: said_to(asked, stranger, attempt) for what, attempt in attempts.items()} == dict.fromkeys(attempts)
