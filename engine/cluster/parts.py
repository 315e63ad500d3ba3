"""The parts of an engine that can be replaced where the process is composed: time constants, the effort of measuring,
what the node says of itself, and an observer.

:func:`engine.host.main` takes them, and every object of the network gets them through its constructor. Nothing else
chooses them: no environment variable, no file, no message of another machine. The tests start engines with other parts
to make a fault happen at a certain moment, or to wait less for it. Nothing here decides whom a machine trusts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Moment = Literal[
    "serving", "request", "state", "offered", "piece", "received", "addresses told", "command", "layer", "checked"
]
"""Name of a moment at which the observer is called, in the thread that goes on afterwards:

- ``serving``: the process reads its first request next; there is no subject;
- ``request``: a request is about to be run; the subjects are the request and its progress callback;
- ``state``: the network's state is about to be looked at for a screen; there is no subject;
- ``offered``: a head offers weights; the subject is its node id;
- ``piece``: a piece of the weights came; the subject is its number of bytes;
- ``received``: weights came, or stopped coming, and the next transfer still waits; the subject is the head's node id;
- ``addresses told``: another library's group is about to connect; the subject is the name of the exchange;
- ``command``: a follower is about to run a command of its head; the subjects are the Follower and the command;
- ``layer``: a follower is about to run a layer of experts for its head; the subject is the layer;
- ``checked``: a machine that runs the whole model for a head is between two layers; the subject is its Answers.

The last subject of ``command``, ``layer`` and ``checked`` is an Event that is set when the epoch ends.
"""


class Observer(Protocol):
    """Called at every moment. What it raises is raised there."""

    def __call__(self, moment: Moment, *subjects: object) -> None: ...


def nobody_observes(moment: Moment, *subjects: object) -> None:
    """The observer of an engine that nobody tests."""


@dataclass(frozen=True)
class TimeConstants:
    """Intervals and timeouts of the network."""

    heartbeat_s: float = 0.5
    """Seconds between two heartbeats."""
    lost_s: float = 2.5
    """Seconds of silence after which a machine counts as gone. A killed one is noticed earlier, as its links end."""
    unanswered_s: float = 2.5
    """Seconds after which a follower that calls but cannot be called counts as unreachable."""
    refused_s: float = 1.0
    """Seconds after which a machine counts as gone if nobody listens at its port any more."""
    retry_s: float = 1.0
    """Seconds between two rounds of looking for an absent machine. A new address cuts the pause short."""
    links_again_s: float = 2.0
    """Seconds between two tries of the links of a machine that is left out because of them."""
    patience: float = 1.0
    """Factor on the seconds that machines which are there may let an exchange wait; see
    :func:`engine.cluster.contributions.exchange_timeout`."""


@dataclass(frozen=True)
class Effort:
    """The extent of measurements, of a model and while a ring is formed. It is the same on all nodes of a ring, which
    measure together."""

    link_s: float = 0.3
    """Maximum seconds for the bandwidth of a link."""
    exchange_rounds: int = 50
    """Measured rounds of an exchange."""
    rehearse: bool = True
    """Whether layers are rehearsed over the exchange, to predict the ring's speed."""
    buffer_bytes: int | None = None
    """Bytes that a benchmark reads to measure the rate of memory; None:
    :data:`engine.calibration.memory_rate.BUFFER_BYTES`."""


@dataclass(frozen=True)
class EngineParts:
    """All replaceable parts. The defaults are those of the product."""

    times: TimeConstants = field(default_factory=TimeConstants)
    effort: Effort = field(default_factory=Effort)
    greeting: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the node's greeting with values that replace its own, for tests."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the node's figures (:class:`engine.planning.ring_nodes.NodeFacts`) with values that
    replace its measurements, for tests."""
    observe: Observer = nobody_observes


THE_PRODUCT = EngineParts()
"""The parts of every engine that a person starts."""
