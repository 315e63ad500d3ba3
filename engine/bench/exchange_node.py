"""One node of ``bench exchange``: ``python -m engine.bench.exchange_node`` is told by its stdin what to measure.

Each line in and out is one message in JSON. The process ends with its stdin.
"""

from __future__ import annotations

import hashlib
import os
import queue
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import psutil

from discovery.certificates import der_of, fingerprint
from discovery.identity import Identity
from discovery.link_listener import Door
from engine.cluster.transport.accepting import Links
from engine.cluster.transport.epochs import Epoch, Member
from engine.cluster.transport.exchange import Exchange, PeerLost
from engine.cluster.transport.exchange_timing import time_exchanges
from engine.cluster.transport.registry import open_exchange
from engine.errors import ModelError
from engine.ipc.messages.ring import ExchangeName

LOOPBACK = ("127.0.0.0/8", "::1/128")
WAIT_S = 0.3
"""How long a node is kept waiting to see what that costs the processor."""
MOST_LINE = 1 << 20
END_S = 2.0
"""This process ends so long after its bench, whatever hangs."""


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own identity; it answers with :class:`NodePort`."""

    rank: int
    certificate: bytes
    private_key: bytes
    host: str = "127.0.0.1"
    """Where it listens."""


class NodePort(msgspec.Struct, frozen=True, kw_only=True):
    port: int


class NeighbourNode(msgspec.Struct, frozen=True, kw_only=True):
    certificate: bytes
    port: int
    host: str = "127.0.0.1"


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Connect ``exchanges`` with ``neighbours`` (all nodes by rank); it answers with :class:`NodeConnected`."""

    epoch: str
    key: bytes
    neighbours: list[NeighbourNode]
    exchanges: list[ExchangeName]


class NodeConnected(msgspec.Struct, frozen=True, kw_only=True):
    exchanges: list[ExchangeName]
    problems: dict[str, str]


class NodeRound(msgspec.Struct, frozen=True, kw_only=True):
