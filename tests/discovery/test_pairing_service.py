"""Pairing over live sockets: the right code, every wrong way, and whatever else comes through the link listener."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from discovery import pairing_service
from discovery.certificates import der_of, make_certificate
from discovery.errors import LinkListenerError, PairingError, PeersError
from discovery.frames import Deadline, FrameError, receive_frame, send_frame
from discovery.link_listener import LinkListener, dial
from discovery.pairing import CODE_SECONDS, PairingRefused, PairingStart, Proof, Reply
from discovery.pairing_service import KIND, pair_with
from discovery.peers import Peer
from tests.discovery.discovery_machines import Machine, Shower
from tests.support.eventually import eventually

MakeMachine = Callable[[str], Machine]


def pair(typing: Machine, shower: Shower, code: str, port: int | None = None) -> Peer:
    return pair_with(
        "127.0.0.1",
        port or shower.listener.port,
        code,
        typing.identity,
        typing.peers,
        typing.name,
        address=f"127.0.0.1:{shower.listener.port - 1}",
    )


def wrong(code: str) -> str:
    return f"{(int(code.replace(' ', '')) + 1) % 10**8:08d}"


def test_pairing_stores_each_in_the_others_file(shower: Shower, machine: MakeMachine) -> None:
    laptop = machine("Laptop")
    peer = pair(laptop, shower, shower.service.show().text)
    assert (peer.name, peer.node_id) == ("Kitchen Mac", shower.machine.identity.node_id)
    assert laptop.peers.all() == [peer]
    assert peer.addresses == [f"127.0.0.1:{shower.listener.port - 1}"]
    eventually(lambda: len(shower.paired) == 1)
    assert shower.machine.peers.all() == shower.paired
    assert (shower.paired[0].name, shower.paired[0].node_id) == ("Laptop", laptop.identity.node_id)
    assert shower.failed == [] and shower.service.code is None


def test_without_a_code_nobody_is_paired(shower: Shower, machine: MakeMachine) -> None:
    with pytest.raises(PairingRefused, match="shows no code"):
        pair(machine("Laptop"), shower, "1234 5678")
    assert shower.failed == [] and shower.machine.peers.all() == []


def test_three_wrong_codes_and_then_the_right_one(shower: Shower, machine: MakeMachine) -> None:
    laptop = machine("Laptop")
    code = shower.service.show().text
    for match in ("code is wrong", "code is wrong", "3 times"):
        with pytest.raises(PairingRefused, match=match):
            pair(laptop, shower, wrong(code))
    with pytest.raises(PairingRefused, match="3 times"):
        pair(laptop, shower, code)
    eventually(lambda: len(shower.failed) >= 3)
    assert [tries_left for _, tries_left in shower.failed[:3]] == [2, 1, 0]
    assert "2 more tries" in shower.failed[0][0] and "void" in shower.failed[2][0]
    assert laptop.peers.all() == shower.machine.peers.all() == []
    assert pair(laptop, shower, shower.service.show().text).name == "Kitchen Mac"


def test_a_code_pairs_once(shower: Shower, machine: MakeMachine) -> None:
    code = shower.service.show().text
    pair(machine("Laptop"), shower, code)
    with pytest.raises(PairingRefused, match="used already"):
        pair(machine("Thief"), shower, code)
    assert [peer.name for peer in shower.machine.peers.all()] == ["Laptop"]


def test_an_old_code_is_refused(shower: Shower, machine: MakeMachine) -> None:
    code = shower.service.show()
    shower.now[0] += CODE_SECONDS + 1
    assert shower.service.code is None
    with pytest.raises(PairingRefused, match="older than 2 minutes"):
        pair(machine("Laptop"), shower, code.text)


def test_a_new_code_replaces_the_old_one_and_hiding_voids_it(shower: Shower, machine: MakeMachine) -> None:
    old = shower.service.show().text
    new = shower.service.show().text
    if old != new:
        with pytest.raises(PairingRefused, match="wrong"):
            pair(machine("Laptop"), shower, old)
    shower.service.hide()
    with pytest.raises(PairingRefused, match="shows no code"):
        pair(machine("Laptop"), shower, new)


def test_pairing_again_after_forgetting(shower: Shower, machine: MakeMachine) -> None:
    laptop = machine("Laptop")
    for _ in range(2):
        peer = pair(laptop, shower, shower.service.show().text)
        laptop.peers.forget(peer.node_id)
    eventually(lambda: len(shower.paired) == 2)
    assert len(shower.machine.peers.all()) == 1


def test_a_file_that_cannot_be_written_pairs_nobody(
    shower: Shower, machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = machine("Laptop")

    def full(peer: Peer) -> None:
        raise PeersError("The paired machines cannot be written (No space left on device): make room.")

    monkeypatch.setattr(shower.machine.peers, "add", full)
    with pytest.raises(PairingError, match="broken off"):
        pair(laptop, shower, shower.service.show().text)
    eventually(lambda: shower.failed)
    assert "No space" in shower.failed[0][0]
    assert laptop.peers.all() == []


def test_nobody_there(machine: MakeMachine, shower: Shower) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkListenerError, match=f"Nobody answers at 127.0.0.1 port {port}"):
        pair(machine("Laptop"), shower, "1234 5678", port)


@contextlib.contextmanager
def between(target: int, change: Callable[[bytes], bytes]) -> Iterator[LinkListener]:
    """A machine in between that passes every frame on, and may change it."""

    def handle(victim: socket.socket, body: bytes, address: tuple[str, int]) -> None:
        deadline = Deadline(10)
        onward = dial(("127.0.0.1", target), KIND)
        with contextlib.closing(victim), contextlib.closing(onward), contextlib.suppress(FrameError):
            while True:
                send_frame(onward, change(receive_frame(victim, deadline)), deadline)
                send_frame(victim, change(receive_frame(onward, deadline)), deadline)

    listener = LinkListener.open("127.0.0.1")
    listener.register(KIND, handle)
    yield listener
    listener.close()


def test_a_machine_in_between_that_swaps_certificates_is_noticed_by_both(shower: Shower, machine: MakeMachine) -> None:
    attacker = der_of(make_certificate()[1])

    def swap(frame: bytes) -> bytes:
        decoded = msgspec.msgpack.decode(frame)
        if decoded[0] in ("start", "reply"):
            decoded[2 if decoded[0] == "start" else 1] = attacker
        return msgspec.msgpack.encode(decoded)

    laptop = machine("Laptop")
    with between(shower.listener.port, swap) as listener, pytest.raises(PairingRefused, match="wrong"):
        pair(laptop, shower, shower.service.show().text, listener.port)
    assert laptop.peers.all() == shower.machine.peers.all() == []
    eventually(lambda: [tries_left for _, tries_left in shower.failed] == [2])


def test_a_recorded_pairing_is_of_no_use_and_shows_no_secret(shower: Shower, machine: MakeMachine) -> None:
    recorded: list[bytes] = []

    def record(frame: bytes) -> bytes:
        recorded.append(frame)
        return frame

    laptop = machine("Laptop")
    code = shower.service.show()
    with between(shower.listener.port, record) as listener:
        pair(laptop, shower, code.text, listener.port)
    everything = b"".join(recorded)
    for secret in (code.password, b"Laptop", b"Kitchen Mac", laptop.identity.key_pem[30:90]):
        assert secret not in everything
    shower.machine.peers.forget(laptop.identity.node_id)
    for new_code in (False, True):
        if new_code:
            shower.service.show()
        deadline = Deadline(10)
        with contextlib.closing(dial(("127.0.0.1", shower.listener.port), KIND)) as connection:
            for frame in recorded[0::2]:
                with contextlib.suppress(FrameError):
                    send_frame(connection, frame, deadline)
            with contextlib.suppress(FrameError):
                while True:
                    assert b"stored" not in receive_frame(connection, deadline)
    assert shower.machine.peers.all() == []


def test_before_the_proof_an_unpaired_machine_gets_a_certificate_and_nothing_else(shower: Shower) -> None:
    """And the name only afterwards, sealed: whoever guesses wrongly does not even learn whom it tried."""
    shower.service.show()
    stranger = der_of(make_certificate()[1])
    message = b"A\x01" + bytes(31)  # the neutral element
    deadline = Deadline(10)
    with contextlib.closing(dial(("127.0.0.1", shower.listener.port), KIND)) as connection:
        send_frame(connection, msgspec.msgpack.encode(PairingStart(1, stranger, message)), deadline)
        assert msgspec.msgpack.decode(receive_frame(connection, deadline)) == ["refusal", "bad"]
    from discovery.pairing import TypingSide

    side = TypingSide(stranger, "Stranger", b"00000000")
    with contextlib.closing(dial(("127.0.0.1", shower.listener.port), KIND)) as connection:
        send_frame(connection, side.start(), deadline)
        reply = receive_frame(connection, deadline)
        decoded = msgspec.msgpack.decode(reply, type=Reply)
        assert decoded.certificate == shower.machine.identity.certificate_der and len(decoded.message) == 33
        assert b"Kitchen" not in reply
        send_frame(connection, msgspec.msgpack.encode(Proof(bytes(32))), deadline)
        assert msgspec.msgpack.decode(receive_frame(connection, deadline)) == ["refusal", "wrong"]
        with pytest.raises(FrameError, match="closed"):
            receive_frame(connection, deadline)


def silent(shower: Shower) -> socket.socket:
    """Somebody who begins to pair, and says no more."""
    from discovery.pairing import TypingSide

    stranger = TypingSide(der_of(make_certificate()[1]), "", b"00000000")
    connection = dial(("127.0.0.1", shower.listener.port), KIND)
    send_frame(connection, stranger.start(), Deadline(10))
    receive_frame(connection, Deadline(10))
    return connection


def test_a_silent_one_does_not_keep_anybody_from_pairing(
    shower: Shower, machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing_service, "STEP_SECONDS", 60.0)
    code = shower.service.show()
    with contextlib.closing(silent(shower)), contextlib.closing(silent(shower)):
        assert pair(machine("Laptop"), shower, code.text).name == "Kitchen Mac"
    assert shower.failed == []


def test_slow_ones_are_cut_off_and_take_no_more_than_their_places(
    shower: Shower, machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing_service, "_SIDE_WAITS", 0.1)
    monkeypatch.setattr(pairing_service, "STEP_SECONDS", 60.0)
    code = shower.service.show()
    with contextlib.ExitStack() as opened:
        for _ in range(pairing_service._MOST_EACH):
            opened.enter_context(contextlib.closing(silent(shower)))
        with pytest.raises(PairingRefused, match="somebody else"):
            pair(machine("Other"), shower, code.text)
        # Another address still has places.
        assert shower.service._enter("10.0.0.9")
        shower.service._leave("10.0.0.9")
    monkeypatch.setattr(pairing_service, "STEP_SECONDS", 0.5)
    eventually(lambda: not shower.service._runs)
    with contextlib.closing(silent(shower)) as slow, pytest.raises(FrameError, match="closed"):
        receive_frame(slow, Deadline(30))
    monkeypatch.setattr(pairing_service, "STEP_SECONDS", 30.0)
    assert pair(machine("Laptop"), shower, code.text).name == "Kitchen Mac"


def test_random_bytes_harm_nobody(shower: Shower, machine: MakeMachine) -> None:
    """Through the live listener: as a preamble, as a frame, as a frame of an announced but wrong length."""
    numbers = random.Random(7)
    code = shower.service.show()
    failures: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        for round_ in range(90):
            junk = numbers.randbytes(numbers.choice((0, 1, 2, 8, 50, 2000, 9000)))
            with contextlib.suppress(OSError):
                if round_ % 3 == 0:
                    with socket.create_connection(("127.0.0.1", shower.listener.port), timeout=120) as connection:
                        connection.sendall(junk)
                else:
                    with contextlib.closing(dial(("127.0.0.1", shower.listener.port), KIND)) as connection:
                        prefix = len(junk).to_bytes(2, "big") if round_ % 3 == 1 else b""
                        connection.sendall(prefix + junk)
        assert pair(machine("Laptop"), shower, code.text).name == "Kitchen Mac"
        eventually(lambda: not any(thread.name == "link-connection" for thread in threading.enumerate()))
    finally:
        threading.excepthook = before
    assert failures == []
    assert shower.failed == []
