"""Other machines: strangers that pair, shake hands or send bytes, and paired ones that send what makes no sense."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.attacks.campaign import Attack, Attempt, Refused, plain
from benchmarks.attacks.mutating import spoiled, spoiled_tree
from engine.errors import ModelError


@contextlib.contextmanager
def pairings(home: Path) -> Iterator[Attempt]:
    """Somebody between two machines that pair changes some of their frames. Whoever is paired in the end is the other
    machine and no third one."""
    from discovery.certificates import der_of, make_certificate
    from discovery.pairing import Code, PairingRefused, ShowingSide, TypingSide, typed_digits

    typing_der, showing_der, third_der = (der_of(make_certificate()[1]) for _ in range(3))

    def attempt(draw: random.Random) -> None:
        code = Code()
        digits = typed_digits(code.text) if draw.random() < 0.9 else b"00000000"
        typing, showing = TypingSide(typing_der, "a", digits), ShowingSide(showing_der, "b", code)

        def carried(frame: bytes) -> bytes:
            match draw.randrange(8):
                case 0:
                    return spoiled(frame, draw)
                case 1:
                    return frame.replace(typing_der, third_der).replace(showing_der, third_der)
                case _:
                    return frame

        try:
            reply = showing.on_start(carried(typing.start()))
            proof = typing.on_reply(carried(reply))
            answer = showing.on_proof(carried(proof))
            farewell = typing.on_proof(carried(answer))
            theirs = showing.on_farewell(carried(farewell))
            ours = typing.on_stored(carried(showing.stored()))
        except PairingRefused as error:
            raise Refused from error
        if (ours.certificate_der, theirs.certificate_der) != (showing_der, typing_der):
            raise AssertionError("a third machine was paired")

    yield attempt


@contextlib.contextmanager
def certificates(home: Path) -> Iterator[Attempt]:
    """Changed certificates: only the very bytes that this program makes are taken."""
    from discovery.certificates import CertificateError, der_of, make_certificate, pem_of

    originals = [der_of(make_certificate()[1]) for _ in range(4)]

    def attempt(draw: random.Random) -> None:
        original = draw.choice(originals)
        if draw.random() < 0.2:
            # The signed part of one, the signature of another.
            other = draw.choice(originals)
            at = draw.randrange(len(original))
            changed = original[:at] + other[at:]
        else:
            changed = spoiled(original, draw)
        try:
            pem = pem_of(changed)
        except CertificateError as error:
            raise Refused from error
        if changed not in originals or der_of(pem) != changed:
            raise AssertionError(f"a changed certificate was taken: {changed.hex()}")

    yield attempt


@contextlib.contextmanager
def links(home: Path) -> Iterator[Attempt]:
    """Bytes on a plain link of an epoch, which are frames with a code of authenticity and spoiled ones."""
    from engine.cluster.transport.exchange import PeerLost, RingProtocolError
    from engine.cluster.transport.plain_socket import PlainSocket

    there, here = b"a" * 32, b"b" * 32
    words = [b"", b"x", b"frame" * 100, bytes(70_000)]

    def attempt(draw: random.Random) -> None:
        left, right = socket.socketpair()
        sender_end, attacker_out = socket.socketpair()
        with attacker_out:
            sender = PlainSocket(sender_end, "victim", 0, there, here)
            victim = PlainSocket(left, "right", 1, here, there)
            sent = [draw.choice(words[:3]) for _ in range(draw.randint(1, 3))]
            for word in sent:
                sender.push((word,))
            sender.flush(wait=True)
            sender.cut()
            data = b""
            while piece := attacker_out.recv(1 << 16):
                data += piece
            right.sendall(spoiled(data, draw) if draw.random() < 0.8 else draw.randbytes(draw.randint(1, 300)))
            right.close()
            got: list[bytes] = []
            try:
                while len(got) <= len(sent):
                    frame = victim.pull(1 << 16, wait=True)
                    got.append(b"" if frame is None else bytes(frame))
            except (PeerLost, RingProtocolError) as error:
                if got != sent[: len(got)]:
                    raise AssertionError("a frame that was never sent was taken") from error
                raise Refused from error
            finally:
                victim.close()
                sender.close()
        if got != sent:
            raise AssertionError("frames that were never sent were taken")

    yield attempt


@contextlib.contextmanager
def calls(home: Path) -> Iterator[Attempt]:
    """Bodies of calls of the control plane and commands of a head, as trees and as bytes."""
    from engine.cluster import commands
    from engine.cluster.membership import control_messages as messages
    from engine.cluster.transport.exchange import RingProtocolError

    greeting = messages.Greeting(
        protocol=1, version="1", node_id="n", instance="i", process="p", name="m", port=4000, listening=["127.0.0.1:1"]
    )
    load = messages.NodeLoad(process="p", memory_total=1 << 34, memory_free=1 << 33)
    bodies: list[messages.ControlBody] = [greeting, load, messages.WantedFacts(shape=None), messages.EmptyBody()]
    extend = commands.Extend(rows=0, before=0, tokens=[1, 2, 3], want_logits=True)

    def attempt(draw: random.Random) -> None:
        try:
            if draw.random() < 0.3:
                commands.decode_command(changed(commands.encode(extend), draw))
            else:
                body = draw.choice(bodies)
                messages.unpack(changed(messages.pack(body), draw), type(body))
        except (ModelError, RingProtocolError) as error:
            raise Refused from error

    def changed(data: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return spoiled(data, draw)
        tree = spoiled_tree(msgspec.msgpack.decode(data), draw)
        try:
            return msgspec.msgpack.encode(tree)
        except (OverflowError, UnicodeEncodeError):
            return json.dumps(tree, default=str).encode("utf-8", "replace")

    yield attempt


def announced(draw: random.Random) -> None:
    """The properties and addresses of an mDNS announcement."""
    from discovery.mdns import _parsed

    def value() -> bytes | None:
        return draw.choice(
            (None, b"", b"\xff\xfe", b"1", b"a" * 64, b"0" * 64, draw.randbytes(draw.choice((4, 64, 400))))
        )

    keys = (b"id", b"i", b"v")
    properties: dict[bytes, bytes | None] = {key: value() for key in keys if draw.random() < 0.9}
    if draw.random() < 0.5:
        properties |= {b"id": b"%064x" % draw.getrandbits(256), b"i": b"%016x" % draw.getrandbits(64), b"v": b"1"}
    addresses: list[Any] = ["127.0.0.1", "::1", "fe80::1%eth0", "fe80::1%" + "a" * 300, "999.1.1.1", "", "evil.example"]
    port = draw.choice((None, -1, 0, 47820, 65535, 2**40))
    if (found := _parsed(properties, port, draw.choices(addresses, k=draw.randrange(40)), [])) is None:
        raise Refused
    if any("evil" in str(one) for one in found.addresses):
        raise AssertionError("a name was taken for an address")


def pipe(draw: random.Random) -> None:
    """Frames between the screen and the engine."""
    from engine.ipc.messages import AnyRequest, Cancel, Generate, Load, ProtocolError, pack, request_reader

    sent: list[AnyRequest] = [Load(id=1, model="m"), Generate(id=2, prompt_ids=[1, 2, 3]), Cancel(id=3, target=2)]
    data = b"".join(map(pack, sent))
    reader = request_reader()
    changed = spoiled(data, draw)
    try:
        while changed:
            step = draw.randint(1, 64)
            reader.feed(changed[:step])
            changed = changed[step:]
    except ProtocolError as error:
        raise Refused from error


ATTACKS = [
    Attack("pairing with somebody between", 3_000, pairings),
    Attack("certificates", 20_000, certificates),
    Attack("links of a ring", 100_000, links),
    Attack("control plane and commands", 100_000, calls),
    Attack("announcements", 50_000, lambda home: plain(announced)),
    Attack("frames of the engine", 50_000, lambda home: plain(pipe)),
]
