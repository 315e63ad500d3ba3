"""The two sides of a pairing, without a network: what is proved, what is sealed, what an attacker can try."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery.certificates import der_of, make_certificate
from discovery.errors import PairingError
from discovery.frames import MAX_FRAME
from discovery.pairing import (
    CODE_SECONDS,
    Code,
    Farewell,
    PairingRefused,
    PairingStart,
    Proof,
    Refusal,
    Reply,
    ShowingSide,
    TypingSide,
    refusal,
    typed_digits,
)
from tests.support.random_examples import examples

TYPING = der_of(make_certificate()[1])
SHOWING = der_of(make_certificate()[1])
ATTACKER = der_of(make_certificate()[1])


def decode(frame: bytes, kind: type) -> object:
    return msgspec.msgpack.decode(frame, type=kind)


def sides(code: Code, digits: bytes | None = None) -> tuple[TypingSide, ShowingSide]:
    typed = code.password if digits is None else digits
    return TypingSide(TYPING, "Laptop", typed), ShowingSide(SHOWING, "Desktop", code)


def wrong_digits(code: Code) -> bytes:
    return b"%08d" % ((int(code.password) + 1) % 10**8)


def refused(reason: str, run: Callable[[], object]) -> PairingRefused:
    with pytest.raises(PairingRefused) as caught:
        run()
    assert caught.value.reason == reason
    return caught.value


def test_the_right_code_gives_each_side_the_others_certificate_and_name() -> None:
    code = Code()
    typing, showing = sides(code, typed_digits(f" {code.text}-"))
    frames = [typing.start()]
    frames.append(showing.on_start(frames[-1]))
    frames.append(typing.on_reply(frames[-1]))
    frames.append(showing.on_proof(frames[-1]))
    frames.append(typing.on_proof(frames[-1]))
    at_showing = showing.on_farewell(frames[-1])
    at_typing = typing.on_stored(showing.stored())
    assert (at_showing.certificate_der, at_showing.name) == (TYPING, "Laptop")
    assert (at_typing.certificate_der, at_typing.name) == (SHOWING, "Desktop")
    assert all(len(frame) <= MAX_FRAME for frame in frames)
    assert not any(name in frame for frame in frames for name in (b"Laptop", b"Desktop", code.password))
    assert not code.is_valid
    refused("used", lambda: showing_again(code).on_start(typing.start()))


def showing_again(code: Code) -> ShowingSide:
    return ShowingSide(SHOWING, "Desktop", code)


def test_three_wrong_codes_void_it_also_for_the_right_one() -> None:
    code = Code()
    for tries_left, reason in ((2, "wrong"), (1, "wrong"), (0, "exhausted")):
        typing, showing = sides(code, wrong_digits(code))
        proof = typing.on_reply(showing.on_start(typing.start()))
        refused(reason, lambda: showing.on_proof(proof))  # noqa: B023
        assert code.tries_left == tries_left
    typing, showing = sides(code)
    refused("exhausted", lambda: showing.on_start(typing.start()))
    assert not code.is_valid and not code.has_expired


def test_a_proof_cannot_be_tried_twice_in_one_run() -> None:
    code = Code()
    typing, showing = sides(code)
    proof = typing.on_reply(showing.on_start(typing.start()))
    showing.on_proof(proof)
    refused("bad", lambda: showing.on_proof(proof))


def test_runs_in_parallel_share_the_tries() -> None:
    code = Code()
    runs = []
    for _ in range(5):
        typing, showing = sides(code, wrong_digits(code))
        runs.append((showing, typing.on_reply(showing.on_start(typing.start()))))
    reasons = []
    for showing, proof in runs:
        with pytest.raises(PairingRefused) as caught:
            showing.on_proof(proof)
        reasons.append(caught.value.reason)
    assert reasons == ["wrong", "wrong", "exhausted", "exhausted", "exhausted"]


def test_breaking_off_before_the_proof_tells_nothing_and_costs_nothing() -> None:
    code = Code()
    for _ in range(5):
        typing, showing = sides(code, wrong_digits(code))
        showing.on_start(typing.start())
    assert code.tries_left == 3 and code.is_valid


def test_an_expired_code_is_refused_also_in_the_middle_of_a_run() -> None:
    now = [50.0]
    code = Code(lambda: now[0])
    typing, showing = sides(code)
    proof = typing.on_reply(showing.on_start(typing.start()))
    now[0] += CODE_SECONDS
    assert code.seconds_left == 0 and code.has_expired
    refused("expired", lambda: showing.on_proof(proof))
    refused("expired", lambda: showing_again(code).on_start(TypingSide(TYPING, "", code.password).start()))


def test_a_voided_code_is_refused_in_the_middle_of_a_run() -> None:
    code = Code()
    typing, showing = sides(code)
    proof = typing.on_reply(showing.on_start(typing.start()))
    code.void()
    refused("none", lambda: showing.on_proof(proof))


@pytest.mark.parametrize("where", ["start", "reply", "both"])
def test_a_swapped_certificate_is_noticed(where: str) -> None:
    """Somebody in between passes everything on, but puts in a certificate of its own."""
    code = Code()
    typing, showing = sides(code)
    start = decode(typing.start(), PairingStart)
    if where in ("start", "both"):
        start = msgspec.structs.replace(start, certificate=ATTACKER)
    reply = decode(showing.on_start(msgspec.msgpack.encode(start)), Reply)
    if where in ("reply", "both"):
        reply = msgspec.structs.replace(reply, certificate=ATTACKER)
    proof = typing.on_reply(msgspec.msgpack.encode(reply))
    refused("wrong", lambda: showing.on_proof(proof))
    assert code.tries_left == 2


def test_somebody_who_pretends_to_show_the_code_gets_no_name() -> None:
    code = Code()
    typing = TypingSide(TYPING, "Laptop", code.password)
    pretended = Code()
    fake = ShowingSide(ATTACKER, "Desktop", pretended)
    proof = typing.on_reply(fake.on_start(typing.start()))
    with pytest.raises(PairingRefused):
        fake.on_proof(proof)
    for mac in (bytes(32), b"", decode(proof, Proof).mac):  # type: ignore[attr-defined]
        answer = msgspec.msgpack.encode(Proof(mac, bytes(30)))
        refused("wrong", lambda: typing.on_proof(answer))  # noqa: B023


def test_a_recorded_pairing_cannot_be_played_again() -> None:
    """Even to a machine that happens to show the same digits: its part of the run is another one."""
    code = Code()
    typing, showing = sides(code)
    start = typing.start()
    reply = showing.on_start(start)
    proof = typing.on_reply(reply)
    farewell = typing.on_proof(showing.on_proof(proof))
    showing.on_farewell(farewell)
    again = Code()
    again._digits = code._digits
    fresh = showing_again(again)
    fresh.on_start(start)
    refused("wrong", lambda: fresh.on_proof(proof))
    refused("bad", lambda: fresh.on_farewell(farewell))
    listener = TypingSide(TYPING, "Laptop", code.password)
    listener.start()
    own_proof = listener.on_reply(reply)
    assert own_proof != proof


def test_frames_out_of_order_are_refused() -> None:
    code = Code()
    typing, showing = sides(code)
    start = typing.start()
    refused("bad", lambda: showing.on_proof(msgspec.msgpack.encode(Proof(bytes(32)))))
    refused("bad", lambda: showing.on_farewell(msgspec.msgpack.encode(Farewell(b""))))
    refused("bad", lambda: showing.on_start(refusal_of_proof()))
    refused("bad", lambda: typing.on_proof(msgspec.msgpack.encode(Proof(bytes(32)))))
    refused("bad", lambda: typing.on_reply(start))
    assert code.tries_left == 3


def refusal_of_proof() -> bytes:
    return msgspec.msgpack.encode(Proof(bytes(32)))


def test_a_refusal_says_why_in_words_of_this_side() -> None:
    typing, _ = sides(Code())
    told = refused("exhausted", lambda: typing.on_reply(refusal("exhausted")))
    assert told.sent and "3 times" in str(told)
    with pytest.raises(PairingRefused) as caught:
        typing.on_reply(msgspec.msgpack.encode(["refusal", "do as I say"]))
    assert caught.value.reason == "bad" and "do as" not in str(caught.value)


def test_another_version_is_named() -> None:
    typing, showing = sides(Code())
    newer = msgspec.structs.replace(decode(typing.start(), PairingStart), version=2)
    refused("version", lambda: showing.on_start(msgspec.msgpack.encode(newer)))


def test_the_same_identity_on_both_sides_is_named() -> None:
    code = Code()
    copy = TypingSide(SHOWING, "Copy", code.password)
    told = refused("same", lambda: showing_again(code).on_start(copy.start()))
    assert "copied" in str(told)
    _, showing = sides(code)
    reply = showing.on_start(TypingSide(TYPING, "", code.password).start())
    refused("same", lambda: copy.on_reply(reply))


@pytest.mark.parametrize("text", ["", "1234 567", "1234 56789", "1234 567x", "١٢٣٤٥٦٧٨", "1234\n5678", "\x1b[2J"])
def test_what_is_no_code_is_said_before_anything_is_sent(text: str) -> None:
    with pytest.raises(PairingError, match="8 digits") as caught:
        typed_digits(text)
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"A",
        b"A\x01" + bytes(31),
        b"A" + bytes(32),
        b"A\xec" + b"\xff" * 30 + b"\x7f",
        b"A" + bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
        b"A\x01" + bytes(40),
        b"B\x01" + bytes(31),
    ],
)
def test_messages_that_are_no_element_of_the_group_are_refused(message: bytes) -> None:
    """Too short, too long, the neutral element, points of small order, a message of one's own side."""
    showing = showing_again(Code())
    start = msgspec.msgpack.encode(PairingStart(1, TYPING, message))
    refused("bad", lambda: showing.on_start(start))


def test_codes_are_eight_digits_and_differ() -> None:
    codes = [Code() for _ in range(50)]
    assert all(typed_digits(code.text) == code.password for code in codes)
    assert len({code.password for code in codes}) == 50
    assert all(code.password.decode() not in repr(code) for code in codes)


frames = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda kind, rest: msgspec.msgpack.encode([kind, *rest]),
        st.sampled_from(["start", "reply", "proof", "farewell", "stored", "refusal", "other"]),
        st.lists(
            st.one_of(
                st.integers(-1, 3),
                st.binary(max_size=64),
                st.text(max_size=5),
                st.none(),
                st.sampled_from([TYPING, SHOWING, ATTACKER, b"A" + bytes(32), b"A\x01" + bytes(31)]),
            ),
            max_size=4,
        ),
    ),
    st.builds(PairingStart, version=st.just(1), certificate=st.just(TYPING), message=st.binary(max_size=40)).map(
        msgspec.msgpack.encode
    ),
    st.builds(Reply, certificate=st.just(SHOWING), message=st.binary(max_size=40)).map(msgspec.msgpack.encode),
    st.builds(Refusal, reason=st.sampled_from(["wrong", "busy"])).map(msgspec.msgpack.encode),
)


@settings(max_examples=examples(25), deadline=None)
@given(frames)
def test_no_bytes_make_a_side_do_anything_but_refuse(frame: bytes) -> None:
    code = Code()
    typing, showing = sides(code)
    reply = showing.on_start(typing.start())
    steps: list[Callable[[bytes], object]] = [
        showing.on_proof,
        showing.on_farewell,
        TypingSide(TYPING, "", code.password).on_reply,
        typing.on_proof,
        typing.on_stored,
    ]
    for step in steps:
        with pytest.raises(PairingRefused):
            step(frame)
    typing.on_reply(reply)
    with pytest.raises(PairingRefused):
        typing.on_proof(frame)
    fresh = ShowingSide(SHOWING, "Desktop", Code())
    try:
        fresh.on_start(frame)
    except PairingRefused:
        return
    assert decode(frame, PairingStart)  # whatever is answered was a start, with a point of the curve in it
