"""What an engine and its envoy, and two envoys, say to each other."""

from __future__ import annotations

import struct

import msgspec

SERVICE = "/privatellm.Envoy/Exchange"
PIECE_BYTES = 1 << 20
"""A contribution travels in pieces of at most so many bytes: each is one gRPC message and one frame to the engine."""
MESSAGE_LIMIT = PIECE_BYTES + 1024
CONTROL_LIMIT = 1 << 16
"""Bytes of a frame before the exchange begins: certificates and addresses."""

FRAME = struct.Struct(">IBB")
"""Between engine and envoy: bytes of the payload, what it is, rank of the node it is from."""
MORE, LAST, BYE, LOST, CONTROL = range(5)
"""What a frame or message is: a piece with more to come, the last piece of a contribution, an orderly end, a node that
is gone (with the reason as text), or a message of :class:`EnvoySetup` and the like."""
KNOWN_KINDS = frozenset((MORE, LAST, BYE, LOST, CONTROL))


class EnvoyPeer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another node of the epoch. ``certificate`` is PEM."""

    rank: int
    node_id: str
    certificate: bytes
    name: str


class EnvoySetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first thing an envoy is told; it listens on ``addresses`` (IP) and answers with :class:`EnvoyPorts`."""

    epoch: str
    rank: int
    certificate: bytes
    private_key: bytes
    peers: list[EnvoyPeer]
    addresses: list[str]
    seconds: float


class EnvoyPorts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it listens, by IP address."""

    ports: dict[str, int]


class EnvoyTargets(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The other envoys that this one dials, ``HOST:PORT`` by rank; it answers with :class:`EnvoyReady`."""

    targets: dict[int, str]


class EnvoyReady(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connected to every peer; or not, and why."""

    problem: str = ""
