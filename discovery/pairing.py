"""First contact: SPAKE2 with a short code shown on one screen and typed on the other, bound to both certificates.

The two sides are state machines over bytes; nothing here touches a socket. The order of frames:

    typing side                                        showing side
    PairingStart(certificate, SPAKE2 message)   ->
                                                <-     Reply(certificate, SPAKE2 message)
    Proof(MAC)                                  ->     (a wrong one costs a try)
                                                <-     Proof(MAC, name, sealed)
    Farewell(name, sealed)                      ->     (stored)
                                                <-     Stored()                           (stored)

Whoever does not know the code learns one thing from one run: whether one guess was right. Names travel sealed, and only
to somebody who has proved the code. Both proofs cover both certificates and both SPAKE2 messages, so that nobody in
between can put in a certificate of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B

from discovery import certificates
from discovery.errors import PairingError
from discovery.identity import RENEWAL
from discovery.names import clean_name

PAIRING_VERSION = 1
CODE_SECONDS = 120.0
CODE_TRIES = 3
_DIGITS = 8
_ID_TYPING = b"privatellm pairing, typing side"
_ID_SHOWING = b"privatellm pairing, showing side"
_MESSAGE = 33
"""Bytes of a SPAKE2 message: the side, and a point on the curve."""
_NONCE = bytes(12)
"""Nonce of the seal: every key seals only one message."""

Reason = Literal["none", "expired", "exhausted", "used", "busy", "wrong", "version", "same", "bad"]

_REASONS: dict[Reason, str] = {
    "none": "The other machine shows no code now: make one there, then type it here.",
    "expired": f"The code is older than {CODE_SECONDS / 60:.0f} minutes: make a new one on the other machine.",
    "exhausted": f"The code was typed wrongly {CODE_TRIES} times: make a new one on the other machine.",
    "used": "The code was used already: make a new one on the other machine.",
    "busy": "The other machine is being paired by somebody else at this moment: try again in a few seconds.",
    "wrong": "The code is wrong: compare it with the other screen and type it again.",
    "version": "The other machine runs a version of privatellm that pairs differently: update the older of the two.",
    "same": "Both machines have the same identity: the files of one were copied from the other (or this is one and the "
    f"same machine); give one a new identity: {RENEWAL}.",
    "bad": "The other machine sent something that is no pairing of this program: update the older of the two.",
}


class PairingRefused(PairingError):
    """One side ended the pairing. ``reason`` classifies it. ``sent``: whether the other side sent it."""

    def __init__(self, reason: Reason, sent: bool = False) -> None:
        super().__init__(_REASONS[reason])
        self.reason: Reason = reason
        self.sent = sent


class PairingStart(msgspec.Struct, frozen=True, tag="start", array_like=True):
    version: int
    certificate: bytes
    message: bytes


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    certificate: bytes
    message: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof", array_like=True):
    mac: bytes
    name: bytes = b""


class Farewell(msgspec.Struct, frozen=True, tag="farewell", array_like=True):
    name: bytes


class Stored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    pass


class Refusal(msgspec.Struct, frozen=True, tag="refusal", array_like=True):
    reason: Reason


T = TypeVar("T", PairingStart, Reply, Proof, Farewell, Stored)
AnyFrame = PairingStart | Reply | Proof | Farewell | Stored | Refusal
_decoder = msgspec.msgpack.Decoder(AnyFrame)
_encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class PairedPeer:
    """The machine that proved the code. ``name`` is foreign text, made harmless."""

    certificate_der: bytes
    name: str

    @property
    def node_id(self) -> str:
        return certificates.fingerprint(self.certificate_der)


class Code:
    """A one-time code: eight digits, two minutes, three tries over all connections. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._digits = "".join(secrets.choice("0123456789") for _ in range(_DIGITS))
        self._end = clock() + CODE_SECONDS
        self._tries_left = CODE_TRIES
        self._used = False
        self._void = False
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"Code({self.tries_left} tries, {self.seconds_left:.0f} s)"

    @property
    def text(self) -> str:
        """The code as it is shown: ``1234 5678``."""
        return f"{self._digits[:4]} {self._digits[4:]}"

    @property
    def password(self) -> bytes:
        return self._digits.encode()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end - self._clock())

    @property
    def tries_left(self) -> int:
        return self._tries_left

    @property
    def is_valid(self) -> bool:
        return self._why_not() is None

    @property
    def has_expired(self) -> bool:
        """Whether nothing but its age ended it."""
        return self._why_not() == "expired"

    def void(self) -> None:
        """End the code, also for a pairing that has begun."""
        self._void = True

    def check(self) -> None:
        """Raises PairingRefused if the code cannot be used any more."""
        reason = self._why_not()
        if reason is not None:
            raise PairingRefused(reason)

    def judge(self, right: Callable[[], bool]) -> None:
        """Spend one try, whose comparison gave ``right``. A right one uses up the code. Raises PairingRefused."""
        with self._mutex:
            self.check()
            self._tries_left -= 1
            if not right():
                raise PairingRefused("wrong" if self._tries_left else "exhausted")
            self._used = True

    def _why_not(self) -> Reason | None:
        if self._used:
            return "used"
        if self._tries_left <= 0:
            return "exhausted"
        if self._void:
            return "none"
        return "expired" if self._clock() >= self._end else None


def typed_digits(text: str) -> bytes:
    """The password in what a person typed. Raises PairingError if it cannot be a code."""
    digits = "".join(character for character in text if character not in " -\t\u00a0\u202f")
    if len(digits) != _DIGITS or not (digits.isascii() and digits.isdigit()):
        raise PairingError(f"“{clean_name(text)}” is not a code: it has {_DIGITS} digits, as in 1234 5678.")
    return digits.encode()


class TypingSide:
    """The machine on which the code is typed.

    Every method takes the other side's frame and returns the next one. All raise PairingRefused, after which the object
    cannot be used any more.
    """

    def __init__(self, certificate_der: bytes, name: str, digits: bytes) -> None:
        self._mine = certificate_der
        self._name = name
        self._spake = SPAKE2_A(digits, idA=_ID_TYPING, idB=_ID_SHOWING)
        self._message: bytes = self._spake.start()
        self._theirs = b""
        self._keys: _Keys | None = None
        self._their_name: str | None = None

    def start(self) -> bytes:
        return _encode(PairingStart(PAIRING_VERSION, self._mine, self._message))

    def on_reply(self, frame: bytes) -> bytes:
        reply = _expect(frame, Reply)
        _check_certificate(reply.certificate, self._mine)
        secret = _finish(self._spake, reply.message)
        self._theirs = reply.certificate
        self._keys = _Keys(secret, _transcript(self._mine, self._theirs, self._message, reply.message))
        return _encode(Proof(self._keys.typing_proof))

    def on_proof(self, frame: bytes) -> bytes:
        proof = _expect(frame, Proof)
        keys = self._known_keys()
        if not hmac.compare_digest(proof.mac, keys.showing_proof):
            raise PairingRefused("wrong")
        self._their_name = keys.open_showing(proof.name)
        return _encode(Farewell(keys.seal_typing(self._name)))

    def on_stored(self, frame: bytes) -> PairedPeer:
        _expect(frame, Stored)
        if self._their_name is None:
            raise PairingRefused("bad")
        return PairedPeer(self._theirs, self._their_name)

    def _known_keys(self) -> _Keys:
        if self._keys is None:
            raise PairingRefused("bad")
        return self._keys


class ShowingSide:
    """The machine that shows the code. As :class:`TypingSide`."""

    def __init__(self, certificate_der: bytes, name: str, code: Code) -> None:
        self._mine = certificate_der
        self._name = name
        self._code = code
        self._theirs = b""
        self._keys: _Keys | None = None
        self._proved = False

    def on_start(self, frame: bytes) -> bytes:
        start = _expect(frame, PairingStart)
        if start.version != PAIRING_VERSION:
            raise PairingRefused("version")
        self._code.check()
        _check_certificate(start.certificate, self._mine)
        spake = SPAKE2_B(self._code.password, idA=_ID_TYPING, idB=_ID_SHOWING)
        message: bytes = spake.start()
        secret = _finish(spake, start.message)
        self._theirs = start.certificate
        self._keys = _Keys(secret, _transcript(self._theirs, self._mine, start.message, message))
        return _encode(Reply(self._mine, message))

    def on_proof(self, frame: bytes) -> bytes:
        proof = _expect(frame, Proof)
        keys = self._keys
        if keys is None or self._proved:
            raise PairingRefused("bad")
        self._code.judge(lambda: hmac.compare_digest(proof.mac, keys.typing_proof))
        self._proved = True
        return _encode(Proof(keys.showing_proof, keys.seal_showing(self._name)))

    def on_farewell(self, frame: bytes) -> PairedPeer:
        """The other machine, which must be stored. Then :meth:`stored` is sent."""
        farewell = _expect(frame, Farewell)
        if self._keys is None or not self._proved:
            raise PairingRefused("bad")
        return PairedPeer(self._theirs, self._keys.open_typing(farewell.name))

    def stored(self) -> bytes:
        return _encode(Stored())


def refusal(reason: Reason) -> bytes:
    """The frame that ends a pairing, with the reason."""
    return _encode(Refusal(reason))


class _Keys:
    """The keys that both sides derive: a MAC key and a sealing key for each direction."""

    def __init__(self, secret: bytes, transcript: bytes) -> None:
        material = HKDF(algorithm=hashes.SHA256(), length=4 * 32, salt=transcript, info=b"privatellm pairing v1")
        okm = material.derive(secret)
        self._transcript = transcript
        self.typing_proof = hmac.digest(okm[:32], b"typing" + transcript, "sha256")
        self.showing_proof = hmac.digest(okm[32:64], b"showing" + transcript, "sha256")
        self._typing = ChaCha20Poly1305(okm[64:96])
        self._showing = ChaCha20Poly1305(okm[96:])

    def seal_typing(self, name: str) -> bytes:
        return self._typing.encrypt(_NONCE, clean_name(name).encode(), self._transcript)

    def seal_showing(self, name: str) -> bytes:
        return self._showing.encrypt(_NONCE, clean_name(name).encode(), self._transcript)

    def open_typing(self, sealed: bytes) -> str:
        return _opened(self._typing, sealed, self._transcript)

    def open_showing(self, sealed: bytes) -> str:
        return _opened(self._showing, sealed, self._transcript)


def _opened(cipher: ChaCha20Poly1305, sealed: bytes, transcript: bytes) -> str:
    try:
        return clean_name(cipher.decrypt(_NONCE, sealed, transcript).decode())
    except (InvalidTag, UnicodeDecodeError) as error:
        raise PairingRefused("bad") from error


def _transcript(typing: bytes, showing: bytes, typing_message: bytes, showing_message: bytes) -> bytes:
    """A digest [32 bytes] of everything both sides sent. Each part has its length, so none can pass for another."""
    whole = hashlib.sha256(b"privatellm pairing v%d" % PAIRING_VERSION)
    for part in (typing, showing, typing_message, showing_message):
        whole.update(len(part).to_bytes(4, "big") + part)
    return whole.digest()


def _expect(frame: bytes, kind: type[T]) -> T:
    try:
        decoded = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PairingRefused("bad") from error
    if isinstance(decoded, Refusal):
        raise PairingRefused(decoded.reason, sent=True)
    if not isinstance(decoded, kind):
        raise PairingRefused("bad")
    return decoded


def _check_certificate(theirs: bytes, mine: bytes) -> None:
    if theirs == mine:
        raise PairingRefused("same")
    try:
        certificates.pem_of(theirs)
    except certificates.CertificateError as error:
        raise PairingRefused("bad") from error


def _finish(spake: SPAKE2_A | SPAKE2_B, message: bytes) -> bytes:
    if len(message) != _MESSAGE:  # the library leaves this to an assertion, which an optimised interpreter skips
        raise PairingRefused("bad")
    try:
        secret: bytes = spake.finish(message)
    except Exception as error:  # the library raises several kinds for foreign bytes that are no point of the curve
        raise PairingRefused("bad") from error
    return secret
